# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a verifier: Prometheus metrics, and log lines with session, reply and round.

Names follow Prometheus' conventions: base units, counters end in _total. The values of every label are known when the
verifier starts (modes, refusal codes, exit layers) or stand in its tokens file (robots), so nothing that a peer sends
makes a new series. No line holds an instruction, a ticket or a token.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from dsd_ros import __version__
from dsd_ros.cloud.rounds import Answer, PendingRound, ReplyState, Session
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.wire.messages import PROTOCOL_VERSION, Draft, Message, Outcome, Refusal, RefusalCode, SessionReply

if TYPE_CHECKING:
    from dsd_ros.cloud.engine import VerifierEngine

_log = logging.getLogger(__name__)
disable_created_metrics()  # they would be a second series for each

OTHER = "other"  # the label's value for what should not occur
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
ENDS = ("closed", "expired", "evicted")  # by the robot, unused for too long, to make room
REFUSED_CONNECTIONS = ("token", "full", "draining")
SESSION_LIMITS = ("total", "robot")
DROPPED = ("missing", "forged", "replayed")  # a message's tag, over DDS


class _Counters(dict[str, Counter]):
    """The counters of one family by their label's value; OTHER for a value that is not known."""

    def __missing__(self, value: str) -> Counter:
        return self[OTHER]


