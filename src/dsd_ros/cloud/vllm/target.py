# SPDX-License-Identifier: Apache-2.0
"""A target whose weights are in a serving engine: rounds become requests for what follows a few prefixes.

A sequence is one request. A tree is one for each of its leaves, since engines have no tree attention; what the paths
share, their prefix cache holds. Greedy and coupled rounds bring back the chosen ids, the others whole rows of logits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from dsd_ros.cloud.exits import confidence_of
from dsd_ros.cloud.rounds import OnEarly, PendingRound, RoundRefused, Work
from dsd_ros.cloud.verification import microseconds_since, take_recovered
from dsd_ros.decoding.constraint import Constraint
from dsd_ros.decoding.methods import DraftVerdict, RoundContext, method_of, split
from dsd_ros.decoding.rejection import verify_tree_greedy
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.decoding.tree import ROOT, TokenTree
from dsd_ros.vlm.errors import VlmError
from dsd_ros.vlm.front import ModelFront, PreparedPrompt
from dsd_ros.wire.messages import Outcome, SessionRequest

_log = logging.getLogger(__name__)
T = TypeVar("T")
Tokens = tuple[int, ...]

MAX_LEAVES = 32  # requests of one round; of a tree with more only the upper levels are verified
ROWS, ARGMAX, COUPLED = "rows", "argmax", "coupled"
EXIT_ENGINE_LOST = 70
_WATCH_S = 1.0  # how often the engine is looked at


class EngineLost(Exception):
    """The engine has died, or does not answer any more; one sentence."""


class Wish(NamedTuple):
    """What a round wants at each position: logits, or what the target emits there as far as ``constraint`` allows it.

    Logits are masked here.
    """

    want: str  # ROWS, ARGMAX or COUPLED
    sampling: SamplingSettings
    seed: int
    reply: int
    constraint: Constraint | None = None


@dataclass
class EnginePrefix:
    """A prompt and the verified tokens of its reply; its keys and values are in the engine's prefix cache, or not.

    ``salt``: names this reply to the prefix cache, so that no other request can have filled it beyond the verified
    tokens, whose rows would be missing then.
    """

    prompt: PreparedPrompt
    tokens: list[int] = field(default_factory=list)
    salt: str = field(default_factory=lambda: secrets.token_hex(16))
    shown: bool = False  # the engine has had the pictures

    unread = 0  # ``prefill`` reads it whole
    cache_bytes = 0  # of keys and values here

    def __post_init__(self) -> None:
        self.prompt_length = len(self.prompt.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """See ``sessions.Prefix``."""
        self.tokens.extend(int(token) for token in tokens)


class EngineClient(Protocol):
    """A way to ask an engine. Coroutines run in the loop of ``EngineTarget``."""

    async def start(self) -> None:
        """Load the model. ModelError, one sentence, when the engine cannot be used."""

    async def ask(self, prefix: EnginePrefix, tail: Sequence[int], rows: int, wish: Wish) -> torch.Tensor:
        """What the target says at the last ``rows`` positions of a prefix and the tokens after it.

        Logits (rows, V); or (rows, 2), the emitted id and the model's confidence. VlmError for a request that fails;
        EngineLost when the engine answers none.
        """

    async def healthy(self) -> bool:
        """Whether the engine lives. Asked about once a second."""

    async def close(self) -> None:
        """Stop what ``start`` began."""


def exit_without_answer(reason: EngineLost) -> None:
    """End the process at once: a robot that hears nothing redials and goes on elsewhere, a refused one would stop."""
    _log.critical("%s; this verifier exits, and its robots go on with the next one", reason)
    logging.shutdown()
    os._exit(EXIT_ENGINE_LOST)


class EngineTarget:
    """A model in a serving engine: all methods, trees by their leaves, no early exits."""

    concurrent = True
    exit_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: ModelFront,
        client: EngineClient,
        timeout_s: float,
        on_lost: Callable[[EngineLost], object] = exit_without_answer,
    ) -> None:
        """Returns when the engine can be asked. ``timeout_s``: an engine silent for longer is lost."""
        self.model = model
        self._client = client
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()
        try:
            self._wait(client.start())
        except BaseException:
            self.close()
            raise
        asyncio.run_coroutine_threadsafe(self._watch_engine(), self._loop)

    def close(self) -> None:
        """Stop the engine."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def check(self, request: SessionRequest, sampling: SamplingSettings) -> None:
        """See ``Target``: everything can be served."""

    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]
    ) -> EnginePrefix:
        """See ``Target``. The engine reads the prompt while the robot drafts."""
        prefix = EnginePrefix(self.model.prompt(image, instruction, history))
        try:
            self._ask(prefix, [()], Wish(ARGMAX, SamplingSettings(0.0), 0, 0))
        except EngineLost as lost:
            self._on_lost(lost)
            raise VlmError(str(lost)) from lost
        return prefix

    def verify(self, work: Sequence[Work], on_early: OnEarly) -> Iterator[tuple[Work, Outcome | RoundRefused | None]]:
        """See ``Target``. No round is answered when the engine is lost."""
        for round in work:
            assert isinstance(round, PendingRound), "no prompt is left unread"
            prefix = round.reply.sequence
            assert isinstance(prefix, EnginePrefix), "this target has not read the reply's observation"
            before, owed = len(prefix.tokens), round.reply.owed
            try:
                result: Outcome | RoundRefused = self._verify(round, prefix)
            except Exception as error:
                del prefix.tokens[before:]
                round.reply.owed = owed
                if isinstance(error, EngineLost):
                    self._on_lost(error)
                    return
                result = RoundRefused.of(error)
            yield round, result

    def _verify(self, round: PendingRound, prefix: EnginePrefix) -> Outcome:
        session, draft, model = round.session, round.draft, self.model
        method = method_of(session.proof, session.sampling.greedy)
        drafted = TokenTree.from_bytes(draft.tokens, draft.parents)
        evidence = method.read(draft.evidence, drafted, session.request.vocab_size)
        # What exceeds the context cannot be verified; a shorter draft is just as exact.
        tree = bounded(drafted.cut(max(0, model.max_length - prefix.prompt_length - draft.confirmed)))
        take_recovered(round.reply, draft.resampled, model.vocab_size)
        want = ARGMAX if session.sampling.greedy else COUPLED if session.proof.declared.draws_alike else ROWS
        wish = Wish(want, session.sampling, session.request.seed, draft.reply, session.constraint)
        began = time.perf_counter()
        paths = node_paths(tree, model.vocab_size)
        found = self._ask(prefix, paths, wish)
        ran_us = microseconds_since(began)
        rows = torch.stack([found[path] for path in paths])
        if want == ROWS and session.constraint is not None:
            rows = session.constraint.mask(rows, prefix.tokens, tree.tokens, tree.parents)
        if want == ROWS:
            context = RoundContext(session.sampling, session.request.seed, draft.reply, draft.round, draft.confirmed)
            verdict = method.verify(tree, evidence, rows, context)
        else:
            walked = verify_tree_greedy(tree, _emitted(rows, model.vocab_size))
            verdict = DraftVerdict(walked.last + 1, walked.next_token)
        self._conclude(round, prefix, tree, verdict)
        last = rows[verdict.accepted]
        # When p itself travels, its confidence is not used.
        confidence = 0.0 if verdict.target is not None else confidence_of(last) if want == ROWS else float(last[1])
        return round.outcome(verdict, model.num_layers, confidence, ran_us, final=True)

    def _conclude(self, round: PendingRound, prefix: EnginePrefix, tree: TokenTree, verdict: DraftVerdict) -> None:
        prefix.append(tree.tokens_of(tree.path_to(verdict.accepted - 1)))
        if verdict.target is None:
            prefix.append([verdict.next_token])
        else:
            round.reply.owed = split.most_recovered(tree, verdict.accepted - 1)

    def _ask(self, prefix: EnginePrefix, paths: Sequence[Tokens], wish: Wish) -> dict[Tokens, torch.Tensor]:
        """The row after each path; VlmError, EngineLost."""
        return self._wait(self._ask_leaves(prefix, paths, wish))

    async def _ask_leaves(
        self, prefix: EnginePrefix, paths: Sequence[Tokens], wish: Wish
    ) -> dict[Tokens, torch.Tensor]:
        leaves = leaves_of(paths)
        answers = [self._client.ask(prefix, leaf, rows, wish) for leaf, rows in leaves]
        try:
            found = await asyncio.wait_for(asyncio.gather(*answers), self._timeout_s)
        except asyncio.TimeoutError:
            raise EngineLost(f"the engine has given no answer for {self._timeout_s:g} s") from None
        width = self.model.vocab_size if wish.want == ROWS else 2
        rows: dict[Tokens, torch.Tensor] = {}
        for (leaf, count), answer in zip(leaves, found, strict=True):
            if answer.shape != (count, width):
                raise VlmError(
                    f"the engine gave rows of shape {tuple(answer.shape)} for {count} positions of {self.model.name}, "
                    f"whose rows have {width} entries; is it another model?"
                )
            rows |= {leaf[: len(leaf) - count + 1 + row]: answer[row] for row in range(count)}
        return rows

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _watch_engine(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if not await self._client.healthy():
                self._on_lost(EngineLost("the engine has died"))
                return


def bounded(tree: TokenTree) -> TokenTree:
    """The deepest cut of a tree that has at most MAX_LEAVES leaves; a cut is as exact as the whole."""
    while len(tree) - sum(node != ROOT for node in tree.inner) > MAX_LEAVES:
        tree = tree.cut(tree.depth - 1)
    return tree


def node_paths(tree: TokenTree, vocab_size: int) -> list[Tokens]:
    """The tokens from the root to the root itself and to each node.

    An id beyond the target's vocabulary is rejected anyway: any other can stand in for it.
    """
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent + 1], token if token < vocab_size else 0))
    return paths


def leaves_of(paths: Sequence[Tokens]) -> list[tuple[Tokens, int]]:
    """The fewest paths that all others begin, and how many of each one's last positions no path before it has."""
    ordered = sorted(set(paths))  # a path stands directly before those that it begins
    leaves: list[tuple[Tokens, int]] = []
    before: Tokens | None = None
    for path, following in zip(ordered, [*ordered[1:], None], strict=True):
        if following is not None and following[: len(path)] == path:
            continue
        pairs = zip(before or (), path, strict=False)
        shared = -1 if before is None else len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        leaves.append((path, len(path) - shared))
        before = path
    return leaves


def _emitted(rows: torch.Tensor, vocab_size: int) -> list[int]:
    """The ids of rows (n, 2); an error unless each is a token."""
    ids = [int(token) for token in rows[:, 0].tolist()]
    if not all(0 <= token < vocab_size for token in ids):
        raise FloatingPointError("the target's logits are not finite")
    return ids
