# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab ask`."""

from __future__ import annotations

from functools import partial

from dsd_lab.dragon import DRAGON, METHODS, OF_AN_ORDINARY_CLOUD
from dsd_lab.dragon.settings import AblationSettings
from dsd_ros.cli.arguments import arguments, flag, part
from dsd_ros.cli.ask import AskArguments, answer_by


@arguments
class AskMethodArguments(AskArguments):
    aggregation: AblationSettings = part(AblationSettings)
    method: str = flag(
        DRAGON,
        "by both sides together, by one side's documents alone, or by a method that the DRAGON paper compares itself "
        "with; drcg-text and drcg-kv let the cloud's documents travel",
        choices=METHODS,
    )


def command(args: AskMethodArguments) -> int:
    """One question, answered by DRAGON or by a method it is compared with.

    As 'dsd ask'; most methods need the cloud in this process, so no verifier.
    """
    from dsd_lab.dragon.baselines import open_cloud, open_session

    changed = (args.aggregation.evidence, args.aggregation.randomness) != ("sparse", "shared")
    if args.link.verifier and (changed or args.method not in OF_AN_ORDINARY_CLOUD):
        raise ValueError(
            f"--method {args.method} with these settings is for comparisons, with the cloud in this process; leave out "
            "--verifier"
        )
    return answer_by(args, partial(open_session, args.method), partial(open_cloud, args.method, args.aggregation))
