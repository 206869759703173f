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
    from dsd_lab.dragon.ablations import AblationServer
    from dsd_lab.dragon.baseline_service import BaselineService
    from dsd_lab.dragon.baselines import open_session

    ordinary = args.method in OF_AN_ORDINARY_CLOUD
    if args.link.verifier and not ordinary:
        raise ValueError(
            f"--method {args.method} is for comparisons, with the cloud in this process; leave out --verifier"
        )

    def baseline(model: object, store: object, **_: object) -> BaselineService:
        return BaselineService(model, store)  # type: ignore[arg-type]

    return answer_by(args, partial(open_session, args.method), AblationServer if ordinary else baseline)
