# SPDX-License-Identifier: Apache-2.0
"""What a person sees of `dsd demo` and `dsd decode`, in a pseudo-terminal and in a file, line by line."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builtin_interfaces.msg import Duration, Time

from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, RoundStats
from dsd_ros.bringup.systems import DEMO_INSTRUCTION
from dsd_ros.cli import story as stories
from dsd_ros.cli.demo_run import DemoReport
from dsd_ros.cli.story import Story

INFO = "[INFO] [1795748674.206320509] [draft_node]: mode stream begins"
WARN = "[WARN] [1795748674.206320509] [bridge_node]: the link broke"
ERROR = "[ERROR] [1795748674.206320509] [simulator_node]: no renderer"


def progress(stamp: int, mode: str, rounds: list[RoundStats]) -> list[ReplyProgress]:
    """The messages of a reply that grows pass by pass, or round by round."""
    text, messages = "", []
    for one in rounds:
        text += "".join(one.gained)
        messages.append(ReplyProgress(text=text, mode=mode, last_round=one))
    messages.append(ReplyProgress(text=text, mode=mode, done=True))
    for message in messages:
        message.header.stamp.sec = stamp
    return messages


def a_run(story: Story) -> None:
    """A demo of three steps: a stream's passes, a tree, and one of the robot's way back."""
    with story:
        story.start("starting 6 processes")
        story.hear("draft_node", INFO)
        story.hear("bridge_node", WARN)
        story.hear("simulator_node", ERROR)
        assert story.wait_for(["the camera", "draft_node"])
        assert not story.wait_for([])
        story.begin("ready after 3.0 s: find the silver bottle", "stream")
        story.hear("bridge_node", WARN)
        story.hear("view_node", "[INFO] [1.0] [view_node]: live page at http://127.0.0.1:9090/")
        passes = [
            RoundStats(drafted=4, depth=1, accepted=2, gained=["The", " way", " is"], rejected=[" no", " box"]),
            RoundStats(drafted=1, depth=1, accepted=1, gained=[" open.", " Action:"]),
            RoundStats(gained=[" forward 50 cm"]),
        ]
        for message in progress(7, "stream", passes):
            story.progress(message)
        stats = DecodeStats(mode="stream", tokens=6, rounds=3, total_time=Duration(nanosec=500_000_000))
        stats.draft_share, stats.sooner = 0.5, 1.4
        action = NavAction(step=1, kind=NavAction.FORWARD, distance=0.5, reasoning="The way is open.", verified=True)
        action.observation_stamp = Time(sec=7)
        story.step(action, stats)
        tree = [RoundStats(drafted=6, depth=2, accepted=1, gained=["Action:", " stop"], rejected=["a", "b", "c"])]
        for message in progress(8, "mc-dsd", tree):
            story.progress(message)
        stats = DecodeStats(
            mode="mc-dsd", tokens=2, rounds=1, draft_share=0.5, total_time=Duration(nanosec=250_000_000)
        )
        story.step(NavAction(step=2, observation_stamp=Time(sec=8), verified=True, reasoning="There."), stats)
        story.step(NavAction(step=3, reasoning="On the way back.", retracing=True), DecodeStats())
        report = DemoReport(reached=True, distance_m=0.31, seconds=10.1, outcome="ARRIVED", message="Here it is.")
        report.mode = "stream"
        report.steps, report.path = [{"tokens": 6, "rounds": 3}, {"tokens": 2, "rounds": 1}], [[0, 0, 0], [3, 4, 0]]
        report.speedup_estimate = story.speedup()
        story.end(report, "runs/one")
        story.hear("bridge_node", WARN)
        story.news("bridge_node", "ended")


HEAD = [
    "starting 6 processes; the nodes' log: LOG",
    "simulator_node: no renderer",
    "ready after 3.0 s: find the silver bottle",
]
TAIL = [
    "step  3: stop                   On the way back.",
    "REACHED after 10.1 s and 2 actions, 0.31 m from the target, 0 collisions. ARRIVED: Here it is.",
    "  walked 5.0 m; decoded 8 tokens in 4 passes, 50 % from drafts",
    "  decoding was about 1.4 times as fast as the target alone (an estimate: each token from a draft saved a pass)",
    "  bag: runs/one (dsd inspect runs/one)",
    "  live page at http://127.0.0.1:9090/",
    "  the nodes' log: LOG",
]
PLAIN = [
    *HEAD,
    "bridge_node: the link broke",
    "live page at http://127.0.0.1:9090/",
    "step  1: forward 50 cm          6 tokens in 3 passes, 0.50 s     | The way is open.",
    "step  2: stop                   2 tokens in 1 round, 0.25 s      | There.",
    *TAIL,
]
COLOURED = [
    *HEAD,
    "accepted drafts, rejected drafts, the target's own tokens",
    "bridge_node: the link broke",
    "live page at http://127.0.0.1:9090/",
    "step  1: forward 50 cm          The way no box is open. Action: forward 50 cm  6 tokens in 3 passes, 0.50 s",
    "step  2: stop                   Action:[3] stop  2 tokens in 1 round, 0.25 s",
    *TAIL,
]


class Screen:
    """What a terminal shows after some output: text, carriage returns, line feeds, cursor up, erased lines, colours."""

    def __init__(self, output: str) -> None:
        self.lines, self.row, self.column = [""], 0, 0
        for text in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
            self._take(text)

    def _take(self, text: str) -> None:
        if text == "\n":
            self.row += 1
            self.lines += [""] * (self.row == len(self.lines))
        elif text == "\r":
            self.column = 0
        elif text.endswith("A"):
            self.row -= int(text[2:-1])
        elif text == "\x1b[2K":
            self.lines[self.row] = ""
        elif text[0] == "\x1b":
            assert text[-1] in "mhl", f"the screen does not know {text!r}"
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + text + line[self.column + len(text) :]
            self.column += len(text)

    def text(self) -> list[str]:
        lines = [line.rstrip() for line in self.lines]
        return lines[: max((n for n, line in enumerate(lines, 1) if line), default=0)]


def in_a_terminal(command: list[str], limit: float = 300, **environment: str) -> tuple[int, str]:
    """A command's exit code and its output in a pseudo-terminal of 160 columns."""
    ours, theirs = pty.openpty()
    own = {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40", **environment}
    given = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLORTERM")}
    run = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=given | own)
    os.close(theirs)
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    return run.wait(limit), output.decode()


