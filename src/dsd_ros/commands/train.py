"""`dsd train`."""

from __future__ import annotations

import argparse

from dsd_ros.commands.shared import EXIT_DONE
from dsd_ros.flags import add_settings, settings_from

SUMMARY = "train the shipped models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trainings = parser.add_subparsers(required=True, metavar="WHAT")
    pair = trainings.add_parser(
        "pair",
        help="the shipped target and draft, from nothing",
        description="Train both shipped models on scenes of the simulator; interrupted, the same command "
        "goes on where it stopped.",
    )
    from dsd_ros.training.pair import TrainSettings

    add_settings(pair, TrainSettings)
    pair.set_defaults(run=_train_pair)


def _train_pair(args: argparse.Namespace) -> int:
    from dsd_ros.training.pair import TrainSettings, train_pair

    train_pair(settings_from(args, TrainSettings))
    return EXIT_DONE
