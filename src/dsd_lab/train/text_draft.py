# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train text-draft`: a draft for SmolLM2-135M made of its own first layers; resumable.

One trained decoder layer follows the first layers of the target, which stay frozen, and feeds the target's own head
(Kangaroo, arXiv 2404.18911, with the target's layer as the adapter). Its loss is the Kullback-Leibler divergence from
the target's distributions on the replies of conversations that the target writes itself. The trained layer alone is
kept; with the base it makes an ordinary model folder.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from dsd_lab.report import header, render_template
from dsd_lab.train.exits.examples import Example, self_written_examples
from dsd_lab.train.exits.training import put_section
from dsd_lab.train.forward import autocast
from dsd_lab.train.model import swap_directory
from dsd_lab.train.settings import TextDraftSettings
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_model, model_fingerprint, quiet_transformers
from dsd_ros.vlm.model import VisionLanguageModel

LAYER_FILE = "layer.safetensors"


class States(NamedTuple):
    """Hidden states of a conversation: what the trained layer reads, (1, length, hidden size), and what the head reads
    for each token of the reply, (tokens, hidden size)."""

    early: torch.Tensor
    final: torch.Tensor


def train_text_draft(settings: TextDraftSettings, base: Path, report: Report | None = None) -> dict[str, Any]:
    """Train the layer, write it with its report into ``settings.out``, and return it; continues a killed run."""
    s, tell = settings, report or (lambda line, share: None)
    torch.set_num_threads(s.threads)
    model = load_model(ModelSettings(str(base), device=s.device), exits=False)
    if not 1 <= s.layers < model.num_layers:
        raise ValueError(f"layers is {s.layers}; use 1 to {model.num_layers - 1} of the target's {model.num_layers}.")
    train, held = self_written_examples(model, s.cache, s.written, s.held_out, s.seed, tell)
    # The last layer knows what the head reads: after 240 conversations it is at 3.6 nats where its neighbour is at 4.6.
    layer = copy.deepcopy(model.hf.model.layers[-1]).requires_grad_(True)
    key = f"{s.seed}-{s.layers}-{len(train)}-{s.batch}-{s.rate:g}"
    path = s.cache / model.fingerprint / f"draft-{key}.safetensors"
    figures = run_stage(layer_stage(model, layer, train, s), path, s.minutes, s.steps, model.device, report=tell)
    tell("measuring", 1.0)
    figures |= {"layers": s.layers, "batch": s.batch, "rate": s.rate, "seed": s.seed, "train_examples": len(train)}
    figures |= measure(model, layer, held, s.layers)
    s.out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.half().cpu().contiguous() for name, tensor in layer.state_dict().items()}
    about = {"layers": s.layers, "base_fingerprint": model.fingerprint}
    save_file(weights, s.out / LAYER_FILE, metadata={"draft": json.dumps(about)})  # one key: equal files
    (s.out / LAYER_FILE).chmod(0o644)  # safetensors lets only its owner read it
    result = header("text-draft", ("dsd_lab/train", "dsd_ros/vlm"), target=base) | figures
    (s.out / "draft.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    put_section(s.out / "README.md", "text-draft", render_template("train/draft_card.md", r=result))
    return result


def layer_stage(
    model: VisionLanguageModel, layer: torch.nn.Module, examples: Sequence[Example], s: TextDraftSettings
) -> Stage:
    """The stage that trains the layer; an epoch uses each conversation once. The target reads each once in all."""
    per_epoch = -(-len(examples) // s.batch)
    kept: dict[int, States] = {}

    def losses(step: int, share: float) -> Iterator[Losses]:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([s.seed, 63, epoch]).permutation(len(examples)).tolist()
        chosen = order[place * s.batch : (place + 1) * s.batch]
        for index in set(chosen) - set(kept):
            kept[index] = read(model, examples[index], s.layers)
        said = draft_logarithms(model, layer, [kept[index] for index in chosen])
        final = _logarithms(model, torch.cat([kept[index].final for index in chosen]))
        loss = functional.kl_div(said, final, reduction="batchmean", log_target=True)
        yield Losses(loss, loss, (said.detach().argmax(-1) == final.argmax(-1)).float().mean())

    return Stage("draft", {"layer": (layer, 1.0)}, losses, s.rate, weight_decay=0.0)


@torch.no_grad()
def read(model: VisionLanguageModel, example: Example, layers: int) -> States:
    """A pass of the target over a conversation."""
    prompt = model.prompt_tokens(example.instruction, 0)
    ids = torch.tensor([prompt + example.reply[:-1]], device=model.device)
    with autocast(model.device, enabled=False):  # they are kept for the whole training
        found = model.hf.model(ids, output_hidden_states=True, use_cache=False)
    return States(found.hidden_states[layers], found.last_hidden_state[0, len(prompt) - 1 :])


def draft_logarithms(
    model: VisionLanguageModel, layer: torch.nn.Module, conversations: Sequence[States]
) -> torch.Tensor:
    """The draft's log-probabilities, (tokens of the replies, vocabulary)."""
    inner, said = model.hf.model, []
    for early, final in conversations:
        length = early.shape[1]
        mask = torch.full((length, length), torch.finfo(early.dtype).min, device=early.device).triu(1)[None, None]
        turned = inner.rotary_emb(early, torch.arange(length, device=early.device)[None])
        hidden = layer(early, attention_mask=mask, position_embeddings=turned)
        said.append(inner.norm(hidden[0, -len(final) :]))
    return _logarithms(model, torch.cat(said))


def _logarithms(model: VisionLanguageModel, hidden: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary without its padding) of what the head reads."""
    known = model.tokenizer.get_vocab_size(with_added_tokens=True)
    logits: torch.Tensor = model.hf.lm_head(hidden)[:, :known]
    return logits.float().log_softmax(-1)


@torch.no_grad()
def measure(
    model: VisionLanguageModel, layer: torch.nn.Module, examples: Sequence[Example], layers: int
) -> dict[str, Any]:
    """Agreement of the likeliest tokens, acceptance when sampling (sum of min(p, q)), and loss, on held-out replies."""
    sums = np.zeros(4)
    for example in examples:
        states = read(model, example, layers)
        said, final = draft_logarithms(model, layer, [states]), _logarithms(model, states.final)
        right = (said.argmax(-1) == final.argmax(-1)).sum()
        shared = torch.minimum(said.exp(), final.exp()).sum()
        loss = functional.kl_div(said, final, reduction="sum", log_target=True)
        sums += [float(right), float(shared), float(loss), len(said)]
    agreement, acceptance, loss = (sums[:3] / sums[3]).tolist()
    tokens = {"held_out_replies": len(examples), "held_out_tokens": int(sums[3])}
    return {"agreement": agreement, "acceptance": acceptance, "held_out_loss": loss} | tokens


def write_draft(folder: Path, layer_file: Path, base: Path) -> Path:
    """Write the draft as an ordinary model folder, from the base and the trained layer; returns ``folder``."""
    try:
        with safe_open(layer_file, "pt") as file:
            about = json.loads(file.metadata()["draft"])
        trained = load_file(layer_file)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(f"{layer_file} holds no draft's layer ({error}); fetch or train it again") from error
    if about["base_fingerprint"] != model_fingerprint(base):
        raise ModelError(f"{layer_file} was trained on other weights than those in {base}; train it again")
    hf, count = load_model(ModelSettings(str(base)), exits=False).hf, about["layers"]
    hf.model.layers = hf.model.layers[: count + 1]
    hf.model.layers[count].load_state_dict({name: tensor.float() for name, tensor in trained.items()})
    hf.config.num_hidden_layers = count + 1
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(base, part, ignore=shutil.ignore_patterns("*.safetensors", "exits"))
    with quiet_transformers():
        hf.save_pretrained(part)
    swap_directory(part, folder)
    return folder
