# SPDX-License-Identifier: Apache-2.0
"""One side of one answer as a pure state machine: no thread, model, clock or socket.

Both sides run it. Own drafts and the other side's messages go in, messages to the other side come out, and both sides
decide the same tokens. Source: DRAGON, section 4.2 (draft queues, target queue, aggregator).

A draft is identified by its position and the number of drafts of its side rejected before it. So a stale draft is
recognised in whatever order messages arrive.

An addition: a draft that ends the answer (or abstains) follows. The side has no more to say there, so it goes on
behind the other side's draft of that position, and counts as accepted if that one is. So while one side alone tells,
neither waits for verdicts. The side that aggregates sends its drafts for this without evidence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from dsd_ros.decoding.aggregation import BoundedDistribution, Decision, Head, SideDraft, Undecided, decide, head_of
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.packing import PackingError, pack_head, pack_probabilities, unpack_head, unpack_probabilities
from dsd_ros.decoding.settings import SamplingError
from dsd_ros.dragon.mixture import Local
from dsd_ros.dragon.settings import SIDES, AggregationSettings
from dsd_ros.wire.messages import MAX_REVEALED, EndCode, Message, Proposal, Question, Reveal, Verdict

Sources: TypeAlias = tuple[tuple[int, float], tuple[int, float]]  # the device's and the cloud's


class Contradiction(Exception):
    """The other side sent something impossible; ``code`` is an EndCode. Internal to this package."""

    def __init__(self, sentence: str, code: EndCode = EndCode.OUT_OF_STEP) -> None:
        super().__init__(sentence)
        self.code = code


@dataclass(frozen=True)
class Step:
    """One decided token: which side decided it, whose drafts were accepted, and whether the other side takes over.

    ``sources``: of each side, (its document that tells the token, from 1, or 0; how much of the probability it gives).
    """

    token: int
    aggregator: str
    device_accepted: bool
    cloud_accepted: bool
    switch: bool
    sources: Sources = ((0, 0.0), (0, 0.0))


@dataclass
class _Draft:
    token: int
    local: Local
    decode_us: int
    told: tuple[int, float]  # ``Local.source_of``
    behind: int | None  # the token that the next draft comes after: this one, the one followed, or not yet known


@dataclass
class _OtherDraft:
    """A draft of the other side; its evidence is unpacked when the draft is first used."""

    proposal: Proposal
    known: BoundedDistribution | None = None
    asked: list[int] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, bool]:
        """Of two drafts of a position the greater counts: made after more rejections, or with evidence."""
        return self.proposal.rejections, bool(self.proposal.evidence)


class AggregationState:
    """The answer and the drafts as seen by ``side``, "device" or "cloud". Not thread-safe.

    While ``drafts``, make a draft after ``prefix`` and pass it to ``drafted``. Pass what arrives to ``receive``, and
    send what ``take`` returns, in that order. ``epoch`` changes when a draft in progress has become useless.
    """

    def __init__(
        self,
        question: Question,
        side: str,
        vocab_size: int,
        other_vocab_size: int,
        eos_token_ids: frozenset[int],
        switch: Callable[[str, Decision], bool] = lambda _side, _decision: False,
    ) -> None:
        """``eos_token_ids``: of both sides. ``switch(this side, decision)``: whether the other side aggregates next."""
        self.question = question
        self.side = side
        self.other = SIDES[1 - SIDES.index(side)]
        self.tokens: list[int] = list(question.answered)
        self.steps: list[Step] = []
        self.aggregator = question.aggregator
        self.rejections = dict.fromkeys(SIDES, 0)
        self.reveals = 0
        self._sizes = {side: vocab_size, self.other: other_vocab_size}
        self._eos = eos_token_ids
        self._switch = switch
        self._own: deque[_Draft] = deque()
        self._theirs: dict[int, _OtherDraft] = {}
        self._out: list[Message] = []
        self._asked: Reveal | None = None
        self._known: BoundedDistribution | None = None  # this side's own distribution at the next position

    # ------------------------------------------------------------------ questions

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        tokens = self.tokens
        return len(tokens) >= self.question.max_tokens or bool(tokens and tokens[-1] in self._eos)

    @property
    def aggregates(self) -> bool:
        """Whether this side aggregates now."""
        return self.aggregator == self.side

    @property
    def epoch(self) -> int:
        """Changes when this side's drafts are dropped."""
        return self.rejections[self.side]

    @property
    def prefix(self) -> list[int]:
        """The decided tokens and this side's drafts, after which the next draft comes."""
        return self.tokens + [draft.token if draft.behind is None else draft.behind for draft in self._own]

    @property
    def drafts(self) -> bool:
        """Whether another draft is wanted."""
        if self.ended or len(self._own) >= self.question.window:
            return False
        if self._own and self._own[-1].behind is None:
            return False
        return len(self.tokens) + len(self._own) < self.question.max_tokens

    @property
    def waiting(self) -> dict[str, int]:
        """The number of waiting drafts of each side."""
        return {self.side: len(self._own), self.other: len(self._theirs)}

    @property
    def ahead(self) -> tuple[int, int]:
        """The numbers of consecutive drafts that wait after the next position: this side's and the other's."""
        theirs, first = 0, len(self.tokens) + 1
        while (held := self._theirs.get(first + theirs)) is not None:
            if held.proposal.rejections != self.rejections[self.other]:
                break
            theirs += 1
        return max(0, len(self._own) - 1), theirs

    def take(self) -> list[Message]:
        """Remove and return the messages to send, in order."""
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------ events

    def drafted(self, local: Local, decode_us: int = 0) -> None:
        """Draft a token from the distribution after ``prefix``; SamplingError if it is invalid."""
        position = len(self.tokens) + len(self._own)
        token = self._draw(local.p, position)
        behind = None if token in self._eos else token
        self._own.append(_Draft(token, local, decode_us, local.source_of(token), behind))
        self._follow()
        if self.aggregates:
            self._aggregate()
            if behind is not None and position >= len(self.tokens):
                self._post(Proposal, position, self.rejections[self.side], token, 0.0, b"")
        else:
            self._propose(position)

    def receive(self, message: Message) -> None:
        """Take a message of this question and attempt. After Contradiction the state is unusable."""
        if isinstance(message, Proposal):
            self._on_proposal(message)
        elif isinstance(message, Verdict):
            self._on_verdict(message)
        elif isinstance(message, Reveal):
            if message.values:
                self._on_revealed(message)
            else:
                self._reveal(message)

    def _on_proposal(self, proposal: Proposal) -> None:
        first, last = len(self.tokens), len(self.tokens) + 2 * self.question.window
        if proposal.rejections < self.rejections[self.other] or proposal.position < first:
            return  # rejected or decided while it was on its way
        if proposal.position > last or proposal.position >= self.question.max_tokens:
            raise Contradiction(f"a draft of position {proposal.position} is too far ahead of {first} decided tokens")
        held = self._theirs.get(proposal.position)
        if held is not None and held.order >= (proposal.rejections, bool(proposal.evidence)):
            return  # a duplicate
        self._theirs[proposal.position] = _OtherDraft(proposal)
        self._follow()
        self._aggregate()

    def _on_verdict(self, verdict: Verdict) -> None:
        if verdict.position != len(self.tokens):
            return  # a duplicate, or one after a lost verdict, which only another attempt repairs
        if self.aggregates or not self._own or verdict.token >= self._sizes[self.side]:
            raise Contradiction(f"a verdict on position {verdict.position} was not due")
        accepted = {"device": verdict.device_accepted, "cloud": verdict.cloud_accepted}
        own = self._own[0].token
        follows = own in self._eos and accepted[self.other]
        if accepted[self.side] != (own == verdict.token or follows):
            raise Contradiction("a verdict contradicts its own token about a draft")
        told = verdict.source, verdict.source_share / 100
        sources = self._sources(verdict.token, told, verdict.cloud_share / 100)
        self._decided(verdict.token, accepted, verdict.hands_over, sources)
        asked, self._asked = self._asked, None
        if asked is not None:
            self._reveal(asked)
        self._aggregate()

    def _reveal(self, message: Reveal) -> None:
        """Send the aggregator the exact probabilities it needs to decide the next token."""
        if message.position > len(self.tokens):
            self._asked = message  # it has overtaken a verdict
            return
        stale = message.rejections != self.rejections[self.side]
        if self.aggregates or stale or message.position < len(self.tokens) or not self._own:
            return
        p = self._own[0].local.p
        if max(message.ids) >= len(p):
            raise Contradiction("the other side asked for a token that this side does not have")
        values = p[torch.tensor(message.ids)].numpy()
        self.reveals += 1
        self._post(Reveal, message.position, message.rejections, message.ids, pack_probabilities(values))

    def _on_revealed(self, message: Reveal) -> None:
        theirs = self._theirs.get(message.position)
        if not self.aggregates or theirs is None or theirs.known is None or message.position != len(self.tokens):
            return
        if message.rejections != theirs.proposal.rejections or message.ids != theirs.asked:
            return
        try:
            theirs.known.reveal(message.ids, unpack_probabilities(message.values, len(message.ids)))
        except (SamplingError, PackingError) as error:
            raise Contradiction(str(error), EndCode.BAD_EVIDENCE) from error
        theirs.asked = []
        self._aggregate()

    # ------------------------------------------------------------------ aggregation

    def _aggregate(self) -> None:
        """Decide as many tokens as possible while this side aggregates."""
        while self.aggregates and not self.ended and self._own:
            theirs = self._theirs.get(len(self.tokens))
            if theirs is None or theirs.asked or theirs.order != (self.rejections[self.other], True):
                return
            found = self._decide(theirs)
            if isinstance(found, Undecided):
                self._ask(theirs, found)
                return
            found = self._with_followers(found, theirs.proposal.token)
            position, decode_us = len(self.tokens), self._own[0].decode_us
            accepted = {"device": found.device_accepted, "cloud": found.cloud_accepted}
            ends = found.token in self._eos or position + 1 >= self.question.max_tokens
            switch = not ends and self._switch(self.side, found)
            ahead = theirs.proposal.log_weight - self._own[0].local.log_weight
            cloud_share = 0.5 * (1.0 + math.tanh((ahead if self.other == "cloud" else -ahead) / 2.0))
            told = theirs.proposal.source, theirs.proposal.source_share / 100
            told = told if theirs.proposal.token == found.token else (0, 0.0)
            sources = self._sources(found.token, told, cloud_share)
            named = self._named(self._own[0], found.token)
            if named:
                named["cloud_share"] = round(100 * cloud_share)
            self._post(Verdict, position, found.token, *accepted.values(), switch, decode_us, **named)
            self._decided(found.token, accepted, switch, sources)
            if switch:  # the other side has not seen this side's drafts
                for number in range(len(self._own)):
                    self._propose(len(self.tokens) + number)

    def _decide(self, theirs: _OtherDraft) -> Decision | Undecided:
        proposal, own = theirs.proposal, self._own[0]
        noise = self._noise(len(self.tokens))
        try:
            if theirs.known is None:
                theirs.known = self._known_from(proposal, noise)
            if self._known is None:
                self._known = BoundedDistribution.whole(own.local.p)
            offers = {
                self.side: SideDraft(own.token, own.local.log_weight, self._known),
                self.other: SideDraft(proposal.token, proposal.log_weight, theirs.known),
            }
            return self._decide_offers(offers["device"], offers["cloud"], noise)
        except (SamplingError, PackingError) as error:
            raise Contradiction(str(error), EndCode.BAD_EVIDENCE) from error

    def _ask(self, theirs: _OtherDraft, undecided: Undecided) -> None:
        theirs.asked = undecided.ids[:MAX_REVEALED]
        self.reveals += 1
        self._post(Reveal, len(self.tokens), theirs.proposal.rejections, theirs.asked)

    def _named(self, draft: _Draft, token: int) -> dict[str, int]:
        """The fields of a message that say which document tells ``token``; the device keeps that to itself."""
        number, share = draft.told if draft.token == token else (0, 0.0)
        return {"source": number, "source_share": round(100 * share)} if self.side == "cloud" else {}

    def _sources(self, token: int, told: tuple[int, float], cloud_share: float) -> Sources:
        """A step's ``sources``, from what the other side says of its own. A draft of another token tells nothing."""
        own = self._own[0]
        both = {self.side: own.told if own.token == token else (0, 0.0), self.other: told}
        (device, one), (cloud, other) = both["device"], both["cloud"]
        return (device, one * (1.0 - cloud_share)), (cloud, other * cloud_share)

    def _with_followers(self, found: Decision, theirs: int) -> Decision:
        """The decision where a draft that ends the answer counts as accepted if the other side's is."""
        drafts = {self.side: self._own[0].token, self.other: theirs}
        device, cloud = (found.token == drafts[side] for side in SIDES)
        device_ends, cloud_ends = (drafts[side] in self._eos for side in SIDES)
        return Decision(found.token, device or (cloud and device_ends), cloud or (device and cloud_ends))

    def _follow(self) -> None:
        """Let the last draft, if it ends the answer, follow the other side's, which came after the same tokens."""
        if not self._own or self._own[-1].behind is not None:
            return
        for position, own in enumerate(self._own, len(self.tokens)):
            theirs = self._theirs.get(position)
            if theirs is None or theirs.proposal.rejections != self.rejections[self.other]:
                return
            if own.behind is None and theirs.proposal.token not in self._eos:
                own.behind = theirs.proposal.token
            elif own.behind != theirs.proposal.token:
                return

    def _decided(self, token: int, accepted: dict[str, bool], switch: bool, sources: Sources) -> None:
        """Apply a verdict; the same on both sides."""
        self._theirs.pop(len(self.tokens), None)
        self.tokens.append(token)
        self.steps.append(Step(token, self.aggregator, accepted["device"], accepted["cloud"], switch, sources))
        for side in SIDES:
            self.rejections[side] += not accepted[side]
        if accepted[self.side]:
            self._own.popleft()
        else:
            self._own.clear()
        due = self.rejections[self.other]
        for position, theirs in list(self._theirs.items()):
            if theirs.proposal.rejections < due:
                del self._theirs[position]
        self._known = None
        if self.ended:
            self._own.clear()
            self._theirs.clear()
        elif switch:
            self.aggregator = self.other if self.aggregates else self.side
        self._follow()

    def _propose(self, position: int) -> None:
        draft = self._own[position - len(self.tokens)]
        evidence = self._evidence(draft.local.p, draft.token, self._noise(position))
        rejections, weight = self.rejections[self.side], draft.local.log_weight
        named = self._named(draft, draft.token)
        self._post(Proposal, position, rejections, draft.token, weight, evidence, draft.decode_us, **named)

    def _post(self, kind: Callable[..., Message], *fields: object, **named: int) -> None:
        self._out.append(kind(self.question.ask, self.question.attempt, *fields, **named))

    # ------------------------------------------------------------------ what the paper's ablations change (dsd_lab)

    def _noise(self, position: int) -> np.ndarray | None:
        """G (V,) of a token; None: greedy."""
        question = self.question
        if question.temperature == 0.0:
            return None
        return gumbel(question.seed, question.reply, position, max(self._sizes.values()))

    def _draw(self, p: torch.Tensor, position: int) -> int:
        """A draft of this side, by the noise that the decision takes."""
        noise = self._noise(position)
        return int(p.argmax()) if noise is None else choose(p, noise[: len(p)])

    def _decide_offers(self, device: SideDraft, cloud: SideDraft, noise: np.ndarray | None) -> Decision | Undecided:
        return decide(device, cloud, noise)

    def _evidence(self, p: torch.Tensor, token: int, noise: np.ndarray | None) -> bytes:
        """What travels of p (V,) with a draft ``token``: its decisive tokens and a bound on the others."""
        return pack_head(*head_of(p, noise, self.question.head, token), len(p))

    def _known_from(self, proposal: Proposal, noise: np.ndarray | None) -> BoundedDistribution:
        """What a proposal says of the other side's p; PackingError or SamplingError if invalid."""
        size = self._sizes[self.other]
        return BoundedDistribution.of_head(Head(*unpack_head(proposal.evidence, size)), size, noise)


def own_choice(settings: AggregationSettings | Question, reply: int, p: torch.Tensor, position: int) -> int:
    """The token that a side alone draws from p (V,); the same for the same position and seed."""
    if settings.temperature == 0.0:
        return int(p.argmax())
    return choose(p, gumbel(settings.seed, reply, position, len(p)))
