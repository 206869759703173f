"""`dsd-lab train exits`: early-exit adapters for a frozen model, all of them from the same passes.

After the training of FSD (figure 3): the backbone and its LM head are frozen, and every exit's loss
reaches its own adapter alone. The loss is the Kullback-Leibler divergence from the final layer's
distribution to the exit's, on the tokens of replies. An exit has to foretell what the final layer
will say, not what a text says: the final layer's probabilities are exactly that, for every token of
the vocabulary, and they decide on acceptance also where nothing is decided by the likeliest token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dsd_lab.train.checkpoint import load_state, save_state
from dsd_lab.train.exit_backbones import Backbone, load_backbone
from dsd_lab.train.exit_data import Examples, HiddenStates, conversation_examples, scene_examples
from dsd_lab.train.exit_report import write_card
from dsd_lab.train.settings import ExitSettings
from dsd_lab.train.stages import schedule
from dsd_ros.vlm.exits import ExitAdapters, load_exits

_LOG = logging.getLogger(__name__)
Report = Callable[[str, float], None]
CONFIDENT = 0.95
_EPOCHS = 10.0
_LOG_EVERY = 50
_LOG_ROWS = 200


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """ "all" or "2,4" as 1-based layers below the last; ValueError for anything else."""
    if text.strip() == "all":
        return tuple(range(1, num_layers))
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"layers must be 'all' or numbers like 2,4, not {text!r}.") from None


def train_exits(settings: ExitSettings, report: Report | None = None) -> dict[str, Any]:
    """Train a model's exits, write them with their report, and return the report.

    Goes on where a kill left a run of the same settings. ``report(line, share)`` hears of the
    progress.
    """
    torch.set_num_threads(settings.threads)
    tell: Report = report or (lambda line, share: None)
    tell("loading the model", 0.0)
    backbone = load_backbone(settings.model, settings.device, settings.dtype)
    if settings.data is None:
        train, held = scene_examples(
            backbone, settings.cache, settings.worlds, settings.held_out, settings.workers,
            settings.seed, tell,
        )  # fmt: skip
    else:
        train, held = conversation_examples(settings.data, backbone, settings.context, settings.held_out, settings.seed)
    run = ExitTraining(settings, backbone, train)
    figures = run.train(tell)
    tell("measuring", 1.0)
    folder = settings.out or backbone.directory
    run.exits.save(folder, backbone.fingerprint)
    loaded = load_exits(
        folder, backbone.fingerprint, backbone.hidden_size, backbone.num_layers,
        torch.float32, backbone.device,
    )  # fmt: skip
    assert loaded is not None
    result = measure(backbone, loaded, HiddenStates(held, loaded.layers))
    result |= figures | {
        "data": "scenes" if settings.data is None else settings.data.name,
        "train_examples": len(train),
        "seed": settings.seed,
    }
    part = folder / "exits.json"
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_card(folder / "README.md", result)
    return result


def exit_losses(backbone: Backbone, exits: ExitAdapters, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Each exit's loss in turn, mean nats per token, from hidden states (exits + 1, tokens, hidden).

    A loss's graph holds its own adapter alone and is free again before the next one is made.
    """
    with torch.no_grad():
        final = backbone.head(hidden[-1]).log_softmax(-1)
    for layer, states in zip(exits.layers, hidden[:-1], strict=True):
        said = backbone.head(exits.adapter(layer)(states)).log_softmax(-1)
        yield functional.kl_div(said, final, reduction="batchmean", log_target=True)


