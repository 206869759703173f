# SPDX-License-Identifier: Apache-2.0
"""Runs a verifier in its own process: python serve_model.py MODEL [metrics] [host=H] [port=P] [token_file=F] ...

MODEL is a model directory, or table:SEED:PERIOD for a TableModel that never ends a reply. ``metrics``: at a free port,
whose address is the first line.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]

from table_model import TableModel  # noqa: E402

from dsd_ros.cloud.engine import VerifierEngine  # noqa: E402
from dsd_ros.cloud.metrics_server import MetricsServer  # noqa: E402
from dsd_ros.cloud.server import run_verifier  # noqa: E402
from dsd_ros.cloud.settings import VerifierSettings  # noqa: E402
from dsd_ros.vlm.loading import ModelSettings, load_model  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    name, *options = sys.argv[1:]
    values = dict(option.split("=", 1) for option in options if option != "metrics")
    kinds = {field.name: type(field.default) for field in fields(VerifierSettings)}
    settings = VerifierSettings(**{"port": 0} | {k: kinds[k](v) for k, v in values.items()})
    if name.startswith("table:"):
        seed, period = name.split(":")[1:]
        model = TableModel(int(seed), ends=False, period=int(period))
    else:
        model = load_model(ModelSettings(name))
    engine = VerifierEngine(model, settings)
    if "metrics" in options:
        print(MetricsServer(engine.metrics.registry, settings).start(), flush=True)
    run_verifier(engine, settings)


if __name__ == "__main__":
    main()