class Metrics:
    """The counts of one engine, in a registry of their own. Thread-safe, a few microseconds per round."""

    def __init__(self, engine: VerifierEngine) -> None:
        self.registry = CollectorRegistry()
        self._engine = weakref.ref(engine)  # a registry must not keep a model in memory
        ProcessCollector(registry=self.registry)
        info = "1, with what this verifier is as labels."
        labels = {"version": __version__, "protocol": str(PROTOCOL_VERSION), "model": engine.model.name}
        self._gauge("info", info, *labels).labels(**labels).set(1)
        self._read_at_scrapes()
        self._count_sessions_and_links()
        self._count_rounds(map(str, engine.target.exit_layers))

    def _read_at_scrapes(self) -> None:
        """The metrics that are read from the engine at each scrape."""
        sessions = self._gauge("sessions", "Sessions held, by whether the robot's link is up.", "link")
        limit = self._gauge("sessions_limit", "Sessions that may be held at once.")
        caches = self._gauge("kv_cache_bytes", "Memory of the sessions' KV caches.")
        tokens = self._gauge("session_tokens", "Tokens of prompts and replies that sessions hold.")
        turns = self._gauge("queue_turns", "Observations, passes and rounds that wait for their turn.")
        size = self._gauge("queue_bytes", "Bytes of pictures and distributions that wait.")
        figures: list[tuple[Gauge, Callable[[VerifierEngine], int]]] = [
            (sessions.labels("up"), lambda engine: engine.held_sessions()[0]),
            (sessions.labels("down"), lambda engine: engine.held_sessions()[1]),
            (limit, lambda engine: engine.settings.max_sessions),
            (caches, lambda engine: engine.cache_bytes()),
            (tokens, lambda engine: engine.held_tokens()),
            (turns, lambda engine: engine.queue()[0]),
            (size, lambda engine: engine.queue()[1]),
        ]
        for gauge, figure in figures:
            gauge.set_function(partial(self._read, figure))

    def _count_sessions_and_links(self) -> None:
        self._opened = self._counters("sessions_opened_total", "Sessions opened.", "mode", PRESETS)
        self._resumed = self._counter("sessions_resumed_total", "Sessions resumed over a new link.")
        self._not_opened = self._counter("sessions_refused_total", "Requests for a session refused.")
        over = "Sessions refused because a limit is reached."
        self._over = self._counters("sessions_over_limit_total", over, "reason", SESSION_LIMITS)
        self._ended = self._counters("sessions_ended_total", "Sessions ended.", "reason", ENDS)
        self.connected = self._gauge("connections", "Robots' connections.").inc
        self.moved = self._counter("connections_moved_total", "Connections closed so that their robots move on.").inc
        self._robot_sessions = self._gauge("robot_sessions", "Sessions held, by the robot's name.", "robot")
        self._robot_rounds = self._counter("robot_rounds_total", "Passes and rounds, by the robot's name.", "robot")
        over = "Connections and sessions refused at a robot's own limit, by its name."
        self._robot_refused = self._counter("robot_refusals_total", over, "robot")
        refused = "Connections refused: wrong token, or a limit reached."
        self.refused_connections = self._counters("connections_refused_total", refused, "reason", REFUSED_CONNECTIONS)
        dropped = "Messages dropped because their tag is missing, forged or replayed."
        self.dropped = self._counters("messages_dropped_total", dropped, "reason", DROPPED)
        self.received = self._counter("received_bytes_total", "Frames received.").inc
        self.sent = self._counter("sent_bytes_total", "Frames sent.").inc

    def _count_rounds(self, layers: Iterable[str]) -> None:
        rounds = "Passes (modes stream and ar) and rounds verified."
        self._rounds = self._counters("rounds_total", rounds, "mode", PRESETS)
        drafted = "Drafted tokens verified, all nodes of a tree."
        self._drafted = self._counters("drafted_tokens_total", drafted, "mode", PRESETS)
        accepted = "Drafted tokens accepted. Each pass or round gives one more, so tau is 1 + accepted / rounds."
        self._accepted = self._counters("accepted_tokens_total", accepted, "mode", PRESETS)
        accepted = "Drafted tokens accepted, per pass or round with a draft."
        # What an API would bill, and what vLLM counts under these names.
        self._prompt = self._counter("prompt_tokens_total", "Tokens of prompts read, with those of pictures.").inc
        self._generated = self._counter("generation_tokens_total", "Tokens of replies.").inc
        self._round_accepted = self._histogram("round_accepted_tokens", accepted, TOKENS).observe
        together = "Replies whose passes or rounds the target made together."
        self.passing = self._histogram("pass_rounds", together, BATCH).observe
        passed = "One pass of the target for all of them, and sending their results."
        self.passed = self._histogram("pass_seconds", passed, SECONDS).observe
        modes = (*PRESETS, OTHER)
        seconds = self._histogram("round_seconds", "One pass or round in the target, exits included.", SECONDS, "mode")
        self._round_seconds = {mode: seconds.labels(mode).observe for mode in modes}
        reading = "Reading one observation with the target."
        self._read_seconds = self._histogram("observation_seconds", reading, SECONDS).observe
        waited = "How long an observation, a pass or a round waited for its turn."
        self.waited = self._histogram("queue_wait_seconds", waited, SECONDS).observe
        refused = "Rounds, drafts, observations and frames refused."
        self._refusals = self._counters("refusals_total", refused, "code", (code.value for code in RefusalCode))
        self._early = self._counters("early_outcomes_total", "Early outcomes of exits.", "layer", layers)
        self.resent = self._counter(
            "outcomes_resent_total", "Outcomes and verified tokens sent again because they got lost."
        ).inc
        self.failed = self._counter("failures_total", "Turns that ended in a defect.").inc

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"dsd_verifier_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"dsd_verifier_{name}", text, labels, registry=self.registry)

    def _counters(self, name: str, text: str, label: str, values: Iterable[str]) -> _Counters:
        family = self._counter(name, text, label)
        return _Counters({value: family.labels(value) for value in (*values, OTHER)})

    def _histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"dsd_verifier_{name}", text, labels, registry=self.registry, buckets=bounds)

    def _read(self, figure: Callable[[VerifierEngine], int]) -> float:
        engine = self._engine()
        return float(figure(engine)) if engine is not None else 0.0

    # -------------------------------------------------------------------------------- the engine

    def counting(self, answer: Answer) -> Answer:
        """``answer``, with every message that goes through it counted."""

        def counted(message: Message) -> object:
            self.sending(message)
            return answer(message)

        return counted

    def sending(self, message: Message) -> None:
        """A message is about to be sent to a robot."""
        if isinstance(message, Outcome):
            if not message.is_final:
                self._early[str(message.layer)].inc()
        elif isinstance(message, Refusal):
            self._refusals[message.code].inc()
            where = _where(message.session, message.reply, message.round)
            _log.debug("refused", extra=where | {"code": message.code})
        elif isinstance(message, SessionReply) and message.error:
            self._not_opened.inc()
            _log.info("session refused")

    def opened(self, session: Session, resumed: bool) -> None:
        """A session was opened, or resumed over a new link."""
        mode = session.request.mode
        (self._resumed if resumed else self._opened[mode]).inc()
        if session.robot and not resumed:
            self._robot_sessions.labels(session.robot).inc()
        fields = {"session": session.id, "mode": mode} | _robot(session.robot)
        _log.info("session %s", "resumed" if resumed else "opened", extra=fields)

    def ended(self, session: Session, reason: str) -> None:
        """A session ended, for one of the reasons in ENDS."""
        self._ended[reason].inc()
        if session.robot:
            self._robot_sessions.labels(session.robot).dec()
        _log.info("session %s", reason, extra={"session": session.id} | _robot(session.robot))

    def over_limit(self, limit: str, robot: str) -> None:
        """A session of ``robot``, "" without a name, was refused because one of SESSION_LIMITS is reached."""
        self._over[limit].inc()
        if limit == "robot":
            self._robot_refused.labels(robot).inc()
        _log.info("a session is over its limit (%s)", limit, extra=_robot(robot))

    def name_robots(self, names: Iterable[str]) -> None:
        """Begin the counts of these robots."""
        for name in names:
            for family in (self._robot_sessions, self._robot_rounds, self._robot_refused):
                family.labels(name)

    def refused(self, reason: str, robot: str = "") -> None:
        """A connection was refused, for one of REFUSED_CONNECTIONS; ``robot``: at its own limit."""
        self.refused_connections[reason].inc()
        if robot:
            self._robot_refused.labels(robot).inc()

    def read(self, session: Session, reply: ReplyState, tokens: int) -> None:
        """An observation of ``tokens`` was read, and its reply begins."""
        seconds = reply.prefill_us * 1e-6
        self._prompt(tokens)  # tokens that another verifier has generated are a part of this one's prompt
        self._read_seconds(seconds)
        fields = _where(session.id, reply.number, reply.rounds) | {"seconds": seconds} | _robot(session.robot)
        _log.info("observation read", extra=fields)

    def verified(self, round: PendingRound, outcome: Outcome, seconds: float) -> None:
        """A pass or a round was verified; the reply's tokens include its own."""
        session, reply, draft = round.session, round.reply, round.draft
        mode = session.request.mode if session.request.mode in self._rounds else OTHER
        drafted = len(draft.tokens)
        accepted = len(reply.tokens) - draft.confirmed - (0 if outcome.distribution else 1)
        # In a tree the robot itself accepts nodes after a rejection. The last recovered token is the round's own.
        recovered = max(0, len(draft.resampled) - 1)
        self._rounds[mode].inc()
        self._generated(accepted + len(draft.resampled) + (0 if outcome.distribution else 1))
        if session.robot:
            self._robot_rounds.labels(session.robot).inc()
        if drafted or recovered:
            self._drafted[mode].inc(drafted)
            self._accepted[mode].inc(accepted + recovered)
        if drafted:
            self._round_accepted(accepted)
        self._round_seconds[mode](seconds)
        if _log.isEnabledFor(logging.DEBUG):
            figures = {"mode": mode, "drafted": drafted, "accepted": accepted, "seconds": seconds}
            _log.debug("round verified", extra=_where(session.id, reply.number, outcome.round) | figures)

    def completed(self, session: Session, draft: Draft) -> None:
        """A reply ended with tokens that the robot drew itself."""
        self._accepted[session.request.mode].inc(max(0, len(draft.resampled) - 1))
        self._generated(len(draft.resampled))


def _robot(name: str) -> dict[str, object]:
    return {"robot": name} if name else {}


def _where(session: int, reply: int, number: int) -> dict[str, object]:
    return {"session": session, "reply": reply, "round": number}
