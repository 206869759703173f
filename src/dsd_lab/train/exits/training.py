# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train exits`: early-exit adapters for a frozen model, all of them from the same passes.

After FSD (figure 3): each exit's loss reaches its own adapter alone. It is the Kullback-Leibler divergence from the
final layer's distribution to the exit's on the tokens of replies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dsd_lab.report import header, render_template
from dsd_lab.train.exits.examples import Example, HiddenStates, scene_examples, self_written_examples
from dsd_lab.train.settings import ExitSettings
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_ros.vlm.exits import ExitAdapters, load_exits
from dsd_ros.vlm.loading import ModelSettings, load_model, resolve_directory
from dsd_ros.vlm.model import VisionLanguageModel

CONFIDENT = 0.95
_EPOCHS = 10


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """ "all" or "2,4" as 1-based layers below the last; ValueError for anything else."""
    if text.strip() == "all":
        return tuple(range(1, num_layers))
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"layers must be 'all' or numbers like 2,4, not {text!r}.") from None


def train_exits(settings: ExitSettings, report: Report | None = None) -> dict[str, Any]:
    """Train a model's exits, write them with their report, and return the report; continues a killed run."""
    torch.set_num_threads(settings.threads)
    tell: Report = report or (lambda line, share: None)
    tell("loading the model", 0.0)
    directory = resolve_directory(settings.model)
    model = load_model(ModelSettings(str(directory), device=settings.device, dtype=settings.dtype), exits=False)
    model.hf.requires_grad_(False)
    s = settings
    if model.reads_pictures:
        data = "scenes"
        train, held = scene_examples(model, s.cache, s.worlds, s.held_out, s.workers, s.seed, tell)
    else:
        data = "self-written"
        train, held = self_written_examples(model, s.cache, s.written, s.held_out, s.seed, tell)
    exits, figures = fit(settings, model, train, tell)
    tell("measuring", 1.0)
    folder = settings.out or directory
    exits.save(folder, model.fingerprint)
    loaded = load_exits(folder, model.fingerprint, model.hidden_size, model.num_layers, torch.float32, model.device)
    assert loaded is not None
    measured = measure(model, loaded, HiddenStates(model, held, loaded.layers)) | figures
    result = header("exits", ("dsd_lab/train/exits", "dsd_ros/vlm"), target=directory) | measured
    result |= {"model": directory.resolve().name, "data": data, "train_examples": len(train), "seed": settings.seed}
    (folder / "exits.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_card(folder / "README.md", result)
    return result


def fit(
    s: ExitSettings, model: VisionLanguageModel, examples: Sequence[Example], report: Report, save_seconds: float = 30.0
) -> tuple[ExitAdapters, dict[str, Any]]:
    """Train exits on examples; returns them with steps, epochs, minutes, batch and rate.

    Runs that differ in their length alone share a checkpoint, so that a longer one continues a shorter one.
    """
    batch = s.batch or (64 if model.reads_pictures else 2)
    rate = s.rate or (3e-3 if model.reads_pictures else 5e-3)
    exits = ExitAdapters.untrained(model, parse_layers(s.layers, model.num_layers), s.rank, s.seed)
    exits.to(model.device)
    states = HiddenStates(model, examples, exits.layers)
    match_scale(exits, states)
    per_epoch = -(-len(examples) // batch)
    steps = s.steps if s.steps is not None or s.minutes is not None else _EPOCHS * per_epoch
    key = [len(examples), exits.layers, exits.rank, s.seed, rate, batch, s.dtype]
    name = "exits-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    stage = exit_stage(exits, states, batch, rate, s.seed)
    path = s.cache / model.fingerprint / f"{name}.safetensors"
    found = run_stage(stage, path, s.minutes, steps, model.device, report=report, save_seconds=save_seconds)
    found |= {"epochs": round(found["steps"] / per_epoch, 2), "minutes": round(found["minutes"], 2)}
    return exits, found | {"batch": batch, "rate": rate}


def match_scale(exits: ExitAdapters, states: HiddenStates) -> None:
    """Let each adapter's norm begin at the size of the hidden states that it reads, by the first example.

    Adam moves a weight as far whatever the loss is like. Beside states of 20 and more, which late layers have, what an
    adapter adds would stay small for thousands of steps.
    """
    with torch.no_grad():
        for layer, rows in zip(exits.layers, states.of(0)[:-1], strict=True):
            exits.adapter(layer).scale.fill_(rows.square().mean(-1).sqrt().median())


def exit_stage(exits: ExitAdapters, states: HiddenStates, batch: int, rate: float, seed: int) -> Stage:
    """A stage that trains all exits; an epoch uses each example once. Gradients are clipped exit by exit."""
    per_epoch = -(-len(states.examples) // batch)
    count = len(exits.layers)

    def losses(step: int, share: float) -> Iterator[Losses]:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([seed, 62, epoch]).permutation(len(states.examples))
        hidden = torch.cat([states.of(index) for index in order[place * batch : (place + 1) * batch].tolist()], dim=1)
        for loss, right in exit_losses(states.model, exits, hidden):
            yield Losses(loss, loss / count, right / count)

    modules = {f"exit{layer}": (exits.adapter(layer), 1.0) for layer in exits.layers}
    mixed = not states.model.reads_pictures  # a text model's head is most of the work
    return Stage("exits", modules, losses, rate, warm_up=50, weight_decay=0.0, clip_each=True, mixed=mixed)


def exit_losses(
    model: VisionLanguageModel, exits: ExitAdapters, hidden: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each exit's loss in turn (mean nats per token) and agreement, from states (exits + 1, tokens, hidden size)."""
    with torch.no_grad():
        final = _logarithms(model, hidden[-1])
    for layer, states in zip(exits.layers, hidden[:-1], strict=True):
        said = _logarithms(model, exits.adapter(layer)(states))
        right = (said.detach().argmax(-1) == final.argmax(-1)).float().mean()
        yield functional.kl_div(said, final, reduction="batchmean", log_target=True), right


def _logarithms(model: VisionLanguageModel, hidden: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary without its padding) of states (tokens, hidden size) before the head."""
    known = model.tokenizer.get_vocab_size(with_added_tokens=True)
    dtype = model.hf.get_input_embeddings().weight.dtype
    return model.head(hidden.to(dtype))[:, :known].log_softmax(-1)


@torch.no_grad()
def measure(model: VisionLanguageModel, exits: ExitAdapters, states: HiddenStates) -> dict[str, Any]:
    """How well each exit predicts the final layer on held-out replies.

    ``agreement``: share of tokens whose likeliest next token is the final layer's. ``confident_share``: share of which
    the exit is more than 95 % sure; ``confident_agreement``: agreement among those. ``loss``: nats per token.
    """
    tokens = 0
    sums = np.zeros((len(exits.layers), 4))
    for index in range(len(states.examples)):
        hidden = states.of(index)
        tokens += hidden.shape[1]
        final = _logarithms(model, hidden[-1])
        for row, (layer, some) in enumerate(zip(exits.layers, hidden[:-1], strict=True)):
            said = _logarithms(model, exits.adapter(layer)(some))
            best, choice = said.max(-1)
            sure = best.exp() > CONFIDENT
            right = choice == final.argmax(-1)
            kl = functional.kl_div(said, final, reduction="sum", log_target=True)
            values = (right.sum(), sure.sum(), (right & sure).sum(), kl)
            sums[row] += [float(value) for value in values]
    whole = sum(p.numel() for p in model.hf.parameters()) + exits.parameters_count
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
        "fingerprint": model.fingerprint,
        "num_layers": model.num_layers,
        "rank": exits.rank,
        "parameters": exits.parameters_count,
        "share": exits.parameters_count / whole,
        "held_out_replies": len(states.examples),
        "held_out_tokens": tokens,
        "exits": rows,
    }


def table(report: dict[str, Any]) -> str:
    """The report of `measure` as a Markdown table, a row per exit."""
    lines = [
        "| exit after layer | agrees with the final layer | ... where more than 95 % sure "
        "| share of such tokens | loss, nats | parameters | share of the model |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["exits"]:
        sure = row["confident_agreement"]
        lines.append(
            f"| {row['layer']} of {report['num_layers']} | {row['agreement']:.1%} "
            f"| {'-' if sure is None else f'{sure:.2%}'} | {row['confident_share']:.1%} "
            f"| {row['loss']:.3f} | {row['parameters']:,} | {row['share']:.2%} |"
        )
    return "\n".join(lines)


def write_card(path: Path, report: dict[str, Any]) -> None:
    """Put the exits' section into a model card in place of the former one; the rest stays."""
    put_section(path, "exits", render_template("train/exits/card.md", r=report, table=table(report)))


def put_section(path: Path, command: str, section: str) -> None:
    """Put what a ``dsd-lab train`` command says into a model card in place of what it said before; the rest stays."""
    begin, end = (f"<!-- dsd-lab train {command}: {place} -->" for place in ("begin", "end"))
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {path.parent.resolve().name}\n"
    before, found_begin, rest = card.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        before, after = card.rstrip("\n") + "\n\n", ""
    card = f"{before}{begin}\n{section}{end}\n{after.removeprefix(chr(10))}"
    path.write_text(card, encoding="utf-8")
