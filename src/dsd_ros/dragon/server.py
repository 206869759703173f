# SPDX-License-Identifier: Apache-2.0
"""The cloud's side of questions: answers many devices at once, from documents that stay in the cloud.

One worker thread owns the model and drafts one token per turn. A second thread receives messages, so that a rejection
interrupts a forward pass. ``submit`` waits for neither.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from dsd_ros.dragon.documents.retrieval import Retriever, scale_of
from dsd_ros.dragon.documents.store import Store, open_documents
from dsd_ros.dragon.mixture import KeptDocuments, LocalMixture
from dsd_ros.dragon.profiler import Profile
from dsd_ros.dragon.prompts import Asking, DocumentPrompt
from dsd_ros.dragon.settings import SIDES, ServiceSettings
from dsd_ros.dragon.side import MAX_MEASURED_US, AnswerSide, end_of
from dsd_ros.dragon.state import Contradiction
from dsd_ros.limits import largest_vocabulary
from dsd_ros.paths import READER_INSTALL, SMALL_READER, models_directory, reader_note, shipped_model
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings
from dsd_ros.wire.messages import (
    PROTOCOL_VERSION,
    EndCode,
    Message,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Reveal,
    Verdict,
)
from dsd_ros.wire.turns import RobotLink, TurnQueue, account_of

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

Send = Callable[[Message], object]
QUESTION_MESSAGES = (Question, Proposal, Verdict, Reveal, QuestionEnd)
_ENDED_REMEMBERED = 256
_SILENT_S = 60.0
_WAITING_PER_ANSWER = 512  # messages; a window of 64 sends no more than that
_WAITING_BYTES = 64 << 20  # of evidence, of one link
_MAX_TOKENS = 4096


@dataclass(eq=False)
class _Answer:
    """One attempt at one question of one peer. Its messages are held until there is a ``side``."""

    question: Question
    reply: Send
    peer: Hashable
    side: AnswerSide | None = None
    stopped: bool = False
    came: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)  # when the device last sent something

    @property
    def key(self) -> tuple[Hashable, int]:
        return self.peer, self.question.ask

    def stop(self) -> None:
        self.stopped = True
        if self.side is not None:
            self.side.stop()


class DragonServer:
    """Answers the questions of any number of peers with one model and one store of documents.

    Any thread may call it. Input that cannot be used is answered by a QuestionReply with an error, or a QuestionEnd.
    """

    side_class: Callable[..., AnswerSide] = AnswerSide

    def __init__(
        self,
        model: Any,
        retriever: Retriever,
        settings: ServiceSettings | None = None,
        *,
        asking: Asking | None = None,
        kept: KeptDocuments | None = None,
        others: Sequence[Any] = (),
    ) -> None:
        """Start both threads.

        ``asking``: how a model is prompted, if not as its own template says. ``others``: models for devices
        that have their tokenizer and not that of ``model``.
        """
        self.model = model
        self.settings = settings or ServiceSettings()
        self._retriever = retriever
        self._models = {one.tokenizer_fingerprint: (one, asking or DocumentPrompt(one)) for one in (*others, model)}
        self._kept = kept if kept is not None else KeptDocuments()
        self._lock = threading.RLock()  # guards the next three
        self._answers: dict[tuple[Hashable, int], _Answer] = {}
        self._profiles: dict[Hashable, Profile] = {}
        self._ended: LRUCache[tuple[Hashable, int, int], bool] = LRUCache(_ENDED_REMEMBERED)
        # Messages wait, in order, until their answer has its side. An answer that can draft waits for its turn.
        self._inbox: TurnQueue[tuple[_Answer, Message]] = TurnQueue(_WAITING_PER_ANSWER, _WAITING_BYTES)
        self._turns: TurnQueue[_Answer] = TurnQueue(per_owner=1)
        self._threads = [
            threading.Thread(target=work, name=f"aggregation-{name}", daemon=True)
            for name, work in (("inbox", self._receive_all), ("worker", self._work_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def answers(self) -> int:
        """How many questions are being answered."""
        return len(self._answers)

    def submit(self, message: Message, reply: Send, peer: Hashable) -> bool:
        """Take a message of ``peer``; False when closed. ``reply`` is called from any thread and must not block."""
        refusal: Message | None = None
        with self._lock:
            if self._turns.closed:
                return False
            if isinstance(message, Question):
                refusal = self._take_question(message, reply, peer)
            elif isinstance(message, QUESTION_MESSAGES):
                refusal = self._take(message, peer)
        if refusal is not None:
            reply(refusal)
        return True

    def disconnect(self, peer: Hashable) -> None:
        """The peer's link is down: end its answers. Over its next link it asks again, with the tokens it has."""
        with self._lock:
            for answer in [a for a in self._answers.values() if a.peer == peer]:
                self._drop(answer)
            self._profiles.pop(peer, None)

    def close(self, timeout: float = 1.0) -> bool:
        """End all answers and both threads; False if one is still running after ``timeout`` seconds."""
        with self._lock:
            ended = list(self._answers.values())
            self._inbox.close()
            self._turns.close()
            for answer in ended:
                self._drop(answer)
        for answer in ended:
            answer.reply(end_of(answer.question, EndCode.CLOSING, "the cloud shuts down"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ under self._lock

    def _take_question(self, question: Question, reply: Send, peer: Hashable) -> Message | None:
        before = self._answers.get((peer, question.ask))
        if before is not None and before.question.attempt >= question.attempt:
            return None  # a duplicate
        if (peer, question.ask, question.attempt) in self._ended:
            return None
        if before is not None:
            self._drop(before)
        elif len(self._answers) >= self.settings.max_answers and not self._make_room():
            most = self.settings.max_answers
            sentence = f"the cloud already answers {most} questions at once; ask again later, or raise its max_answers"
            return end_of(question, EndCode.OVERLOADED, sentence)
        elif isinstance(peer, RobotLink) and 2 * sum(a.peer is peer for a in self._answers.values()) >= max(
            2, self.settings.max_answers
        ):
            sentence = "this connection already has its half of the cloud's max_answers questions; ask again later"
            return end_of(question, EndCode.OVERLOADED, sentence)
        model, _ = self._model_for(question)
        error = refusal_of(model, question, scale_of(self._retriever))
        if error:
            return QuestionReply(question.ask, question.attempt, error, *name_of(model), 0)
        answer = _Answer(question, reply, peer)
        self._answers[answer.key] = answer
        self._inbox.hold(answer)
        self._turns.put(answer, answer, of=account_of(peer))
        return None

    def _model_for(self, question: Question) -> tuple[Any, Asking]:
        """The model with the device's tokenizer, or else the one that will refuse the question, and its prompts."""
        own = self.model.tokenizer_fingerprint
        return self._models.get(question.tokenizer_fingerprint) or self._models[own]

    def _make_room(self) -> bool:
        """Drop the answer silent for longest, if for a minute: over a topic no disconnection is reported."""
        silent = min(self._answers.values(), key=lambda answer: answer.heard)
        if time.monotonic() - silent.heard < _SILENT_S:
            return False
        self._drop(silent)
        return True

    def _take(self, message: Any, peer: Hashable) -> Message | None:
        answer = self._answers.get((peer, message.ask))
        if answer is None or answer.question.attempt < message.attempt:
            if isinstance(message, QuestionEnd) or (peer, message.ask, message.attempt) in self._ended:
                return None
            self._ended[peer, message.ask, message.attempt] = True  # refuse it once only
            sentence = "the cloud does not know this question, or no longer; ask again with another attempt"
            return end_of(message, EndCode.UNKNOWN, sentence)
        if answer.question.attempt > message.attempt:
            return None
        answer.heard = time.monotonic()
        if isinstance(message, QuestionEnd):
            self._drop(answer)
        elif not self._inbox.put(
            answer, (answer, message), of=account_of(peer), size=len(getattr(message, "evidence", b""))
        ):
            self._drop(answer)
            return end_of(message, EndCode.OVERLOADED, "too many messages of this question are waiting")
        return None

    def _drop(self, answer: _Answer) -> None:
        answer.stop()
        self._inbox.discard(answer)
        self._turns.discard(answer)
        if self._answers.get(answer.key) is answer:
            del self._answers[answer.key]
        self._ended[answer.peer, answer.question.ask, answer.question.attempt] = True

    # ------------------------------------------------------------------ the two threads

    def _receive_all(self) -> None:
        while received := self._inbox.ready():
            for answer, message in received:
                assert answer.side is not None
                self._run(answer, partial(answer.side.receive, message))

    def _work_all(self) -> None:
        while turns := self._turns.ready():
            for answer in turns:
                if answer.side is not None:
                    self._run(answer, answer.side.work)
                elif not answer.stopped:
                    self._run(answer, partial(self._open, answer))

    def _run(self, answer: _Answer, step: Callable[[], object]) -> None:
        """Take a step of an answer, which ends where that fails, and no other with it; queue its next turn."""
        try:
            step()
        except Contradiction as error:
            self._give_up(answer, error.code, str(error))
        except ValueError as error:  # from prompts, contexts and distributions
            self._give_up(answer, EndCode.BAD_QUESTION if answer.side is None else EndCode.MODEL_ERROR, str(error))
        except Exception:
            _log.exception("an answer failed")
            self._give_up(answer, EndCode.MODEL_ERROR, "the cloud could not go on with this answer; its log says why")
        with self._lock:
            if answer.side is not None and answer.side.ended:
                self._drop(answer)
            elif answer.side is not None and answer.side.wants_work:
                self._turns.put(answer, answer, of=account_of(answer.peer))

    def _give_up(self, answer: _Answer, code: EndCode, sentence: str) -> None:
        with self._lock:
            if answer.stopped:
                return
            self._drop(answer)
        answer.reply(end_of(answer.question, code, sentence))

    def _open(self, answer: _Answer) -> None:
        question = answer.question
        model, asking = self._model_for(question)
        count = min(question.documents, self.settings.max_documents)
        documents = self._retriever.retrieve(question.text, count) if count else []
        mixture = LocalMixture(model, asking, question.text, documents, question.temperature, self._kept)
        mixture.reserve(question.max_tokens)
        ends = frozenset(question.eos_token_ids) | frozenset(model.eos_token_ids)
        with self._lock:
            if answer.stopped:
                return
            profile = self._profiles.setdefault(answer.peer, Profile())
        held = min(round(1e6 * (time.monotonic() - answer.came)), MAX_MEASURED_US)
        names = [found.source for found in documents]
        answer.reply(
            QuestionReply(question.ask, question.attempt, "", *name_of(model), len(documents), held, sources=names)
        )
        side = self.side_class(question, "cloud", question.vocab_size, ends, mixture, answer.reply, profile)
        with self._lock:
            answer.side = side
            if answer.stopped:
                side.stop()
            self._inbox.release(answer)


class WithDocuments:
    """A verifier engine and a DRAGON server behind one link; to the websocket server, one engine.

    It owns both, and the ``store`` if one is given.
    """

    def __init__(self, engine: Any, service: DragonServer, store: Store | None = None) -> None:
        self.engine = engine
        self.service = service
        self._store = store
        self.model, self.metrics = engine.model, engine.metrics
        self.held_sessions, self.queue = engine.held_sessions, engine.queue
        self.has_room = engine.has_room

    @property
    def sessions(self) -> int:
        """Sessions held by the engine."""
        return int(self.engine.sessions)

    @property
    def alive(self) -> bool:
        """Whether the engine's worker runs."""
        return bool(self.engine.alive)

    def submit(self, message: Message, reply: Send, peer: Hashable) -> bool:
        """Hand the message to whichever it is for; False when that one is closed."""
        served = self.service if isinstance(message, QUESTION_MESSAGES) else self.engine
        return bool(served.submit(message, reply, peer))

    def disconnect(self, peer: Hashable) -> None:
        self.service.disconnect(peer)
        self.engine.disconnect(peer)

    def close(self, timeout: float = 1.0) -> bool:
        """Close both; False if either is still running after ``timeout`` seconds."""
        done = self.service.close(timeout)
        done = bool(self.engine.close(timeout)) and done
        if self._store is not None:
            self._store.close()
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Documents:
    """What a verifier needs to answer questions: text models and a folder of documents."""

    model: Any
    folder: Path
    others: tuple[Any, ...] = ()  # see ``DragonServer``

    @classmethod
    def load(cls, folder: Path, settings: ModelSettings, text_model: str = "") -> Documents:
        """Load and check them; ModelError, DocumentError, StoreError or EmbeddingError for unusable ones.

        ``settings``: how a model runs; ``text_model``: its path. Without one it is the reader that ships, and the small
        reader too, for robots that have only that.
        """
        open_documents(folder).close()  # report unusable documents now
        if text_model:
            paths = [text_model]
        else:
            settings = replace(settings, quantization="none")  # that of a target; a reader is small
            paths = list(dict.fromkeys(map(str, (shipped_model(SMALL_READER), models_directory() / SMALL_READER))))
            if note := reader_note():
                _log.warning(note)
        model, *others = (load_model(replace(settings, path=path, prompt="")) for path in paths)
        return cls(model, folder, tuple(others))

    def serve(self, make_engine: Callable[[], Any], settings: ServiceSettings) -> WithDocuments:
        """One object that serves verification and questions, and owns the store and the engine."""
        with ExitStack() as stack:
            store = stack.enter_context(open_documents(self.folder))
            service = stack.enter_context(DragonServer(self.model, store, settings, others=self.others))
            served = WithDocuments(make_engine(), service, store)
            stack.pop_all()
        return served


def refusal_of(model: Any, question: Question, scale: str = "") -> str:
    """One sentence on why ``model`` cannot answer a question; "" if it can.

    ``scale``: of this side's relevances (``retrieval.scale_of``).
    """
    version, tokenizer = question.protocol_version, question.tokenizer_fingerprint
    theirs = question.relevance_fingerprint
    if version != PROTOCOL_VERSION:
        return (
            f"the robot speaks protocol version {version} and the cloud {PROTOCOL_VERSION}; install the same release "
            "of dsd_ros on both sides"
        )
    if tokenizer != model.tokenizer_fingerprint:
        return (
            f"the robot's tokenizer ({tokenizer or 'none'}) is not that of the cloud's {model.name} "
            f"({model.tokenizer_fingerprint}); give both sides the same text model, or on both, {READER_INSTALL}"
        )
    if question.documents and theirs != scale:
        return (
            f"the robot's relevances are of another scale ({theirs or 'unnamed'}) than the cloud's "
            f"({scale or 'unnamed'}); use the same embedding model and release on both sides"
        )
    if question.aggregator not in SIDES:
        return f"the cloud knows no aggregator {question.aggregator!r}; use one of {', '.join(SIDES)}"
    if not 1 <= question.max_tokens <= _MAX_TOKENS:
        return f"an answer of {question.max_tokens} tokens was asked for; use 1 to {_MAX_TOKENS}"
    sizes = question.vocab_size, model.vocab_size
    if max(sizes) > largest_vocabulary(min(sizes)):
        return f"the robot has a vocabulary of {sizes[0]} tokens and the cloud {sizes[1]}; only padding may differ"
    if any(token >= model.vocab_size for token in question.answered):
        return "the answer so far holds a token that the cloud's model does not have"
    if len(question.answered) >= question.max_tokens:
        return "the answer so far is as long as it may become"
    return ""


def name_of(model: Any) -> tuple[str, str, int, list[int]]:
    """A model's name, fingerprint, vocabulary size and end tokens, as a QuestionReply carries them."""
    return (
        model.name[:256], model.fingerprint[:256], model.vocab_size, sorted(model.eos_token_ids)[:16],
    )  # fmt: skip
