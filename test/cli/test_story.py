# SPDX-License-Identifier: Apache-2.0
"""What a person sees of `dsd demo` and `dsd decode`, at a terminal and in a file, line by line."""

from __future__ import annotations

import re

import pytest
from builtin_interfaces.msg import Duration, Time
from in_process import dsd

from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, RoundStats
from dsd_ros.cli import terminal
from dsd_ros.cli.demo_run import DemoReport
from dsd_ros.cli.story import Story
from dsd_ros.ros.demo_client import DemoClient

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
    stats = DecodeStats(mode="mc-dsd", tokens=2, rounds=1, draft_share=0.5, total_time=Duration(nanosec=250_000_000))
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
    "starting, 0 s: waiting for the camera, draft_node (the draft model, and a session with the verifier)",
    "ready after 3.0 s: find the silver bottle",
]
TAIL = [
    "step  3: stop                   On the way back.",
    "REACHED after 10.1 s and 2 actions, 0.31 m from the goal, 0 collisions. ARRIVED: Here it is.",
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


@pytest.fixture
def told(monkeypatch, capsys):
    """What `a_run` prints, at a terminal or not; and its log."""

    def run(is_terminal: bool, verbose: bool = False) -> tuple[str, list[str]]:
        monkeypatch.setattr(terminal, "is_terminal", lambda stream: is_terminal)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "160"}.items():
            monkeypatch.setenv(name, value)
        story = Story(verbose)
        a_run(story)
        return capsys.readouterr().out.replace(str(story.log), "LOG"), story.log.read_text().splitlines()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return run


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]


def test_a_terminal_shows_the_story_with_its_tokens_in_colour(told, monkeypatch):
    output, log = told(True)
    assert plain(output) == COLOURED
    assert "\x1b[32mThe\x1b[0m\x1b[32m way\x1b[0m" in output  # accepted
    assert "\x1b[9;31m no\x1b[0m\x1b[9;31m box\x1b[0m" in output  # rejected, struck out
    assert "\x1b[94m is\x1b[0m" in output  # the target's own
    assert log == [
        f"[draft_node] {INFO}", f"[bridge_node] {WARN}", f"[simulator_node] {ERROR}", f"[bridge_node] {WARN}",
        "[view_node] [INFO] [1.0] [view_node]: live page at http://127.0.0.1:9090/", f"[bridge_node] {WARN}",
        "[bridge_node] ended",
    ]  # fmt: skip
    monkeypatch.setenv("NO_COLOR", "1")
    assert plain(told(True)[0]) == PLAIN


def test_a_file_gets_the_story_in_plain_text_and_verbose_what_the_nodes_log(told):
    assert told(False)[0].splitlines() == PLAIN
    lines = told(False, verbose=True)[0].splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        f"[draft_node] {INFO}", f"[bridge_node] {WARN}", f"[simulator_node] {ERROR}", f"[bridge_node] {WARN}",
        "[view_node] [INFO] [1.0] [view_node]: live page at http://127.0.0.1:9090/",
    ]  # fmt: skip


def test_only_a_streams_drafts_have_a_speed_to_compare():
    story = Story()
    for mode in ("ar", "dsd"):
        story.step(NavAction(verified=True), DecodeStats(mode=mode, tokens=6, rounds=6, total_time=Duration(sec=1)))
        assert story.speedup() is None
    for sooner, seconds in ((1.5, 1), (1.25, 3)):
        stats = DecodeStats(mode="stream", tokens=6, rounds=2, sooner=sooner, total_time=Duration(sec=seconds))
        story.step(NavAction(verified=True), stats)
    assert story.speedup() == pytest.approx((1.5 + 3 * 1.25) / 4)


def test_a_step_waits_for_its_whole_reply_and_half_of_one_is_never_shown(ros_domain, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    story = Story()
    client = DemoClient(story.progress, story.step, story.memory)
    rounds = [RoundStats(gained=["The way", " is open."], accepted=2), RoundStats(gained=[" Action: stop"])]
    for number in (1, 2):
        begun, *rest = progress(number, "stream", rounds)
        client._on_stats(DecodeStats(mode="stream", tokens=3, rounds=2, observation_stamp=Time(sec=number)))
        client._on_progress(begun)
        action = NavAction(step=number, reasoning="The way is open.", verified=True, observation_stamp=Time(sec=number))
        client._on_action(action)  # overtakes the rest of its reply
        assert "step" not in capsys.readouterr().out
        if number == 1:
            for message in rest:
                client._on_progress(message)
            (line,) = plain(capsys.readouterr().out)
            assert line == "step  1: stop                   The way is open. Action: stop  3 tokens in 2 passes, 0.00 s"
    client.fill(DemoReport())  # the run has ended without the rest of the second
    client.close()
    (line,) = plain(capsys.readouterr().out)
    assert line == "step  2: stop                   3 tokens in 2 passes, 0.00 s     | The way is open."


def test_a_childs_last_words_leave_out_the_preamble_of_ros():
    story = Story()
    assert story.last_words("simulator_node") == ""
    story.hear("simulator_node", ERROR)
    story.hear("simulator_node", "")
    story.hear("simulator_node", INFO)
    assert story.last_words("simulator_node") == "no renderer"


def test_decode_colours_its_tokens_and_explains_itself_in_plain_words(models, picture, capsys, monkeypatch):
    command = ["decode", "--image", picture, "--instruction", "find the red chair", "--max-tokens", "24", "--mode"]
    pair = ["--draft", models / "draft", "--target", models / "target"]
    code, out, said = dsd(capsys, *command, "dsd", *pair, "--stats")
    figures, symbols = said.splitlines()
    words = r"\d+ tokens in \d+ rounds with the verifier, \d+ % from drafts, [\d.]+ s, [\d.]+ kB up, [\d.]+ kB down"
    assert code == 0 and out and "\x1b" not in out and re.fullmatch(words, figures)
    assert all(symbol in symbols for symbol in ("tau", "T_q", "T_c"))
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    _, out, _ = dsd(capsys, *command, "dsd", "--draft", models / "target", "--target", models / "target")
    assert re.search(r"\x1b\[32m[^\x1b]+\x1b\[0m", out) and "\x1b[94m" in out
    _, _, said = dsd(capsys, *command, "stream", *pair)
    assert "decoding" in said
    legend, figures = plain(said)[-2:]
    assert legend.endswith("accepted drafts, rejected drafts, the target's own tokens")
    gain = r"(about .* \(estimate\), )?"  # nothing is said of it where no draft came in time
    passes = r"\d+ tokens in \d+ pass(es)? of the target, \d+ % from drafts, [\d.]+ s, " + gain + ".* down"
    assert re.fullmatch(passes, figures), figures
