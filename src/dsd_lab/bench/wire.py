"""`dsd-lab bench wire`: what each proof and shape of a draft costs on the link, and a reply's time by rate.

Replies are sampled by the product's own models, sessions and messages. Bytes, acceptance and tau are counted without
a link; then the same replies are decoded over an emulated link at every rate, which may cost time and no token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsd_lab.bench import scenes as ask
from dsd_lab.bench.pace import Pace, paced
from dsd_lab.bench.scenes import BATCH_GROWTH, Scene, held_out_scenes, text_scenes
from dsd_lab.bench.wire_distances import Distances
from dsd_lab.bench.wire_report import computed_seconds, make_report
from dsd_lab.bench.wire_setting import ALONE, PAIR, Contender, WireSetting
from dsd_lab.links.emulation import EmulatedChannel
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import Channel, LocalChannel
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Observation
from dsd_ros.wire.pictures import NO_PICTURE, encode_picture

_MODES = {ALONE: "ar", "full": "dsd", "split": "dssd", "truncated": "tslt", "coupled": "coupled"}


def measure_wire(
    setting: WireSetting,
    draft: ModelSettings,
    target: ModelSettings,
    progress: Callable[[int, int, str, DecodedReply], None] | None = None,
) -> dict[str, Any]:
    """Ask the same questions with every proof and shape; the report as JSON holds it.

    The questions are about held-out pictures, or a text model's instructions. progress(replies done, replies in all at
    most, label, reply) after each reply. Raises ValueErrors for what cannot be measured, ModelError, LinkError.
    """
    scenes = (text_scenes if setting.model == "text" else held_out_scenes)(setting.images)
    robot, cloud = paced(load_model(draft)), paced(load_model(target))
    contenders = _contenders(setting, robot.vocab_size)
    done, total = 0, len(contenders) * (setting.images * setting.draws + setting.timed_count * len(setting.uplinks))

    def decode(one: Contender, number: int, draw: int, channel: Channel) -> DecodedReply:
        nonlocal done
        seed = setting.decode.seed + draw * setting.images + number
        reply = ask.decode(channel, robot, dataclasses.replace(one.decode, seed=seed), scenes[number])
        done += 1
        if progress is not None:
            progress(done, total, one.label, reply)
        return reply

    with VerifierEngine(cloud) as engine:
        for one in contenders:  # what happens once in a process must not be measured
            short = dataclasses.replace(one.decode, max_tokens=ask.WARM_UP_TOKENS)
            ask.decode(LocalChannel(engine), robot, short, scenes[0])
        for draw in range(setting.draws):
            for number in range(setting.images):
                for one in contenders:
                    one.counted.append(decode(one, number, draw, LocalChannel(engine)))
        distances = _distances(contenders, robot, cloud, scenes)
        if setting.profile is not None:
            assert setting.profile.draft_s is not None and setting.profile.target_s is not None
            robot.pace, cloud.pace = Pace(setting.profile.draft_s, BATCH_GROWTH), Pace(setting.profile.target_s)
        for uplink in setting.uplinks:
            bearable = [
                one
                for one in contenders
                if max(computed_seconds(one, reply, setting, uplink) for reply in one.counted) <= setting.longest_s
            ]
            for number in range(setting.timed_count):
                # Each question begins with another proof, so that the first is not always the same.
                start = number % len(bearable) if bearable else 0
                for one in bearable[start:] + bearable[:start]:
                    channel = EmulatedChannel(LocalChannel(engine), setting.link(uplink))
                    one.timed.setdefault(uplink, []).append(decode(one, number, 0, channel))
    pictures = [observation_bytes(scene) for scene in scenes]
    return make_report(setting, contenders, distances, pictures, {"draft": robot, "target": cloud})


def _contenders(setting: WireSetting, vocabulary: int) -> list[Contender]:
    # The target alone draws with the shared noise: coupled must say the same.
    alone = dataclasses.replace(setting.decode, mode=_MODES[ALONE], proof="coupled")
    found = {"": Contender(ALONE, alone)}
    for proof in setting.proofs:
        for kept in setting.kept if proof == "truncated" else (None,):
            for shape in setting.shapes:
                if proof != "coupled" and not shape.draws:
                    continue
                changes: dict[str, Any] = {"mode": _MODES[proof], **dict(shape.settings)}
                if kept is not None:
                    changes["top_k_proof"] = kept.of(vocabulary)
                one = Contender(proof, dataclasses.replace(setting.decode, **changes), kept, shape)
                found.setdefault(one.label, one)
    return list(found.values())


def _distances(
    contenders: Sequence[Contender], robot: VisionLanguageModel, cloud: VisionLanguageModel, scenes: Sequence[Scene]
) -> Distances:
    """Both models' distributions over the replies of the target alone."""
    kept = [one.decode.top_k_proof for one in contenders]
    distances = Distances(robot.vocab_size, kept, [PAIR, *(one.children for one in contenders if one.children)])
    for index, reply in enumerate(contenders[0].counted):
        _compare(distances, robot, cloud, scenes[index % len(scenes)], reply.tokens, contenders[0].decode)
    return distances


def _compare(
    distances: Distances,
    robot: VisionLanguageModel,
    cloud: VisionLanguageModel,
    scene: Scene,
    tokens: list[int],
    decode: DecodeSettings,
) -> None:
    """Read a reply with both models; the draft token by token, since an int8 copy rounds longer passes otherwise."""
    rows = []
    for model in (cloud, robot):
        sequence = model.prefill(scene.image, scene.instruction)
        if model is cloud:
            logits = list(sequence.verify(tokens[:-1]))
        else:
            logits = [sequence.next_logits()]
            for token in tokens[:-1]:
                sequence.append([token])
                logits.append(sequence.next_logits())
        rows.append(torch.stack([transform(row, decode.sampling) for row in logits]).double().cpu().numpy())
    size = min(len(row[0]) for row in rows)  # models may pad their vocabularies differently
    distances.add(rows[0][:, :size], rows[1][:, :size])


def observation_bytes(scene: Scene) -> int:
    """Bytes of the message with the picture, if there is one, and the instruction."""
    if scene.image is None:
        return len(encode(Observation(1, 1, scene.instruction, 0, 0, NO_PICTURE, b"")))
    encoding = ask.PATIENT_LINK.image_encoding
    height, width = scene.image.shape[:2]
    picture = encode_picture(scene.image, encoding)
    return len(encode(Observation(1, 1, scene.instruction, height, width, encoding, picture)))
