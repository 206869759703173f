"""The report on early exits: its table, and its section of the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_BEGIN = "<!-- dsd-lab train exits: begin -->"
_END = "<!-- dsd-lab train exits: end -->"


def table(report: dict[str, Any]) -> str:
    """The report of `training.measure` as a Markdown table, a row per exit."""
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
        "that let the LM head predict the final layer from an earlier one. Trained by",
        f"`dsd-lab train exits` on {data} ({report['train_examples']} of them, {report['steps']} steps",
        f"of {report['batch']}, {report['minutes']:.1f} minutes), model and LM head frozen. Measured on",
        f"{report['held_out_replies']} replies ({report['held_out_tokens']} tokens) that were held out:",
        "",
        table(report),
    ]
    return "\n".join(lines)