def told(tmp_path: Path, **environment: str) -> str:
    """The output of `a_run` in a pseudo-terminal."""
    program = "from test_story import Story, a_run; a_run(Story())"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    code, output = in_a_terminal(
        [sys.executable, "-c", program], PYTHONPATH=path, XDG_CACHE_HOME=str(tmp_path), **environment
    )
    assert code == 0, output
    return re.sub(rf"{re.escape(str(tmp_path))}\S+", "LOG", output)


def test_a_terminal_shows_the_story_with_its_tokens_in_colour(tmp_path):
    output = told(tmp_path)
    assert Screen(output).text() == COLOURED
    assert "starting, 0 s: waiting for the camera, draft_node (the draft model, and a session" in output
    assert "\x1b[32mThe\x1b[0m\x1b[32m way\x1b[0m" in output  # accepted
    assert "\x1b[9;31m no\x1b[0m\x1b[9;31m box\x1b[0m" in output  # rejected, struck out
    assert "\x1b[94m is\x1b[0m" in output  # the target's own
    log = next(tmp_path.glob("dsd_ros/demo/*.log")).read_text().splitlines()
    assert log == [
        f"[draft_node] {INFO}", f"[bridge_node] {WARN}", f"[simulator_node] {ERROR}", f"[bridge_node] {WARN}",
        "[view_node] [INFO] [1.0] [view_node]: live page at http://127.0.0.1:9090/", f"[bridge_node] {WARN}",
        "[bridge_node] ended",
    ]  # fmt: skip


def test_no_color_is_the_story_in_plain_text(tmp_path):
    output = told(tmp_path, NO_COLOR="1")
    assert Screen(output).text() == PLAIN
    assert not re.search(r"\x1b\[[\d;]*m", output)


