# SPDX-License-Identifier: Apache-2.0
"""What mode stream gains on given machines: measured on a few replies, and computed for other targets and more robots.

The computation is of discrete events: the target's passes follow each other, the robot drafts token after token, and
what both send arrives one way of the link later.
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
from typing import Any

import numpy as np

from dsd_ros.cloud.drafts import MOST_DRAFTED
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafters import LEAD
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import PATIENT_LINK
from dsd_ros.edge.stream import DraftedAlong
from dsd_ros.wire.channel import Channel, LinkError

WORTH = 1.05  # times as fast, from which drafting pays
_TARGETS_S = np.geomspace(1e-4, 10.0, 237)  # target tokens among which the first that pays is looked for: 5 % apart
_BESIDE = 2  # replies that each of several robots decodes

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
    growth: float = 0.0  # what each drafted token adds to a pass of the target, as a share

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
    up: deque[tuple[float, int, int, bool]] = deque()  # arrives, number of the draft, place, whether right so far
    down: deque[tuple[float, int]] = deque()  # arrives, tokens verified
    # The robot: its next look, verified tokens that it knows of, tokens with its draft, first wrong one, its number.
    look, known, drafted, wrong, number = on.draft_prefill_s, 0, 0, length, 0
    # The target: its next pass, and the draft that it has, from where to where, and how far that is right.
    begins, lasts, verified = on.first_s - on.one_way_s - on.first_pass_s, on.first_pass_s, 0
    newest, start, end, right = 0, 0, 0, 0
    while True:
        if begins < look:
            while up and up[0][0] <= begins:
                _, draft, place, good = up.popleft()
                if draft > newest or place > end:
                    newest, start, end, right = draft, place, place, place
                end, right = place + 1, place + 1 if good else right
            useful = start <= verified < end and verified <= right  # else refuted, or overtaken
            read = min(MOST_DRAFTED, end - verified) if useful else 0
            begins += lasts * (1.0 + on.growth * read)
            verified = min(length, verified + min(read, right - verified if useful else 0) + 1)
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
            drafted, wrong, number = known, length, number + 1
        drafted = max(drafted, known)
        if drafted - known >= LEAD or drafted == wrong == length:
            look = down[0][0] if down else never
            continue
        if wrong == length and not agrees[drafted]:
            wrong = drafted
        look += on.draft_s
        up.append((look + on.one_way_s, number, drafted, wrong == length))
        drafted += 1


def computed_gain(on: Machines, replies: Sequence[Sequence[bool]]) -> float:
    """How many times as fast as the target alone, the geometric mean over replies, each as of `stream_seconds`."""
    return statistics.geometric_mean(alone_seconds(on, len(reply)) / stream_seconds(on, reply) for reply in replies)


def pays_from(on: Machines, replies: Sequence[Sequence[bool]]) -> float | None:
    """The seconds of a target token from which on the gain is WORTH or more; None: 10 s are too few."""
    found = None
    for seconds in reversed(_TARGETS_S.tolist()):
        if computed_gain(on.with_target(seconds), replies) < WORTH:
            break
        found = seconds
    return found


@dataclass(frozen=True)
class Advice:
    """What was measured, from which the rest follows."""

    machines: Machines
    replies: list[list[bool]]  # as of `stream_seconds`
    gains: list[float]  # times as fast as the target alone, reply by reply
    draft_share: float  # of the replies' tokens
    at_once: dict[int, tuple[float, float]]  # robots -> seconds to the first token and of a token, in mode ar
    refused: str = ""  # why no more robots were measured, a sentence; "": as many as asked for were

    @property
    def gain(self) -> float:
        """How many times as fast as the target alone mode stream was: the geometric mean."""
        return statistics.geometric_mean(self.gains)

    def beside(self, robots: int) -> tuple[float, float]:
        """Seconds of a reply in modes ar and stream where ``robots`` decode at once, up to the most measured."""
        counts = sorted(self.at_once)
        first, token = (float(np.interp(robots, counts, [self.at_once[n][k] for n in counts])) for k in (0, 1))
        waited = first - self.machines.first_s  # for the others' prompts and passes
        first_pass = max(0.0, self.machines.first_pass_s + waited)
        busy = dataclasses.replace(self.machines, target_s=token, first_s=first, first_pass_s=first_pass)
        alone = statistics.fmean(alone_seconds(busy, len(reply)) for reply in self.replies)
        return alone, statistics.fmean(stream_seconds(busy, reply) for reply in self.replies)

    @property
    def robots(self) -> int:
        """How many robots, of those measured, get replies at once as soon as the target alone serves one, but 5 %."""
        limit, found = WORTH * self.beside(1)[0], 1
        while found < max(self.at_once) and self.beside(found + 1)[1] <= limit:
            found += 1
        return found


def measure(
    connect: Callable[[], Channel],
    draft: Any,
    settings: DecodeSettings,
    questions: Sequence[Question],
    replies: int = 5,
    robots: int = 8,
    **options: Any,
) -> Advice:
    """Decode ``replies`` in modes ar and stream by turns, then in mode ar by up to ``robots`` at once.

    ``connect`` opens a channel to the verifier; ``options`` are of ``EdgeSession``. ValueError for replies of one
    token; errors of ``EdgeSession.decode``.
    """

    def session(stack: ExitStack, mode: str) -> EdgeSession:
        channel, chosen = stack.enter_context(closing(connect())), dataclasses.replace(settings, mode=mode)
        return stack.enter_context(EdgeSession(channel, draft, chosen, PATIENT_LINK, **options))

    def several(robot: int, session: EdgeSession) -> list[DecodedReply]:
        return [_fresh(session, questions[(robot + number) % len(questions)])[0] for number in range(_BESIDE)]

    pairs, trips, drafts, refused = [], [], [], ""
    with ExitStack() as stack:
        alone, stream = session(stack, "ar"), session(stack, "stream")
        for each in (alone, stream):
            each.decode(*questions[0])  # what happens once
        for number in range(replies):
            question = questions[number % len(questions)]
            (first, trip), (second, other) = _fresh(alone, question), _fresh(stream, question)
            pairs.append((first, second))
            trips += [trip, other]
            drafts.append(stream.draft_along(second.tokens))
        at_once = {1: _token_times([reply for reply, _ in pairs])}
        for count in sorted({*(n for n in (2, 4, 8, 16, 32) if n < robots), robots} - {1}):
            try:
                with ExitStack() as more, ThreadPoolExecutor(count) as pool:
                    found = pool.map(several, range(count), [session(more, "ar") for _ in range(count)])
                    at_once[count] = _token_times([reply for some in found for reply in some])
            except LinkError as error:  # it has its limits, and perhaps other robots
                refused = f"{count} robots at once were not served: {error}"
                break
    machines = _machines(pairs, trips, drafts, *at_once[1])
    tokens = sum(len(reply.tokens) for _, reply in pairs)
    share = sum(sum(reply.accepted) for _, reply in pairs) / tokens
    gains = [first.seconds / second.seconds for first, second in pairs]
    return Advice(machines, [draft.agrees for draft in drafts], gains, share, at_once, refused)


def _fresh(session: EdgeSession, question: Question) -> tuple[DecodedReply, float]:
    """A reply in a session that has seen no picture yet, as a robot's next one, and the seconds of a round trip."""
    session.close()
    began = time.perf_counter()
    session.open()
    trip = time.perf_counter() - began
    return session.decode(*question), trip


