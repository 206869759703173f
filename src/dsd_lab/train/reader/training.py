# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train reader`: from nothing to a text model that reads one short document; resumable."""

from __future__ import annotations

import copy
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dsd_lab.train.forward import language_forward, torch_device
from dsd_lab.train.frames import write_json
from dsd_lab.train.model import swap_directory
from dsd_lab.train.reader.corpus import Example, draw_example, examples
from dsd_lab.train.settings import ReaderSettings
from dsd_lab.train.stages import Losses, Report, Stage, run_stage
from dsd_lab.train.tokenizer import EOS, kept_tokenizer, write_text_files

DOCUMENT_PROMPT = "{document}\n\n{question}"
CONTEXT = 512
TOKENIZER: dict[str, Any] = {
    "vocabulary": 1024, "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "digits": False
}  # fmt: skip
# (until this example, most distractors, how often a document lacks a fact, weight of the prompt's own tokens): a model
# finds copying sooner where there is little else, and in the prompt's repeated names.
_LESSONS = ((10_000, 0, 0.3, 0.05), (22_000, 1, 0.6, 0.05), (math.inf, 4, 1.0, 0.0))
_GROUPS = 2  # of rows of similar length in a step, to save padding


@dataclass(frozen=True)
class ReaderSize:
    """Layers and widths of a reader."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int


SIZES = {
    "tiny": ReaderSize(layers=3, width=96, inner=256, heads=4, kv_heads=2),
    "base": ReaderSize(layers=5, width=160, inner=448, heads=5, kv_heads=5),
}


@dataclass
class Rows:
    """Padded token rows (N, length), and what an error in each next token costs (N, length - 1)."""

    ids: torch.Tensor
    weights: torch.Tensor


def build_reader(size: ReaderSize, seed: int = 0) -> Any:
    """A freshly initialized transformers Qwen2ForCausalLM of a size."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=TOKENIZER["vocabulary"],
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        initializer_range=0.05,  # transformers' default is for widths of thousands
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        use_sliding_window=False,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


def prompt_text(document: str, question: str) -> str:
    """The whole prompt, as chat template and document prompt render it."""
    turn = DOCUMENT_PROMPT.replace("{document}", document).replace("{question}", question)
    return f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def encode(tokenizer: Any, example: Example, reading: float = 0.0, bare: bool = False) -> tuple[list[int], list[float]]:
    """Token ids of prompt, answer and end, and their weights; ``bare``: without the empty lines before the question."""
    prompt = prompt_text(example.document, example.question)
    if bare:
        prompt = prompt.replace("user\n\n\n", "user\n", 1)
    costs = [piece.weight for piece in example.pieces for _ in piece.text]
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    answer = tokenizer.encode(example.answer, add_special_tokens=False)
    weights = [reading] * len(ids) + [costs[end - 1] for _, end in answer.offsets]
    return [*ids, *answer.ids, EOS], [*weights, example.pieces[-1].weight]


def collate(rows: Sequence[tuple[list[int], list[float]]]) -> Rows:
    """Pad rows at their ends."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(tokens) for tokens, _ in rows], batch_first=True)
    weights = pad([torch.tensor(costs) for _, costs in rows], batch_first=True)
    return Rows(ids, weights[:, 1:])


def draw_rows(tokenizer: Any, seed: int, step: int, batch: int) -> list[Rows]:
    """The rows of a step in groups of similar length; equal steps give equal rows."""
    rng = random.Random(f"{seed} {step}")
    _, crowd, doubt, reading = next(lesson for lesson in _LESSONS if step * batch < lesson[0])
    rows = []
    for _ in range(batch):
        example = draw_example(rng, crowd=crowd, doubt=doubt)
        bare = not example.document and rng.random() < 0.5
        rows.append(encode(tokenizer, example, reading, bare))
    rows.sort(key=lambda row: len(row[0]))
    size = max(1, batch // _GROUPS)
    return [collate(rows[first : first + size]) for first in range(0, batch, size)]


def reader_loss(model: Any, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the weighted cross entropies in nats, and the number of facts right (tokens of full weight)."""
    embeddings = model.model.embed_tokens(rows.ids[:, :-1])
    kind = embeddings.device.type
    if torch.is_autocast_enabled(kind):  # once for all layers: casts cost more than products here
        embeddings = embeddings.to(torch.get_autocast_dtype(kind))
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)[None]
    cos, sin = model.model.rotary_emb(embeddings, positions)
    hidden, _ = language_forward(model.model, embeddings, cos[:, None], sin[:, None])
    kept = rows.weights > 0
    logits = functional.linear(hidden[kept], model.lm_head.weight).float()
    targets, weights = rows.ids[:, 1:][kept], rows.weights[kept]
    loss = (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
    facts = weights == 1.0
    return loss, (logits[facts].argmax(-1) == targets[facts]).sum()


def reader_stage(model: Any, tokenizer: Any, s: ReaderSettings, device: torch.device) -> Stage:
    """The stage that trains a reader."""

    def losses(step: int, share: float) -> Iterator[Losses]:
        drawn = draw_rows(tokenizer, s.seed, step, s.batch)
        weight = float(sum(rows.weights.sum() for rows in drawn))
        facts = max(int(sum((rows.weights == 1.0).sum() for rows in drawn)), 1)
        for rows in drawn:
            loss, right = reader_loss(model, Rows(rows.ids.to(device), rows.weights.to(device)))
            yield Losses(loss / weight, loss / weight, right / facts)

    return Stage("reader", {"model": (model, 1.0)}, losses, s.rate, weight_decay=0.05)


def train_reader(settings: ReaderSettings, report: Report | None = None) -> dict[str, Any]:
    """Train the reader and write its directory; continues a killed run. Returns the figures of the training."""
    s = settings.resolved()
    device = torch_device(s.device)
    torch.set_num_threads(s.threads)
    some = examples(s.seed, 400 if s.smoke else 6000)
    texts = (f"{e.document}\n\n{e.question}\n{e.answer}" for e in some)
    tokenizer = kept_tokenizer(s.cache / "tokenizer.json", texts, **TOKENIZER)
    model = build_reader(SIZES[s.size], s.seed)
    stage = reader_stage(model, tokenizer, s, device)
    path, after = s.cache / "reader.safetensors", f"{s.seed}-{s.size}"
    figures = run_stage(stage, path, s.minutes, s.steps, device, after, report, s.save_seconds)
    figures |= {"batch": s.batch, "size": s.size, "parameters": sum(p.numel() for p in model.parameters())}
    folder = s.out / "reader"
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    copy.deepcopy(model).to("cpu").half().save_pretrained(part)
    prompts = {"prompt": "{instruction}", "document_prompt": DOCUMENT_PROMPT}
    write_text_files(part, tokenizer, CONTEXT, prompts)
    (part / "model.safetensors").chmod(0o644)
    swap_directory(part, folder)
    write_json(s.cache / "figures.json", figures)
    return figures
