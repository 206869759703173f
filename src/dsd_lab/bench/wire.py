# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench wire`: what each proof and shape of a draft costs on the link, and a reply's time by rate.

Bytes, acceptance and tau are counted without a link; then the same replies are decoded over an emulated link at every
rate, which may cost time and no token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dsd_lab.bench import scenes as ask
from dsd_lab.bench.pace import hold, paced
from dsd_lab.bench.scenes import Scene, Told, held_out_scenes, said, text_scenes
from dsd_lab.bench.wire_report import ALONE, PAIR, Contender, Distances, WireSetting, computed_seconds, make_report
from dsd_lab.links.emulation import EmulatedChannel
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.channel import Channel, LocalChannel
from dsd_ros.wire.codec import encode

_MODES = {ALONE: "ar", "full": "dsd", "split": "dssd", "truncated": "tslt", "coupled": "coupled"}


def measure_wire(
    setting: WireSetting, draft: ModelSettings, target: ModelSettings, progress: Told | None = None
) -> dict[str, Any]:
    """Ask the same questions with every proof and shape; the report as JSON. ValueErrors, ModelError, LinkError.

    progress(share done at least, what) after each reply.
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
            progress(done / total, said(one.label, reply))
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
        pictures = _observation_bytes(engine, scenes)
        if setting.profile is not None:
            hold(robot, cloud, setting.profile)
        for uplink in setting.uplinks:
            longest = {id(c): max(computed_seconds(c, r, setting, uplink) for r in c.counted) for c in contenders}
            bearable = [one for one in contenders if longest[id(one)] <= setting.longest_s]
            for number in range(setting.timed_count):
                # Each question begins with another proof, so that the first is not always the same.
                start = number % len(bearable) if bearable else 0
                for one in bearable[start:] + bearable[:start]:
                    channel = EmulatedChannel(LocalChannel(engine), setting.link(uplink))
                    one.timed.setdefault(uplink, []).append(decode(one, number, 0, channel))
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
        asked = scenes[index % len(scenes)], reply.tokens, contenders[0].decode
        p, q = _rows(cloud, *asked, whole=True), _rows(robot, *asked, whole=False)  # an int8 draft rounds longer passes
        size = min(p.shape[1], q.shape[1])  # models may pad their vocabularies differently
        distances.add(p[:, :size], q[:, :size])
    return distances


def _rows(model: VisionLanguageModel, scene: Scene, tokens: list[int], decode: DecodeSettings, whole: bool) -> Any:
    """A model's distributions over a reply, (n, V), in one pass (``whole``) or token by token."""
    sequence = model.prefill(scene.image, scene.instruction)
    logits = list(sequence.verify(tokens[:-1])) if whole else [sequence.next_logits()]
    for token in () if whole else tokens[:-1]:
        sequence.append([token])
        logits.append(sequence.next_logits())
    return torch.stack([transform(row, decode.sampling) for row in logits]).double().cpu().numpy()


def _observation_bytes(engine: VerifierEngine, scenes: Sequence[Scene]) -> list[int]:
    """Bytes of each message with the picture, as it travels to this verifier, and the instruction."""
    with EdgeSession(LocalChannel(engine), None, DecodeSettings(mode="ar")) as session:
        pictures, sizes = SessionPictures(ask.PATIENT_LINK), []
        for scene in scenes:
            pictures.begin(scene.image, (), session.verifier)
            sizes.append(len(encode(pictures.observation(1, 1, scene.instruction))))
    return sizes
