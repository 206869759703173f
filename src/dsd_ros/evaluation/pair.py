"""How good a trained pair is: actions, acceptance of the draft, and runs in the simulator."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsd_ros.navigation.actions import UnparsableReply, format_action, parse_reply
from dsd_ros.robot.world import World
from dsd_ros.training.data import TEST_SEEDS, Frame, shared_offscreen, world_frames
from dsd_ros.training.language_stage import EOS, image_tokens
from dsd_ros.training.replies import acceptance, followed, greedy_replies
from dsd_ros.training.rollouts import roll_out
from dsd_ros.training.text import instruction_for, prompt_ids

DEMO_SEED, DEMO_INSTRUCTION = 0, "find the silver bottle"
_PICTURES_PER_WORLD = 6
_FIRST_RUN_SEED = 100  # the seeds below served to choose between weights


def load_plain(folder: Path) -> tuple[Any, Any]:
    """A model directory as (transformers model in float32, tokenizers.Tokenizer)."""
    from tokenizers import Tokenizer
    from transformers import Qwen2VLForConditionalGeneration

    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no model: train one with `dsd train pair`.")
    model = Qwen2VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def held_out_scenes(count: int) -> tuple[np.ndarray, list[Frame]]:
    """Pictures (count, 112, 168, 3) and labels from worlds that no training saw.

    Mixed as in training: of each world's six the first four are from anywhere, with any thing in view
    as the goal, and the last two from the expert's way to the world's own target.
    """
    images: list[np.ndarray] = []
    labels: list[Frame] = []
    offscreen = shared_offscreen()
    for seed in TEST_SEEDS:
        some, their = world_frames(seed, _PICTURES_PER_WORLD, offscreen)
        images += some
        labels += their
        if len(images) >= count:
            break
    offscreen.close()
    return np.stack(images[:count]), labels[:count]


def on_way(number: int) -> bool:
    """Whether a held-out picture was taken on the expert's way to its world's target."""
    return number % _PICTURES_PER_WORLD >= _PICTURES_PER_WORLD - _PICTURES_PER_WORLD // 3


def action_of(text: str) -> str:
    """The action of a reply, "" when it does not parse."""
    try:
        return format_action(parse_reply(text).action)
    except UnparsableReply:
        return ""


def evaluate_pair(
    target: Path,
    draft: Path,
    scenes: int = 1000,
    seeds: int = 50,
    gamma: int = 4,
    training: dict[str, Any] | None = None,
    write_cards: bool = False,
    report: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Measure a pair on held-out scenes and in ``seeds`` runs from unseen seeds, 100 and up.

    An action counts as right when it is exactly the expert's. A run counts as a success when the
    robot stopped by itself within 0.6 m of the target and touched nothing on the way. Acceptance is
    the share of greedily drafted tokens that the target confirms. With `write_cards` the figures go
    into both model cards. `report(line, share)` hears of the progress. Raises ValueError when a
    directory holds no model.
    """
    tell = report or (lambda line, share: None)
    tell("rendering scenes", 0.0)
    big, tokenizer = load_plain(target)
    small, _ = load_plain(draft)
    images, labels = held_out_scenes(scenes)
    rng = np.random.default_rng(60)
    goals = [frame.replies[0] for frame in labels]
    prompts = [prompt_ids(tokenizer, instruction_for(goal, rng)) for goal, _ in goals]
    wanted = [action_of(text) for _, text in goals]
    figures: dict[str, Any] = {"scenes": scenes, "seeds": seeds, "gamma": gamma}
    replies: dict[str, list[list[int]]] = {}
    features: dict[str, torch.Tensor] = {}
    for share, (name, model) in zip((0.1, 0.5), (("target", big), ("draft", small)), strict=True):
        tell(f"{name}: replies about {scenes} scenes", share)
        features[name] = image_tokens(model.model.visual, images)
        replies[name] = greedy_replies(model, features[name], prompts)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in replies[name]]
        said = [action_of(text) for text in texts]
        right = [a == b for a, b in zip(said, wanted, strict=True)]
        figures[name] = {
            "actions_right": _mean(right),
            "actions_right_on_the_way": _mean([r for n, r in enumerate(right) if on_way(n)]),
            "actions_right_anywhere": _mean([r for n, r in enumerate(right) if not on_way(n)]),
            "parsed": _mean([bool(a) for a in said]),
            "replies_word_for_word": _mean(
                [t == g for t, (_, g) in zip(texts, goals, strict=True)]
            ),
            "by_action": _by(wanted, said),
            "tokens": float(np.mean([len(r) for r in replies[name]])),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        run_seeds = range(_FIRST_RUN_SEED, _FIRST_RUN_SEED + seeds)
        worlds = [World.from_seed(seed) for seed in run_seeds]
        tell(f"{name}: {seeds} runs", share + 0.15)
        runs = roll_out(model, tokenizer, worlds, max_steps=25, noisy=False)
        figures[name] |= {
            "closed_loop": _mean(runs.reached),
            "collided": _mean(runs.collided),
            "steps": float(np.mean(runs.steps)),
            "missed_seeds": [
                seed for seed, ok in zip(run_seeds, runs.reached, strict=True) if not ok
            ],
        }
        demo = roll_out(
            model, tokenizer, [World.from_seed(DEMO_SEED, DEMO_INSTRUCTION)], 25, noisy=False
        )
        figures[name]["demo_reached"] = demo.reached[0]
    whole = [n for n, r in enumerate(replies["target"]) if r and r[-1] == EOS]
    tell("acceptance", 0.9)
    guesses = followed(
        small,
        features["draft"][whole],
        [prompts[n] for n in whole],
        [replies["target"][n] for n in whole],
    )
    share, per_round = acceptance(guesses, [replies["target"][n] for n in whole], gamma)
    figures["acceptance"], figures["tokens_per_round"] = share, per_round
    if write_cards:
        for name, folder in (("target", target), ("draft", draft)):
            card = _card(name, figures, training)
            (folder / "README.md").write_text(card)
        (target.parent / "figures.json").write_text(
            json.dumps({"evaluation": figures, "training": training}, indent=2) + "\n"
        )
    return figures


def _mean(values: list[bool]) -> float:
    return float(np.mean(values)) if values else 0.0


def _by(wanted: list[str], said: list[str]) -> dict[str, dict[str, float]]:
    counts = Counter(wanted)
    right = Counter(w for w, s in zip(wanted, said, strict=True) if w == s)
    return {a: {"share_right": right[a] / n, "scenes": n} for a, n in sorted(counts.items())}


def _card(name: str, figures: dict[str, Any], training: dict[str, Any] | None) -> str:
    mine = figures[name]
    role = (
        "the target: the large model whose word counts"
        if name == "target"
        else "the draft: the small model that proposes tokens on the robot"
    )
    rows = "\n".join(
        f"| {action} | {value['scenes']:.0f} | {100 * value['share_right']:.1f} % |"
        for action, value in mine["by_action"].items()
    )
    missed = ", ".join(str(s) for s in mine["missed_seeds"]) or "none"
    return f"""---
license: apache-2.0
pipeline_tag: image-text-to-text
---

# dsd_ros {name}

A small vision-language model of Qwen2-VL architecture, {role}. It sees one picture of the simulated
robot's front camera (336 x 224, shrunk to 168 x 112: 24 image tokens) and an instruction that names a
colour and a kind, and answers with a line of reasoning and one action:
`<reasoning> Action: forward 25|50|75 cm`, `turn left|right 15|30|45 degrees` or `stop`.
{mine["parameters"] / 1e6:.2f} million parameters, float16, vocabulary of 512.

It knows the project's simulated rooms and nothing else: it is no model for real pictures.

## How it was made

`dsd train pair`, on pictures rendered by the project's own simulator and labelled by its expert. Stages:
the vision tower through throw-away heads, the language model on the frozen tower's tokens, both
together{_dagger_clause(training)}, and for the draft: a copy of the target's tower and a two-layer language model
trained on the target's own replies. Seeds: training 1 000 000 and up, validation 2 000 000 and up, held-out pictures
8 000 to 9 999, runs 100 and up.

{_training_lines(training)}

## How well it does

Measured by `dsd evaluate pair` in the run that wrote this card; {figures["scenes"]} scenes and
{figures["seeds"]} seeds that neither training nor the choice of weights saw, instructions in many phrasings, greedy
decoding. A third of the pictures were taken on the way to a target, as in training.

| | |
| --- | --- |
| actions right (exactly the expert's) | {100 * mine["actions_right"]:.1f} % |
| ... in pictures on the way to a target | {100 * mine["actions_right_on_the_way"]:.1f} % |
| ... in pictures from anywhere, of any thing in view | {100 * mine["actions_right_anywhere"]:.1f} % |
| replies that parse | {100 * mine["parsed"]:.1f} % |
| replies word for word the expert's | {100 * mine["replies_word_for_word"]:.1f} % |
| runs that reach the target without a collision | {100 * mine["closed_loop"]:.0f} % |
| runs with a collision | {100 * mine["collided"]:.0f} % |
| steps per run | {mine["steps"]:.1f} |
| missed seeds | {missed} |
| draft's acceptance, greedy, {figures["gamma"]} tokens a round | {figures["acceptance"]:.3f} |
| tokens per round of the target | {figures["tokens_per_round"]:.2f} |

| expert's action | scenes | right |
| --- | --- | --- |
{rows}
"""


def _dagger_clause(training: dict[str, Any] | None) -> str:
    """What the stages of DAgger add to the prose, when there were any."""
    if not training or not training["dagger"]:
        return ""
    return (
        ", the same with pictures met while running the model in the loop and labelling what it\n"
        "meets (DAgger), then the mean of the weights at the ends of these last stages"
    )


def _training_lines(training: dict[str, Any] | None) -> str:
    if not training:
        return ""
    stages = [("vision tower", training["vision"]), ("target", training["target"])]
    stages.append(("target, tower unfrozen", training["joint"]))
    stages += [(f"DAgger round {n}", f) for n, f in enumerate(training["dagger"])]
    stages.append(("draft", training["draft"]))
    rows = "\n".join(f"| {n} | {f['steps']:.0f} | {f['minutes']:.1f} |" for n, f in stages)
    threads = training["settings"]["threads"]
    return (
        f"| stage | steps | minutes |\n| --- | --- | --- |\n{rows}\n\n"
        f"Measured on a {platform.machine()} CPU with {threads} threads. {training.get('note', '')}"
    )
