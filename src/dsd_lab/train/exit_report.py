"""What is told about early exits: the table, the model card's section, and counts at full size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dsd_lab.train.settings import PUBLISHED
from dsd_ros.vlm.exits import ExitAdapters

_BEGIN = "<!-- dsd-lab train exits: begin -->"
_END = "<!-- dsd-lab train exits: end -->"


def table(report: dict[str, Any]) -> str:
    """The report of `training.exits.measure` as a Markdown table, a row per exit."""
    lines = [
        "| exit behind layer | agrees with the final layer | ... where more than 95 % sure "
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
    """Put the exits' section into a model card, in place of its former one; the rest stays."""
    card = path.read_text(encoding="utf-8") if path.exists() else f"# {report['model']}\n"
    section = f"{_BEGIN}\n{_section(report)}\n{_END}\n"
    before, begin, rest = card.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        before, after = card.rstrip("\n") + "\n\n", ""
    card = before + section + after.removeprefix("\n")
    path.write_text(card, encoding="utf-8")


def _section(report: dict[str, Any]) -> str:
    scenes = report["data"] == "scenes"
    data = "the model's own greedy replies about rendered rooms" if scenes else report["data"]
    lines = [
        "## Early exits",
        "",
        f"`exits.safetensors`: {len(report['exits'])} adapters of rank {report['rank']} "
        f"({report['parameters']:,} parameters, {report['share']:.2%} of the model with them)",
        "that let the LM head foretell the final layer from an earlier one. Trained by",
        f"`dsd-lab train exits` on {data} ({report['train_examples']} of them, {report['steps']} steps",
        f"of {report['batch']}, {report['minutes']:.1f} minutes), model and LM head frozen. Measured on",
        f"{report['held_out_replies']} replies ({report['held_out_tokens']} tokens) that were held out:",
        "",
        table(report),
    ]
    return "\n".join(lines)


def count_exits(name: str, rank: int | None = None) -> dict[str, Any]:
    """Exits behind every layer but the last of a published model, without weights, and the paper's.

    Returns exits, rank, parameters, share (of model and exits together), the paper's figures, and the
    rank that comes nearest to them. ValueError for a name not in ``PUBLISHED``.
    """
    if name not in PUBLISHED:
        raise ValueError(f"The exits of {name!r} cannot be counted; name {', '.join(PUBLISHED)}.")
    paper = PUBLISHED[name]
    with torch.device("meta"):
        model = _published_model(name)
        text = model.config.get_text_config()
        layers, width = text.num_hidden_layers, text.hidden_size
        exits = ExitAdapters(range(1, layers), width, layers, rank)
    whole = sum(parameter.numel() for parameter in model.parameters()) + exits.parameters_count
    return {
        "model": name,
        "exits": len(exits.layers),
        "rank": exits.rank,
        "parameters": exits.parameters_count,
        "share": exits.parameters_count / whole,
        "paper_exits": paper.exits,
        "paper_parameters": paper.parameters,
        "paper_share": paper.percent / 100,
        "nearest_rank": round((paper.parameters / paper.exits - width) / (2 * width)),
    }


def render_count(count: dict[str, Any]) -> str:
    """One line for `count_exits`."""
    return (
        f"{count['model']}: {count['exits']} exits of rank {count['rank']}, "
        f"{count['parameters'] / 1e6:.1f} M parameters, {count['share']:.2%} "
        f"(paper: {count['paper_exits']} exits, {count['paper_parameters'] / 1e6:.0f} M, "
        f"{count['paper_share']:.2%}; rank {count['nearest_rank']} comes nearest)"
    )


def _published_model(name: str) -> Any:
    """The architecture as its config.json on the hub has it."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

    if name == "qwen2-vl-7b":
        text = {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        }
        vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16}
        return Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        )
    large = name == "vicuna-13b"
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=5120 if large else 4096,
            intermediate_size=13824 if large else 11008,
            num_hidden_layers=40 if large else 32,
            num_attention_heads=40 if large else 32,
            vocab_size=32000,
            tie_word_embeddings=False,
        )
    )
