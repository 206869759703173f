# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train exits`: early-exit adapters for a frozen model, all of them from the same passes.

After FSD (figure 3): each exit's loss reaches its own adapter alone. It is the Kullback-Leibler divergence from the
final layer's distribution to the exit's on the tokens of replies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dsd_lab.report import header, render_template
from dsd_lab.train.exits.backbones import (
    Backbone,
    Examples,
    HiddenStates,
    conversation_examples,
    load_backbone,
    scene_examples,
)
from dsd_lab.train.exits.self_written import self_written_examples
from dsd_lab.train.settings import ExitSettings
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_ros.vlm.exits import ExitAdapters, load_exits

CONFIDENT = 0.95
_EPOCHS = 10.0
_SAMPLED, _LIKELIEST = 2048, 8  # of a large vocabulary: ids drawn for a step, and each token's likeliest ones
_BEGIN, _END = (f"<!-- dsd-lab train exits: {end} -->" for end in ("begin", "end"))


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
    backbone = load_backbone(settings.model, settings.device, settings.dtype)
    if settings.data is None and backbone.reads_images:
        data = "scenes"
        train, held = scene_examples(
            backbone, settings.cache, settings.worlds, settings.held_out, settings.workers, settings.seed, tell
        )
    elif settings.data is None:
        data = "self-written"
        given = settings.cache, settings.written, settings.held_out, settings.seed, tell
        train, held = self_written_examples(backbone, *given)
    else:
        data = settings.data.name
        train, held = conversation_examples(settings.data, backbone, settings.context, settings.held_out, settings.seed)
    exits, figures = fit(settings, backbone, train, tell)
    tell("measuring", 1.0)
    folder = settings.out or backbone.directory
    exits.save(folder, backbone.fingerprint)
    loaded = load_exits(
        folder, backbone.fingerprint, backbone.hidden_size, backbone.num_layers, torch.float32, backbone.device
    )
    assert loaded is not None
    measured = measure(backbone, loaded, HiddenStates(held, loaded.layers)) | figures
    result = header("exits", ("dsd_lab/train/exits", "dsd_ros/vlm"), target=backbone.directory) | measured
    result |= {"data": data, "train_examples": len(train), "seed": settings.seed}
    (folder / "exits.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    write_card(folder / "README.md", result)
    return result


def fit(
    s: ExitSettings, backbone: Backbone, examples: Examples, report: Report, save_seconds: float = 30.0
) -> tuple[ExitAdapters, dict[str, Any]]:
    """Train exits on examples; returns them with steps, epochs, minutes, batch and rate.

    Runs that differ in their length alone share a checkpoint, so that a longer one continues a shorter one.
    """
    source = "data" if s.data is not None else "scenes" if backbone.reads_images else "self-written"
    batch = s.batch or {"scenes": 64, "self-written": 2, "data": 1}[source]
    rate = s.rate or {"scenes": 3e-3, "self-written": 5e-3, "data": 1e-4}[source]
    exits = ExitAdapters.untrained(backbone, parse_layers(s.layers, backbone.num_layers), s.rank, s.seed)
    exits.to(backbone.device)
    states = HiddenStates(examples, exits.layers)
    match_scale(exits, states)
    per_epoch = -(-len(examples) // batch)
    steps = s.steps
    if steps is None and s.minutes is None:
        steps = max(1, round((s.epochs or _EPOCHS) * per_epoch))
    data = source if s.data is None else hashlib.sha256(s.data.read_bytes()).hexdigest()
    key = [data, len(examples), exits.layers, exits.rank, s.seed, rate, batch, s.context, s.dtype, "scaled"]
    name = "exits-" + hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    stage = exit_stage(backbone, exits, states, batch, rate, s.seed)
    path = s.cache / backbone.fingerprint / f"{name}.safetensors"
    found = run_stage(stage, path, s.minutes, steps, backbone.device, report=report, save_seconds=save_seconds)
    found |= {"epochs": round(found["steps"] / per_epoch, 2), "minutes": round(found["minutes"], 2)}
    return exits, found | {"batch": batch, "rate": rate}


def match_scale(exits: ExitAdapters, states: HiddenStates) -> None:
    """Let each adapter's norm begin at the size of the hidden states that it reads, by the first examples.

    Adam moves a weight as far whatever the loss is like. Beside states of 20 and more, which late layers have, what an
    adapter adds would stay small for thousands of steps.
    """
    some = (states.of([index]) for index in range(len(states.examples)))
    hidden = next((found for found in some if found is not None), None)
    if hidden is None:
        return
    with torch.no_grad():
        for layer, rows in zip(exits.layers, hidden[:-1], strict=True):
            exits.adapter(layer).scale.fill_(rows.square().mean(-1).sqrt().median())


def exit_stage(
    backbone: Backbone, exits: ExitAdapters, states: HiddenStates, batch: int, rate: float, seed: int
) -> Stage:
    """A stage that trains all exits; an epoch uses each example once. Gradients are clipped exit by exit."""
    per_epoch = -(-len(states.examples) // batch)
    count = len(exits.layers)

    def losses(step: int, share: float) -> Iterator[Losses]:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([seed, 62, epoch]).permutation(len(states.examples))
        hidden = states.of(order[place * batch : (place + 1) * batch].tolist())
        if hidden is not None:  # else none of the examples can be used
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            for loss, right in exit_losses(backbone, exits, hidden, generator):
                yield Losses(loss, loss / count, right / count)

    modules = {f"exit{layer}": (exits.adapter(layer), 1.0) for layer in exits.layers}
    return Stage("exits", modules, losses, rate, warm_up=50, weight_decay=0.0, clip_each=True, mixed=False)


def exit_losses(
    backbone: Backbone, exits: ExitAdapters, hidden: torch.Tensor, generator: torch.Generator | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each exit's loss in turn (mean nats per token) and agreement, from states (exits + 1, tokens, hidden size)."""
    with torch.no_grad():
        final = backbone.head(hidden[-1])
        columns, weight = _sampled_vocabulary(final, generator)
        final = (final if columns is None else final[:, columns] + weight).log_softmax(-1)
    for layer, states in zip(exits.layers, hidden[:-1], strict=True):
        said = (backbone.head(exits.adapter(layer)(states), columns) + weight).log_softmax(-1)
        right = (said.detach().argmax(-1) == final.argmax(-1)).float().mean()
        yield functional.kl_div(said, final, reduction="batchmean", log_target=True), right


def _sampled_vocabulary(logits: torch.Tensor, generator: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Ids that stand for a large vocabulary (Jean et al., 2015), and the log of how many each stands for."""
    size = logits.shape[-1]
    if size <= 4 * _SAMPLED:
        return None, torch.zeros((), device=logits.device)
    likeliest = logits.topk(_LIKELIEST, dim=-1).indices.unique()
    rest = torch.ones(size, dtype=torch.bool).index_fill_(0, likeliest.cpu(), False).nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=generator)[:_SAMPLED]].to(logits.device)
    weight = torch.zeros(len(likeliest) + len(drawn), device=logits.device)
    weight[len(likeliest) :] = np.log(len(rest) / len(drawn))
    return torch.cat([likeliest, drawn]), weight


@torch.no_grad()
def measure(backbone: Backbone, exits: ExitAdapters, states: HiddenStates) -> dict[str, Any]:
    """How well each exit predicts the final layer on held-out replies; ValueError where there are none.

    ``agreement``: share of tokens whose likeliest next token is the final layer's. ``confident_share``: share of which
    the exit is more than 95 % sure; ``confident_agreement``: agreement among those. ``loss``: nats per token.
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
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {report['model']}\n"
    section = f"{_BEGIN}\n{render_template('train/exits/card.md', r=report, table=table(report))}{_END}\n"
    before, begin, rest = card.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        before, after = card.rstrip("\n") + "\n\n", ""
    card = before + section + after.removeprefix("\n")
    path.write_text(card, encoding="utf-8")
