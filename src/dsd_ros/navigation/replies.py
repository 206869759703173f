"""Whether the answer to a request may be carried out, and if not, how the run ends by it."""

from __future__ import annotations

from dsd_ros.navigation.actions import Reply, UnparsableReply, parse_reply
from dsd_ros.navigation.records import Answer, DecodeRequest
from dsd_ros.navigation.settings import RunOutcome

_STAMP_ROUNDING_S = 1e-3  # stamps go through float64 seconds and back
_TICK_S = 0.5  # clocks of simulated time tick coarsely


class Refused(Exception):
    """The answer is not carried out: the run ends."""

    def __init__(self, outcome: RunOutcome, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome


def checked(answer: Answer, request: DecodeRequest, age: float, limit: float) -> Reply:
    """The parsed reply of an answer that is fresh, proved where that is wanted, and of the grammar.

    :param age: of its picture, ``limit``: the oldest that is carried out; both in s.
    :raises Refused: otherwise.
    """
    if answer.observed_at < request.not_before - _STAMP_ROUNDING_S:
        raise Refused(
            RunOutcome.STALE_OBSERVATION,
            "The reply is about a picture taken before the robot came to rest; it was not carried out.",
        )
    if not -_TICK_S <= age <= limit:  # NaN fails here, too
        raise Refused(
            RunOutcome.STALE_OBSERVATION,
            f"The reply came {age:.1f} s after its picture, the limit is {limit:.1f} s; it was not carried out.",
        )
    if not (answer.verified or request.allow_unverified):
        raise Refused(RunOutcome.LINK_LOST, "The target did not verify the reply; it was not carried out.")
    try:
        return parse_reply(answer.text)
    except UnparsableReply as error:
        said = f"The robot stays where it is: {error}"
        raise Refused(RunOutcome.UNPARSABLE_REPLY, said) from error
