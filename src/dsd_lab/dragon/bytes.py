"""How many bytes a token of an answer takes, by what travels of a distribution and how many tokens that is over.

python -m dsd_lab.dragon.bytes --json benchmarks/dragon-bytes.json

Answers of two sides as in `dsd-lab bench dragon`, with nothing held up, and every byte of every message counted. A
vocabulary beyond the model's own has lesser twins of its tokens (``recorded``): a longer tail than a real one's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dsd_lab.dragon.bench import PASSAGE_TOKENS, Bench, Side, Variant, answer_to
from dsd_lab.dragon.corpus import QUESTIONS, read_corpus, two_sides
from dsd_lab.dragon.recorded import RecordedModel, Rows
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.report import machine
from dsd_ros.dragon.documents.embedding import Encoder
from dsd_ros.dragon.mixture import KeptDocuments
from dsd_ros.dragon.peer import Profile
from dsd_ros.dragon.prompts import DocumentPrompt

VOCABULARIES = (49_152, 151_936)  # SmolLM2's, and Qwen2.5's
MOST = 0.1  # of a whole row, that a token may take in exact sparse mode
_EVIDENCE = ("sparse", "full", "lossy-nucleus")
_CASES = ((0.0, "shared"), (1.0, "shared"), (1.0, "independent"))


def measure_bytes(
    model: Any, encoder: Encoder, vocabularies: tuple[int, ...] = VOCABULARIES, questions: int = 2, max_tokens: int = 20
) -> dict[str, Any]:
    """Bytes per token, up and down together, for each vocabulary, temperature, randomness and evidence."""

    def count_tokens(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False).ids)

    bench = Bench(questions=questions, max_tokens=max_tokens)
    passages = two_sides(encoder, read_corpus(count_tokens, PASSAGE_TOKENS).passages)
    known = Rows(model)
    rows: list[dict[str, Any]] = []
    for size in vocabularies:
        sides = [
            Side(RecordedModel(known, name, size), found, KeptDocuments(), DocumentPrompt(model))
            for name, found in zip(("device", "cloud"), passages, strict=True)
        ]
        for temperature, randomness in _CASES:
            for evidence in _EVIDENCE:
                variant = Variant("", "dragon", evidence, temperature, randomness)
                answers = [
                    answer_to(bench, sides, QUESTIONS[number], variant, LinkProfile(), number, Profile())
                    for number in range(questions)
                ]
                tokens = sum(len(answer.tokens) for answer in answers)
                figures = [answer.statistics for answer in answers]
                sent = sum(one.bytes_up + one.bytes_down for one in figures) / tokens
                rows.append(
                    {
                        "vocabulary": size,
                        "temperature": temperature,
                        "randomness": randomness,
                        "evidence": evidence,
                        "exact": evidence != "lossy-nucleus",
                        "bytes_per_token": sent,
                        "share_of_a_row": sent / (4 * size),
                        "reveals_per_token": sum(one.reveals for one in figures) / tokens,
                    }
                )
    sparse = [row for row in rows if row["evidence"] == "sparse"]
    return {
        "bench": "dragon-bytes",
        "model": model.name,
        "machine": machine(),
        "questions": questions,
        "max_tokens": max_tokens,
        "rows": rows,
        "reached": all(row["share_of_a_row"] <= MOST for row in sparse),
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"Bytes a token, all messages both ways; {report['model']}, {report['questions']} questions.",
        f"{'vocabulary':>10}{'temperature':>13}  {'randomness':<13}{'evidence':<15}"
        f"{'bytes':>10}{'of a row':>10}{'asked':>8}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['vocabulary']:>10}{row['temperature']:>13g}  {row['randomness']:<13}{row['evidence']:<15}"
            f"{row['bytes_per_token']:>10.0f}{row['share_of_a_row']:>10.2%}{row['reveals_per_token']:>8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    from dsd_lab.bench.scenes import text_models
    from dsd_ros.dragon.documents.embedding import SentenceEncoder
    from dsd_ros.vlm.loading import load_model

    parser = argparse.ArgumentParser(description="Bytes a token, by evidence and vocabulary.")
    parser.add_argument("--questions", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    report = measure_bytes(load_model(text_models("", "")[1]), SentenceEncoder(), questions=args.questions)
    print(render(report))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