class ExitTraining:
    """The training of one set of exits on one set of examples."""

    def __init__(self, settings: ExitSettings, backbone: Backbone, examples: Examples) -> None:
        scenes = settings.data is None
        self.settings, self.backbone = settings, backbone
        self.batch = settings.batch or (64 if scenes else 1)
        self.rate = settings.rate or (3e-3 if scenes else 1e-4)
        layers = parse_layers(settings.layers, backbone.num_layers)
        self.exits = ExitAdapters.untrained(backbone, layers, settings.rank, settings.seed)
        self.exits.to(backbone.device)
        self.states = HiddenStates(examples, self.exits.layers)
        self.optimizer = torch.optim.AdamW(self.exits.parameters(), lr=self.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.per_epoch = -(-len(examples) // self.batch)
        self.steps = settings.steps
        self.minutes = settings.minutes
        if self.steps is None and self.minutes is None:
            self.steps = max(1, round((settings.epochs or _EPOCHS) * self.per_epoch))
        self.path = settings.cache / backbone.fingerprint / f"{self._name(examples)}.safetensors"

    def _name(self, examples: Examples) -> str:
        """Runs that only differ in their length share a checkpoint: a longer one goes on."""
        s = self.settings
        data = "scenes" if s.data is None else hashlib.sha256(s.data.read_bytes()).hexdigest()
        key = [data, len(examples), self.exits.layers, self.exits.rank, s.seed, self.rate, self.batch]
        key += [s.context, s.dtype]
        return "exits-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]

    def indices(self, step: int) -> list[int]:
        """The examples of a step; equal steps give equal batches, an epoch uses each once."""
        epoch, place = divmod(step, self.per_epoch)
        order = np.random.default_rng([self.settings.seed, 62, epoch]).permutation(len(self.states.examples))
        found: list[int] = order[place * self.batch : (place + 1) * self.batch].tolist()
        return found

    def train(self, report: Report, save_seconds: float = 30.0) -> dict[str, Any]:
        """Train until the steps or minutes are over; returns steps, minutes, epochs and losses."""
        step, spent = 0, 0.0
        losses: list[float] = []
        history: list[dict[str, Any]] = []
        modules = {"exits": self.exits}
        if self.path.exists():
            progress = load_state(self.path, modules, self.optimizer)
            step, spent = progress["step"], progress["minutes"]
            losses, history = progress["losses"], progress["history"]
            _LOG.info("going on at step %d", step)

        def save() -> None:
            progress = {"step": step, "minutes": spent, "losses": losses, "history": history}
            save_state(self.path, modules, self.optimizer, progress)

        saved = time.monotonic()
        while True:
            share = step / self.steps if self.steps is not None else spent / (self.minutes or 1.0)
            if share >= 1.0:
                break
            began = time.monotonic()
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (step + 1) / 50) * schedule(share)
            each = self.step(self.indices(step))
            step += 1
            if each is not None:
                keep = min(0.95, 1 - 1 / step) if losses else 0.0
                old = losses or each
                losses = [keep * a + (1 - keep) * b for a, b in zip(old, each, strict=True)]
            spent += (time.monotonic() - began) / 60
            if step % _LOG_EVERY == 0:
                history.append({"step": step, "losses": [round(loss, 5) for loss in losses]})
                _LOG.info("step %d, loss per exit %s", step, history[-1]["losses"])
                if len(history) > _LOG_ROWS:
                    del history[::2]
            if time.monotonic() - saved > save_seconds:
                save()
                saved = time.monotonic()
            report(f"step {step}, loss {' '.join(f'{loss:.3f}' for loss in losses)}", share)
        save()
        return {
            "steps": step,
            "epochs": round(step / self.per_epoch, 2),
            "minutes": round(spent, 2),
            "batch": self.batch,
            "rate": self.rate,
            "losses": dict(zip(map(str, self.exits.layers), losses, strict=False)),
            "history": history,
        }

    def step(self, indices: list[int]) -> list[float] | None:
        """One step on some examples; each exit's loss, or None when no example can be used."""
        hidden = self.states.of(indices)
        if hidden is None:
            return None
        self.optimizer.zero_grad(set_to_none=True)
        each = []
        for layer, loss in zip(self.exits.layers, exit_losses(self.backbone, self.exits, hidden), strict=True):
            loss.backward()
            # One by one: a common norm would let a bad exit slow the others down.
            nn.utils.clip_grad_norm_(self.exits.adapter(layer).parameters(), 1.0)
            each.append(float(loss.detach()))
        self.optimizer.step()
        return each


@torch.no_grad()
def measure(backbone: Backbone, exits: ExitAdapters, states: HiddenStates) -> dict[str, Any]:
    """How far each exit foretells the final layer on held-out replies; ValueError if there are none.

    ``agreement``: share of tokens whose likeliest next token is the final layer's;
    ``confident_share``: tokens of which the exit is more than 95 % sure; ``confident_agreement``:
    the agreement among those (None without any); ``loss``: nats per token; ``parameters`` and their
    ``share`` of the model with all its exits.
    """
    tokens = replies = 0
    sums = np.zeros((len(exits.layers), 4))
    for index in range(len(states.examples)):
        hidden = states.of([index])
        if hidden is None:
            continue
        replies += 1
        tokens += hidden.shape[1]
        final = backbone.head(hidden[-1]).log_softmax(-1)
        for row, (layer, some) in enumerate(zip(exits.layers, hidden[:-1], strict=True)):
            said = exits.logits(backbone, layer, some).log_softmax(-1)
            best, choice = said.max(-1)
            sure = best.exp() > CONFIDENT
            right = choice == final.argmax(-1)
            kl = functional.kl_div(said, final, reduction="sum", log_target=True)
            values = (right.sum(), sure.sum(), (right & sure).sum(), kl)
            sums[row] += [float(value) for value in values]
    if tokens == 0:
        raise ValueError("No held-out conversation can be used; give more data.")
    whole = backbone.parameters_count + exits.parameters_count
    each = exits.parameters_count // len(exits.layers)
    rows = [
        {
            "layer": layer,
            "agreement": right / tokens,
            "confident_share": sure / tokens,
            "confident_agreement": both / sure if sure else None,
            "loss": kl / tokens,
            "parameters": each,
            "share": each / whole,
        }
        for layer, (right, sure, both, kl) in zip(exits.layers, sums.tolist(), strict=True)
    ]
    return {
        "model": backbone.directory.resolve().name,
        "fingerprint": backbone.fingerprint,
        "num_layers": backbone.num_layers,
        "rank": exits.rank,
        "parameters": exits.parameters_count,
        "share": exits.parameters_count / whole,
        "held_out_replies": replies,
        "held_out_tokens": tokens,
        "exits": rows,
    }
