"""`dsd-lab train reader`: from nothing to a text model that reads one short document; resumable."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from dsd_lab.train.checkpoint import load_state, read_progress, save_state
from dsd_lab.train.devices import autocast, torch_device
from dsd_lab.train.forward import language_forward
from dsd_lab.train.reader_corpus import Example, draw_example, examples
from dsd_lab.train.settings import ReaderSettings

Report = Callable[[str, float], None]
DOCUMENT_PROMPT = "{document}\n\n{question}"
VOCABULARY = 1024
CONTEXT = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = SPECIAL_TOKENS.index("<|im_end|>")
# Until which example, distractors at most, how often a document may lack what is asked against the
# later lessons, and what an error in the prompt's own tokens costs: copying is found sooner where
# there is little else, and in the prompt's repeated names, too.
_LESSONS = ((10_000, 0, 0.3, 0.05), (22_000, 1, 0.6, 0.05), (math.inf, 4, 1.0, 0.0))
_GROUPS = 2  # of rows of like length in a step, so that little is padding


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
    "large": ReaderSize(layers=8, width=320, inner=896, heads=10, kv_heads=10),
}


@dataclass
class Rows:
    """Padded token rows (N, length) and what an error in each next token costs (N, length - 1)."""

    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Rows:
        return Rows(self.ids.to(device), self.weights.to(device))


def train_reader_tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of 1 024 tokens with Qwen's turn markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_reader(size: ReaderSize, seed: int = 0) -> Any:
    """A freshly initialized transformers Qwen2ForCausalLM of a size."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        initializer_range=0.05,  # what transformers takes is for widths of thousands
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
    """The whole prompt as chat template and document prompt render it."""
    turn = DOCUMENT_PROMPT.replace("{document}", document).replace("{question}", question)
    return f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def encode(tokenizer: Any, example: Example, reading: float = 0.0, bare: bool = False) -> tuple[list[int], list[float]]:
    """Token ids of prompt, answer and end, and each one's weight, ``reading`` in the prompt.

    ``bare``: no empty lines in front of the question, as where there is no document.
    """
    prompt = prompt_text(example.document, example.question)
    if bare:
        prompt = prompt.replace("user\n\n\n", "user\n", 1)
    costs = [piece.weight for piece in example.pieces for _ in piece.text]
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    answer = tokenizer.encode(example.answer, add_special_tokens=False)
    weights = [reading] * len(ids)
    weights += [costs[end - 1] for _, end in answer.offsets]
    return [*ids, *answer.ids, EOS], [*weights, example.pieces[-1].weight]


def collate(rows: Sequence[tuple[list[int], list[float]]]) -> Rows:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    weights = torch.zeros(len(rows), longest)
    for n, (tokens, costs) in enumerate(rows):
        ids[n, : len(tokens)] = torch.tensor(tokens)
        weights[n, : len(costs)] = torch.tensor(costs)
    return Rows(ids, weights[:, 1:])


def draw_rows(tokenizer: Any, seed: int, step: int, batch: int) -> list[Rows]:
    """The rows of a step in groups of like length; equal steps give equal rows."""
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


class _Steps(Dataset[list[Rows]]):
    """The rows of every step, for `DataLoader`, whose processes get the tokenizer as text."""

    def __init__(self, tokenizer: Any, seed: int, batch: int) -> None:
        self._text, self._seed, self._batch = tokenizer.to_str(), seed, batch
        self._tokenizer: Any = None

    def __getitem__(self, step: int) -> list[Rows]:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self._text)
        return draw_rows(self._tokenizer, self._seed, step, self._batch)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tokenizer": None}


def _drawn(tokenizer: Any, s: ReaderSettings, first: int) -> Iterator[list[Rows]]:
    """The rows of the steps from ``first`` on; with workers drawn ahead, for a GPU does not wait for Python."""
    steps: Any = itertools.count(first)
    return iter(
        DataLoader(
            _Steps(tokenizer, s.seed, s.batch), batch_size=None, sampler=steps,
            num_workers=s.workers, multiprocessing_context="spawn" if s.workers else None,
        )
    )  # fmt: skip