def _token_times(replies: Sequence[DecodedReply]) -> tuple[float, float]:
    """Seconds to the first token, the median, and of each token after it, the mean, in mode ar."""
    later = [record for reply in replies for record in reply.records[1:]]
    if not later:
        raise ValueError("the reply has one token, so no draft can make it earlier; ask for more words")
    first = statistics.median(reply.records[0].wait_seconds for reply in replies)
    return first, sum(record.wait_seconds for record in later) / sum(len(record.gained) for record in later)


def _machines(
    pairs: Sequence[tuple[DecodedReply, DecodedReply]],
    trips: Sequence[float],
    drafts: Sequence[DraftedAlong],
    first_s: float,
    target_s: float,
) -> Machines:
    records = [record for _, reply in pairs for record in reply.records]
    drafted, draft_s = sum(record.depth for record in records), sum(record.model_seconds for record in records)
    # A drafted token makes a pass longer: by the line through all passes of mode stream.
    later = [record for _, reply in pairs for record in reply.records[1:]]
    counts, growth = [record.drafted for record in later], 0.0
    if len(set(counts)) > 1:
        slope, plain = statistics.linear_regression(counts, [record.verify_seconds for record in later])
        growth = max(0.0, slope / plain) if plain > 0.0 else 0.0
    return Machines(
        draft_s=draft_s / drafted if drafted else statistics.median(draft.token_s for draft in drafts),
        draft_prefill_s=statistics.median(draft.prefill_s for draft in drafts),
        target_s=target_s,
        first_s=first_s,
        first_pass_s=min(first_s, statistics.median(reply.records[0].verify_seconds for reply, _ in pairs)),
        one_way_s=statistics.median(trips) / 2,
        growth=growth,
    )
