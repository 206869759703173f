"""A verifier in the robot's own process, for trials and tests on one machine."""

from __future__ import annotations

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel


def in_process_channel(model: ModelSettings | str, settings: EngineSettings | None = None) -> LocalChannel:
    """Load the target and return a channel to an engine that serves it; closing it ends both.

    Raises ModelError when the model cannot be used.
    """
    if isinstance(model, str):
        model = ModelSettings(model)
    engine = VerifierEngine(load_model(model), settings)
    return LocalChannel(engine, on_close=engine.close)