def test_a_file_gets_the_story_in_plain_text(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a_run(Story())
    lines = re.sub(rf"{re.escape(str(tmp_path))}\S+", "LOG", capsys.readouterr().out).splitlines()
    assert lines == PLAIN


def test_verbose_shows_what_the_nodes_log(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a_run(Story(verbose=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        f"[draft_node] {INFO}", f"[bridge_node] {WARN}", f"[simulator_node] {ERROR}", f"[bridge_node] {WARN}",
        "[view_node] [INFO] [1.0] [view_node]: live page at http://127.0.0.1:9090/",
    ]  # fmt: skip


def test_old_logs_go_and_an_unwritable_cache_is_no_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "dsd_ros" / "demo"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"20200101-{number:06}-1.log").write_text("")
    with Story():
        pass
    assert len(list(folder.glob("*.log"))) == 20
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with Story() as story:
        assert story.log.exists()


def test_only_a_streams_drafts_have_a_speed_to_compare(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with Story() as story:
        for mode in ("ar", "dsd"):
            story.step(NavAction(verified=True), DecodeStats(mode=mode, tokens=6, rounds=6, total_time=Duration(sec=1)))
            assert story.speedup() is None
        for sooner, seconds in ((1.5, 1), (1.25, 3)):
            stats = DecodeStats(mode="stream", tokens=6, rounds=2, sooner=sooner, total_time=Duration(sec=seconds))
            story.step(NavAction(verified=True), stats)
        assert story.speedup() == pytest.approx((1.5 + 3 * 1.25) / 4)


def test_a_childs_last_words_leave_out_the_preamble_of_ros(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with Story() as story:
        assert story.last_words("simulator_node") == ""
        story.hear("simulator_node", ERROR)
        story.hear("simulator_node", "")
        assert story.last_words("simulator_node") == "no renderer"
    assert stories.Story is Story


def test_decode_colours_its_tokens_and_explains_itself_in_plain_words(models, picture):
    command = [sys.executable, "-m", "dsd_ros.cli", "decode", "--image", str(picture), "--mode", "dsd"]
    command += ["--instruction", "find the red chair", "--max-tokens", "24"]
    command += ["--draft", str(models / "draft"), "--target", str(models / "target")]
    code, output = in_a_terminal(command)
    assert code == 0 and "loading the draft model" in output, output
    assert re.search(r"\x1b\[32m[^\x1b]+\x1b\[0m", output) and "\x1b[94m" in output
    *_, legend, figures = Screen(output).text()
    assert legend == "accepted drafts, rejected drafts ([n]: n of a tree), the target's own tokens"
    plain = r"\d+ tokens in \d+ rounds with the verifier, \d+ % from drafts, [\d.]+ s, [\d.]+ kB up, [\d.]+ kB down"
    assert re.fullmatch(plain, figures)
    stream = [{"dsd": "stream"}.get(word, word) for word in command]
    said = subprocess.run(stream, capture_output=True, text=True, timeout=300).stderr.strip()
    passes = r"\d+ tokens in \d+ pass(es)? of the target, \d+ % from drafts, [\d.]+ s, about .* \(estimate\), .* down"
    assert re.fullmatch(passes, said), said
    done = subprocess.run([*command, "--stats"], capture_output=True, text=True, timeout=300)
    first, second = done.stderr.splitlines()
    assert re.fullmatch(plain, first) and "tau" in second and "T_q" in second and "T_c" in second
    assert done.returncode == 0 and done.stdout and "\x1b" not in done.stdout


@pytest.mark.slow
def test_the_demo_at_a_terminal_line_by_line(ros_domain, tmp_path):
    command = [sys.executable, "-m", "dsd_ros.cli", "demo", "view:=false", "--record", str(tmp_path / "bag")]
    code, output = in_a_terminal(command, COLUMNS="600")
    assert code == 0, output
    lines = Screen(output).text()
    steps = [line for line in lines if line.startswith("step ")]
    wanted = [
        r"starting \d processes; the nodes' log: /\S+",
        rf"ready after [\d.]+ s: seed 24, mode stream over dds: {DEMO_INSTRUCTION}",
        r"accepted drafts, rejected drafts, the target's own tokens",
        *(rf"step {number:2}: (forward|turn|stop).*" for number in range(1, len(steps) + 1)),
        r"REACHED after [\d.]+ s and \d+ actions, 0\.\d\d m from the target, 0 collisions\. ARRIVED: .*",
        r"  walked \d\.\d m; decoded \d+ tokens in \d+ passes, \d+ % from drafts",
        r"  decoding was about [\d.]+ times as fast as the target alone \(an estimate: .*",
        r"  bag: \S+ \(dsd inspect \S+\)",
        r"  the nodes' log: /\S+",
    ]
    found = [line for pattern, line in zip(wanted, lines, strict=False) if re.fullmatch(pattern, line)]
    assert found == lines and len(lines) == len(wanted), output
    assert "WARN" not in output
