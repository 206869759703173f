# SPDX-License-Identifier: Apache-2.0
"""`dsd` from the user's side: replies, exit codes, and one sentence for every bad input."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest
from in_process import dsd
from tiny_models import make_tiny_model

from dsd_ros.cli import shared

INSTRUCTION = "find the red chair"


@pytest.fixture
def decode(models, picture, capsys):
    """`dsd decode` of the picture with the tiny pair, and whatever else is given."""

    def run(*options: str | Path) -> tuple[int, str, str]:
        given = ["--image", picture, "--instruction", INSTRUCTION, "--max-tokens", "24"]
        given += ["--draft", models / "draft", "--target", models / "target"]
        return dsd(capsys, "decode", *given, *options)

    return run


def test_a_reply_as_json_has_the_documented_fields_and_log_lines_go_beside_it(decode):
    code, out, err = decode("--json", "--log-level", "info", "--log-format", "json")
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    assert {"session opened", "observation read"} <= {line["message"] for line in lines}
    reply = json.loads(out)
    assert set(reply) >= {
        "tokens", "text", "action", "mode", "rounds", "accepted", "tau", "bytes_up", "bytes_down", "seconds",
        "draft_share", "passes_per_token", "sooner", "miss_rate", "mean_exit", "exits", "predrafts_used",
        "predrafts_wasted", "draft_round_seconds", "verify_round_seconds", "cost_ratio", "link_delay_seconds",
        "sync_seconds", "peak_memory", "threads", "records", "worker_error",
    }  # fmt: skip
    assert len(reply["records"]) == reply["rounds"]
    assert reply["mode"] == "stream"
    assert reply["rounds"] == len(reply["accepted"])
    assert reply["tau"] == pytest.approx(len(reply["tokens"]) / reply["rounds"])
    assert reply["bytes_up"] > 0 and reply["bytes_down"] > 0
    assert reply["action"] is None  # a random model's text is no action


def test_replies_can_be_held_to_a_grammar(decode):
    own = (
        """{"marks": ["Now:"], "forward": {"phrases": ["go {}"], "amounts": [5, 10]}, "stop": {"phrases": ["stop"]}}"""
    )
    for options in ((), ("--temperature", "0.8")):
        held, free = (json.loads(decode("--json", "--grammar", own, *options, *more)[1]) for more in (
            ("--constrain", "grammar"), ()))  # fmt: skip
        assert held["action"] in ("go 5", "go 10", "stop") and held["text"].endswith(f"Now: {held['action']}")
        assert free["action"] is None


def test_all_modes_give_the_same_tokens(decode):
    modes = ("ar", "dsd", "fsd", "coupled")
    tokens = {mode: json.loads(decode("--json", "--mode", mode)[1])["tokens"] for mode in modes}
    assert all(said == tokens["ar"] for said in tokens.values())


def test_earlier_pictures_go_with_their_actions(decode, picture):
    step = ("--history-image", picture, "--history-action", "turn left 15 degrees")
    plain, told, again = (json.loads(decode("--json", *steps)[1]) for steps in ((), step, (*step, *step)))
    assert plain["tokens"] != told["tokens"] != again["tokens"]
    assert again["bytes_up"] < told["bytes_up"] + 10_000  # the same picture travels once
    code, out, err = decode("--history-image", picture)
    assert (code, out) == (2, "") and "one --history-action for each" in err


def test_a_draft_with_another_tokenizer_needs_the_targets(decode, models):
    alone = json.loads(decode("--json", "--mode", "ar")[1])
    stranger = ("--json", "--draft", models / "stranger")
    code, _, err = decode(*stranger)
    assert code == shared.EXIT_LINK and "target_tokenizer" in err and err.count("\n") == 1
    for path in (models / "target", models / "target" / "tokenizer.json"):
        code, out, err = decode(*stranger, "--target-tokenizer", path)
        assert code == 0, err
        reply = json.loads(out)
        assert (reply["tokens"], reply["text"]) == (alone["tokens"], alone["text"])
    for options, named in (
        (["--target-tokenizer", models], "tokenizer.json"),
        (["--target-tokenizer", models / "target", "--mode", "dsd"], "use mode stream"),
    ):
        code, out, err = decode(*stranger, *options)
        assert code == shared.EXIT_BAD_INPUT and out == ""
        assert named in err and err.count("\n") == 1
    # Sampled with shared noise, the tokens are the target's own.
    sampled = ("--json", "--proof", "coupled", "--temperature", "1", "--target-tokenizer", models / "target")
    assert (
        json.loads(decode(*stranger, *sampled)[1])["tokens"]
        == json.loads(decode(*sampled, "--mode", "ar")[1])["tokens"]
    )


def test_an_address_without_a_verifier_is_a_link_failure(decode):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        code, _, err = decode("--verifier", f"ws://127.0.0.1:{unused.getsockname()[1]}")
    assert code == shared.EXIT_LINK
    assert err.count("\n") == 1 and re.search(r"start one there: dsd verifier --port \d+$", err)


def test_a_port_in_use_is_named(models, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = dsd(capsys, "verifier", "--port", str(port), "--model", models / "target")
    assert code == shared.EXIT_BAD_INPUT and str(port) in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mode", "psychic"], "psychic"),
        (["--image", "no/such/file.png"], "no/such/file.png"),
        (["--image", __file__], "is no picture, damaged, or in another container"),
        (["--instruction", "  "], "empty"),
        (["--target", "no/such/model"], "no/such/model"),
        (["--draft", "some/model"], "--online allows it"),
        (["--temperature", "-1"], "temperature"),
        (["--constrain", "grammar"], "a reply of 24 tokens is too short for 'Action: turn right 45 degrees'"),
        (["--grammar", "nowhere"], "There is no grammar 'nowhere'"),
        (["--verifier", "ws://127.0.0.1:87x65"], "verifier: 'ws://127.0.0.1:87x65' is not a verifier address"),
        (["--verifier", "ws://robot:hunter2@127.0.0.1:1"], "'ws://***@127.0.0.1:1' is not a verifier address"),
        (["--token-file", "no/such/token", "--verifier", "ws://127.0.0.1:1"], "no/such/token"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(decode, options, named):
    code, out, err = decode(*options)
    assert code == shared.EXIT_BAD_INPUT
    assert out == ""
    assert err.startswith("dsd: ") and err.count("\n") == 1
    assert named in err


def test_the_shipped_pair_is_not_asked_for_what_it_never_heard_of(capsys, picture):
    code, out, err = dsd(capsys, "decode", "--image", picture, "--instruction", "find the purple elephant")
    assert (code, out) == (shared.EXIT_BAD_INPUT, "") and err.count("\n") == 1
    assert "'find the purple elephant'" in err and "bottle" in err and "--draft and --target" in err


def test_doctor_says_what_a_machine_without_models_lacks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("dsd_ros.paths.models_directory", lambda: tmp_path)
    code, out, _ = dsd(capsys, "doctor", "--role", "cloud", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == shared.EXIT_GOAL_MISSED
    assert not findings["shipped models"]["ok"]
    assert "dsd-lab train pair" in findings["shipped models"]["remedy"]
    assert findings["torch"]["ok"]
    assert "rclpy" not in findings and "mujoco" not in findings


def test_doctor_examines_an_own_model(capsys, tmp_path):
    own = make_tiny_model(tmp_path / "own")
    for beams, detail in (1, "own, qwen2_vl"), (4, "own, qwen2_vl; not followed: num_beams of"):
        (own / "generation_config.json").write_text(json.dumps({"num_beams": beams, "repetition_penalty": 1.05}))
        findings = json.loads(dsd(capsys, "doctor", "--role", "cloud", "--model", own, "--json")[1])
        (model,) = (finding for finding in findings if finding["name"] == "model")
        assert model["ok"] and model["detail"].startswith(detail) and (beams > 1 or model["detail"] == detail)


def test_doctor_finds_this_machine_fit_for_the_demo(capsys):
    code, out, _ = dsd(capsys, "doctor")
    assert code == 0, out
    assert "MISSING" not in out


def test_doctor_warns_a_robot_of_cyclone_11(capsys, monkeypatch, tmp_path):
    for name in ("unitree_sdk2py", "cyclonedds", "cyclonedds-11.0.1.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / name / "METADATA").write_text("Metadata-Version: 2.1\nName: cyclonedds\nVersion: 11.0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    _, out, _ = dsd(capsys, "doctor", "--role", "robot", "--json")
    (finding,) = [finding for finding in json.loads(out) if finding["name"] == "unitree_sdk2py"]
    assert not finding["ok"] and not finding["required"]
    assert finding["detail"] == "cyclonedds 11.0.1: crashes the 0.10 peers that a Go2 runs"
    assert "0.10.2" in finding["remedy"]


@pytest.mark.parametrize(
    ("plugin", "found"),
    [
        ("dsd_ros = json:loads", (True, r"vllm 0.32.0 in \S+, its plug-in loads")),
        ("", (False, "but its plug-in is missing: pip install --no-deps .")),
        ("dsd_ros = json:no_such", (False, "no_such")),
    ],
)
def test_doctor_finds_the_vllm_beside_this_environment(capsys, monkeypatch, tmp_path, plugin, found):
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    for name, files in {
        "vllm": {"__init__.py": ""},
        "vllm-0.32.0.dist-info": {"METADATA": "Name: vllm\nVersion: 0.32.0\n", "top_level.txt": "vllm\n"},
        "dsd_ros-1.dist-info": {"entry_points.txt": f"[vllm.general_plugins]\n{plugin}\n"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("dsd_ros.paths.share_directory", lambda: tmp_path)
    _, out, _ = dsd(capsys, "doctor", "--role", "cloud", "--json")
    finding = next(one for one in json.loads(out) if one["name"] == "vllm")
    assert finding["ok"] == found[0] and re.search(found[1], finding["detail"]), finding
    assert not finding["required"]


def test_doctor_examines_the_token_file(capsys, tmp_path):
    file = tmp_path / "token"

    def finding(*options: str | Path) -> dict[str, object]:
        _, out, _ = dsd(capsys, "doctor", "--role", "cloud", "--json", *options)
        return next(each for each in json.loads(out) if each["name"] == "token file")

    assert not finding()["ok"] and not finding()["required"]
    assert finding("--token-file", file)["required"] and "cannot be read" in finding("--token-file", file)["detail"]
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    assert "other users" in finding("--token-file", file)["detail"]
    file.chmod(0o600)
    found = finding("--token-file", file)
    assert found["ok"] and "0123456789" not in str(found)
