# SPDX-License-Identifier: Apache-2.0
"""What mode stream gains on given machines: measured on a few replies, and computed for other targets.

The computation is of discrete events: the target's passes follow each other, the robot drafts token after token, and
what both send arrives one way of the link later. Several robots are measured without drafts: one machine cannot draft
for many as each of them would.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dsd_ros.cloud.drafts import MOST_DRAFTED
from dsd_ros.decoding.constraint import ReplyForm
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafters import LEAD
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import PATIENT_LINK
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.wire.channel import Channel, LinkError

WORTH = 1.05  # times as fast, from which drafting pays
_TARGETS_S = np.geomspace(1e-4, 10.0, 237)  # target tokens among which the first that pays is looked for: 5 % apart

Question = tuple[np.ndarray | None, str]  # RGB uint8 (height, width, 3), None for models that read text; instruction


@dataclass(frozen=True)
class Machines:
    """What robot, link and verifier take, in seconds; a target that another verifier runs is ``with_target``."""

    draft_s: float  # a drafted token
    draft_prefill_s: float  # until the draft has read the prompt
    target_s: float  # a token of the target alone
    first_s: float  # from the beginning of a reply to the target's first token at the robot
    first_pass_s: float  # of these, in the target
    one_way_s: float  # of a short message

    def with_target(self, token_s: float) -> Machines:
        """The same with a target that takes ``token_s`` for a token, and as many times as long for its first pass."""
        more = (token_s / self.target_s - 1.0) * self.first_pass_s
        first = {"first_s": self.first_s + more, "first_pass_s": self.first_pass_s + more}
        return dataclasses.replace(self, target_s=token_s, **first)


def alone_seconds(on: Machines, tokens: int) -> float:
    """A reply of so many tokens by the target alone, mode ar."""
    return on.first_s + (tokens - 1) * on.target_s


def stream_seconds(on: Machines, agrees: Sequence[bool]) -> float:
    """A reply in mode stream. ``agrees``: for each token, whether the draft says the same after the tokens before it.

    As ``edge/stream.py`` and ``cloud/engine.py`` do it: a drafted token that is wrong makes all after it wrong until
    the robot learns of it, and a message that comes while the robot drafts is read after that token.
    """
    length, never = len(agrees), float("inf")
    arrives: dict[int, float] = {}  # place -> when the target has a right draft of it
    down: deque[tuple[float, int]] = deque()  # arrives, tokens verified
    # The robot: its next look, verified tokens that it knows of, tokens with its draft, the first wrong one.
    look, known, drafted, wrong = on.draft_prefill_s, 0, 0, length
    begins, lasts, verified = on.first_s - on.one_way_s - on.first_pass_s, on.first_pass_s, 0  # the target's next pass
    while True:
        if begins < look:
            read = range(verified, verified + MOST_DRAFTED)
            right = next((place for place in read if arrives.get(place, never) > begins), read.stop)
            begins, verified = begins + lasts, min(length, right + 1)
            down.append((begins + on.one_way_s, verified))
            if verified == length and down[-1][0] <= on.draft_prefill_s:
                return down[-1][0]
            if look == never:
                look = down[0][0]
            begins, lasts = never if verified == length else begins, on.target_s
            continue
        while down and down[0][0] <= look:
            known = down.popleft()[1]
        if known == length:
            return look
        if known > wrong:
            drafted, wrong = known, length
        drafted = max(drafted, known)
        if drafted - known >= LEAD or drafted == wrong == length:
            look = down[0][0] if down else never
            continue
        if wrong == length and not agrees[drafted]:
            wrong = drafted
        look += on.draft_s
        if wrong == length:
            arrives[drafted] = look + on.one_way_s
        drafted += 1


def computed_gain(on: Machines, replies: Sequence[Sequence[bool]]) -> float:
    """How many times as fast as the target alone, the geometric mean over replies, each as of `stream_seconds`."""
    return statistics.geometric_mean(alone_seconds(on, len(reply)) / stream_seconds(on, reply) for reply in replies)


@dataclass(frozen=True)
class Advice:
    """What was measured, from which the rest follows."""

    machines: Machines
    replies: list[list[bool]]  # of each token whether the draft says it, too, as of `stream_seconds`
    gains: list[float]  # times as fast as the target alone, reply by reply
    at_once: dict[int, float]  # robots -> seconds of a reply without drafts
    refused: str = ""  # why no more robots were measured, a sentence; "": as many as asked for were

    @property
    def agreement(self) -> float:
        """The share of tokens that the draft says, too."""
        return sum(map(sum, self.replies)) / sum(map(len, self.replies))

    @property
    def gain(self) -> float:
        """How many times as fast as the target alone mode stream was: the geometric mean."""
        return statistics.geometric_mean(self.gains)

    @property
    def pays_from_s(self) -> float | None:
        """The seconds of a target token from which on the gain is WORTH or more; None: 10 s are too few."""
        found = None
        for seconds in reversed(_TARGETS_S.tolist()):
            if computed_gain(self.machines.with_target(seconds), self.replies) < WORTH:
                break
            found = seconds
        return found

    @property
    def robots(self) -> int:
        """The most robots, of those measured, that are served at once as soon as one."""
        return max(count for count, seconds in self.at_once.items() if seconds <= WORTH * self.at_once[1])

    def as_json(self) -> dict[str, Any]:
        """All figures, times in seconds."""
        names = ("agreement", "gain", "gains", "pays_from_s", "robots", "at_once", "refused")
        return {**vars(self.machines), **{name: getattr(self, name) for name in names}}


def measure(
    connect: Callable[[], Channel],
    draft: Any,
    settings: DecodeSettings,
    questions: Sequence[Question],
    replies: int = 5,
    robots: int = 8,
    vocabulary: Vocabulary | None = None,
    form: ReplyForm | None = None,
) -> Advice:
    """Decode ``replies`` in modes ar and stream by turns, then in mode ar by up to ``robots`` at once.

    ``connect`` opens a channel to the verifier; ``vocabulary`` and ``form`` as of ``EdgeSession``. ValueError for
    replies of one token; errors of ``EdgeSession.decode``.
    """

    def session_of(channel: Channel, mode: str) -> EdgeSession:
        chosen = dataclasses.replace(settings, mode=mode)
        return EdgeSession(channel, draft, chosen, PATIENT_LINK, vocabulary, form)

    def robot(number: int, session: EdgeSession) -> float:
        """How many times as long as for one robot its reply takes."""
        place = number % replies
        return session.decode(*questions[place % len(questions)]).seconds / found[place][2].seconds

    with closing(connect()) as channel:
        asked = [questions[number % len(questions)] for number in range(-1, replies)]
        found = [_compare(partial(session_of, channel), question) for question in asked][1:]  # the first warms up
    alone_s = statistics.fmean(alone.seconds for _, _, alone, _ in found)
    at_once, refused = {1: alone_s}, ""
    for count in sorted({*(n for n in (2, 4, 8, 16, 32) if n < robots), robots} - {1}):
        try:
            with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
                channels = [stack.enter_context(closing(connect())) for _ in range(count)]
                sessions = [stack.enter_context(session_of(channel, "ar")) for channel in channels]
                at_once[count] = alone_s * statistics.fmean(pool.map(robot, range(count), sessions))
        except LinkError as error:  # it has its limits, and perhaps other robots
            refused = f"{count} robots at once were not served: {error}"
            break
    machines = Machines(*map(statistics.median, zip(*(dataclasses.astuple(on) for on, *_ in found), strict=True)))
    return Advice(machines, [agrees for _, agrees, *_ in found], [gain for *_, gain in found], at_once, refused)


def _compare(
    session_of: Callable[[str], EdgeSession], question: Question
) -> tuple[Machines, list[bool], DecodedReply, float]:
    """A reply by the target alone and in mode stream, each in a session that has seen no picture yet.

    What that says of the machines, what the draft says of each token, the first reply, and the gain.
    """
    with session_of("ar") as session:
        session.close()  # but not the link, which has been dialled: that takes several messages
        began = time.perf_counter()
        session.open()
        one_way_s = (time.perf_counter() - began) / 2
        alone = session.decode(*question)
    with session_of("stream") as session:
        stream = session.decode(*question)
        agrees, draft_s, draft_prefill_s = draft_along(session, stream.tokens)
    first, *later = alone.records
    if not later:
        raise ValueError("the reply has one token, so no draft can make it earlier; ask for more words")
    target_s = sum(record.wait_seconds for record in later) / sum(len(record.gained) for record in later)
    first_s, first_pass_s = first.wait_seconds, min(first.wait_seconds, first.verify_seconds)
    on = Machines(draft_s, draft_prefill_s, target_s, first_s, first_pass_s, one_way_s)
    return on, agrees, alone, alone.seconds / stream.seconds


def draft_along(session: EdgeSession, tokens: list[int]) -> tuple[list[bool], float, float]:
    """What mode stream's draft says of the reply decoded last.

    For each token, whether it says the same after the tokens before it; seconds of a token, and of the prompt.
    """
    marks, agrees = [time.perf_counter()], []
    with closing(session.draft_again()) as drafter:
        for place, token in enumerate(tokens):
            drafter.follow(tokens[:place])
            while not (drafted := drafter.next()) and not drafter.far_enough:
                pass
            agrees.append(drafted[:1] == [token])
            marks.append(time.perf_counter())
    token_s = (marks[-1] - marks[1]) / max(1, len(tokens) - 1)
    return agrees, token_s, max(0.0, marks[1] - marks[0] - token_s)
