# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from dsd_lab.cli.main import main
from dsd_lab.papers.dragon_simulator import STRATEGIES, Setting, compare, speedup
from dsd_lab.papers.theory import TheoryError


def equation_9(c_device, c_cloud, rtt, a_cloud) -> float:
    if c_device <= c_cloud:
        return 1 / (1 - a_cloud / (1 + c_cloud / rtt))
    if c_device <= c_cloud + rtt:
        return 1 / (1 - (1 - c_device / (c_cloud + rtt)) * a_cloud)
    return 1.0


def test_the_speedup_is_equation_9():
    generator = np.random.default_rng(0)
    for _ in range(500):
        device, cloud, rtt = generator.exponential(1.0, 3) + 1e-3
        a = generator.random()
        assert speedup(device, cloud, rtt, a) == pytest.approx(equation_9(device, cloud, rtt, a))
        edge = cloud + rtt
        assert speedup(edge, cloud, rtt, a) == pytest.approx(equation_9(edge, cloud, rtt, a))
    for wrong in ((-1.0, 1.0, 1.0, 0.5), (1.0, 1.0, 1.0, 1.5), (0.0, 0.0, 1.0, 0.5)):
        with pytest.raises(TheoryError):
            speedup(*wrong)


def test_strategies_are_compared_over_the_same_answers():
    (found,) = compare(Setting(0.1, 0.05, 0.02, (0.8, 0.8), 30), [0.3], 3)
    seconds = found.seconds
    assert set(seconds) == {*STRATEGIES, "token-wise", "sequence-wise"}
    # Every token waits for the cloud's step and a round trip, which the jitter makes 20 % longer at most.
    assert 29 * 0.29 < seconds["token-wise"] < 30 * (0.1 + 0.38)
    assert seconds["sequence-wise"] == pytest.approx(3.0)
    assert 3.0 <= min(seconds["device"], seconds["auto"]) < seconds["token-wise"]
    assert found.over_best_side() == seconds["auto"] / min(seconds["device"], seconds["cloud"])
    # Where every draft holds, nothing but the device's own steps is waited for.
    (every,) = compare(Setting(0.1, 0.05, 0.02, (1.0, 1.0), 30), [0.0], 1)
    assert every.seconds["auto"] == every.seconds["device"] == pytest.approx(3.0)


def test_commands(capsys, tmp_path):
    for number, (line, says) in enumerate(
        (
            ("dragon-speedup --acceptance 0.8", "2.33x"),
            ("dragon-scheduling --sequences 2 --tokens 10 --extra-ms 0 300", "auto over best"),
            ("dragon-pipeline --tokens 5 --seed 3", "switches"),
        )
    ):
        plot, report = tmp_path / f"{number}.png", tmp_path / f"{number}.json"
        assert main(["theory", *line.split(), "--plot", str(plot), "--json", str(report)]) == 0
        assert says in capsys.readouterr().out
        with Image.open(plot) as image:
            assert image.width > 600
        assert json.loads(report.read_text())
    assert json.loads((tmp_path / "1.json").read_text())["models"] == {}  # so that `dsd-lab figures` knows its state
    events = json.loads((tmp_path / "2.json").read_text())["events"]
    assert sum(event["kind"] == "aggregated" for event in events) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dragon-speedup --acceptance 2", "share from 0 to 1"),
        ("dragon-scheduling --acceptance 2 0", "share from 0 to 1"),
        ("dragon-scheduling --tokens 0", "tokens"),
        ("dragon-pipeline --acceptance 0 2", "share from 0 to 1"),
        ("dragon-pipeline --device-ms -1", "device"),
        ("dragon-pipeline --tokens 2 --plot map.docx", "name it"),
    ],
)
def test_bad_input_ends_with_a_sentence(capsys, tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    assert main(["theory", *line.split()]) == 2
    assert message in capsys.readouterr().err