def reader_loss(model: Any, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the weighted cross entropies, nats, and (facts right, facts) among tokens of full weight."""
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
    right = (logits[facts].argmax(-1) == targets[facts]).sum()
    return loss, torch.stack((right, facts.sum()))


def rate_at(share: float) -> float:
    """Factor of the learning rate: flat, then down to nothing over the second half."""
    return 1.0 if share < 0.4 else 0.5 * (1 + math.cos(math.pi * (share - 0.4) / 0.6))


def train_reader(settings: ReaderSettings, report: Report | None = None) -> dict[str, Any]:
    """Train the reader and write its directory; resumes where a kill left it.

    `report(line, share)` hears of the progress. Returns the figures of training and evaluation.
    """
    report = report or (lambda line, share: None)
    if settings.smoke:
        settings = settings.tiny()
    torch.set_num_threads(settings.threads)
    settings.cache.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(settings)
    model = build_reader(SIZES[settings.size], settings.seed)
    figures = _train(model, tokenizer, settings, report)
    figures["batch"], figures["size"] = settings.batch, settings.size
    figures["parameters"] = sum(p.numel() for p in model.parameters())
    write_reader(model, tokenizer, settings.out / "reader")
    if settings.evaluate:
        from dsd_lab.pair.reader import evaluate_reader

        figures["evaluation"] = evaluate_reader(
            settings.out / "reader", training=figures, write_card=True, report=report
        )
    (settings.cache / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _tokenizer(settings: ReaderSettings) -> Any:
    from tokenizers import Tokenizer

    path = settings.cache / "tokenizer.json"
    if not path.exists():
        texts = [
            f"{e.document}\n\n{e.question}\n{e.answer}"
            for e in examples(settings.seed, 400 if settings.smoke else 6000)
        ]
        part = path.with_suffix(".part")
        train_reader_tokenizer(texts).save(str(part))
        os.replace(part, path)
    return Tokenizer.from_file(str(path))


def _train(model: Any, tokenizer: Any, s: ReaderSettings, report: Report) -> dict[str, Any]:
    """Train the weights in place, saving to the cache now and then; a checkpoint of another size begins anew."""
    path = s.cache / "reader.safetensors"
    device = torch_device(s.device)
    model.to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=s.rate, betas=(0.9, 0.98))
    step, spent, loss_mean, right_mean = 0, 0.0, 0.0, 0.0
    after = f"{s.seed}-{s.size}"
    if path.exists() and read_progress(path).get("after") == after:
        progress = load_state(path, {"model": model}, optimizer)
        step, spent = progress["step"], progress["minutes"]
        loss_mean, right_mean = progress["loss"], progress["right"]
    saved = time.monotonic()

    def state() -> dict[str, Any]:
        return {"step": step, "minutes": spent, "loss": loss_mean, "right": right_mean, "after": after}

    drawn = _drawn(tokenizer, s, step)
    model.train()
    while (share := step / s.steps if s.steps is not None else spent / s.minutes) < 1.0:
        began = time.monotonic()
        groups_of_rows = [rows.to(device) for rows in next(drawn)]
        for group in optimizer.param_groups:
            group["lr"] = s.rate * min(1.0, (step + 1) / 100) * rate_at(share)
        optimizer.zero_grad(set_to_none=True)
        weight = float(sum(rows.weights.sum() for rows in groups_of_rows))
        loss, counts = 0.0, torch.zeros(2, device=device)
        for rows in groups_of_rows:
            with autocast(device):
                part, right = reader_loss(model, rows)
            (part / weight).backward()
            loss += part.item() / weight
            counts += right
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        keep = min(0.98, 1 - 1 / step)
        loss_mean = keep * loss_mean + (1 - keep) * loss
        right_mean = keep * right_mean + (1 - keep) * float(counts[0] / counts[1].clamp(min=1))
        spent += (time.monotonic() - began) / 60
        if time.monotonic() - saved > s.save_seconds:
            save_state(path, {"model": model}, optimizer, state())
            saved = time.monotonic()
        if step % 10 == 0:
            report(f"reader step {step} loss {loss_mean:.3f} facts right {right_mean:.3f}", share)
    save_state(path, {"model": model}, optimizer, state())
    model.to("cpu").eval()
    return state()


def write_reader(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the model directory (float16 weights) next to the old one, then swap them."""
    from dsd_ros.vlm.prompts import CHAT_TEMPLATE

    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    copy.deepcopy(model).half().save_pretrained(part)
    tokenizer.save(str(part / "tokenizer.json"))
    (part / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[0],
            "bos_token": None,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
        "generation_config.json": {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0},
        "dsd.json": {"format": 1, "prompt": "{instruction}", "document_prompt": DOCUMENT_PROMPT},
    }
    for name, content in files.items():
        (part / name).write_text(json.dumps(content, indent=2) + "\n")
    card = folder / "README.md"
    if card.exists():
        shutil.copy(card, part / "README.md")
    shutil.rmtree(folder, ignore_errors=True)
    (part / "model.safetensors").chmod(0o644)
    part.rename(folder)
