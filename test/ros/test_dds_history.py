# SPDX-License-Identifier: Apache-2.0
"""The draft node includes earlier steps, and the replies about them are the target's own."""

from __future__ import annotations

from ros_rig import CameraRig, picture

from dsd_msgs.srv import Decode
from dsd_ros.vlm.loading import ModelSettings, load_model

INSTRUCTION, LENGTH = "find it", 16
ACTIONS = ("forward 25 cm", "turn left 15 degrees", "turn right 45 degrees", "forward 50 cm")


def test_the_last_steps_are_shown_along(rig, tiny_pair):
    target = load_model(ModelSettings(str(tiny_pair[0])))
    camera = CameraRig(rig)
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.host("draft_node", model__path=tiny_pair[1], decode__max_tokens=LENGTH, history_frames=2)
    rig.until_active()
    stamps, sent, said = [], [], []
    for step in range(5):
        earlier = [(picture(n), ACTIONS[n]) for n in range(max(0, step - 2), step)]
        answer = camera.ask(picture(step), INSTRUCTION, history_stamps=stamps, history_actions=ACTIONS[:step])
        assert answer.success and answer.verified, answer.message
        sequence = target.prefill(picture(step), INSTRUCTION, earlier)
        while len(sequence.tokens) < LENGTH:
            sequence.append([int(sequence.next_logits().argmax())])
            if sequence.tokens[-1] in target.eos_token_ids:
                break
        assert answer.text == target.decode_text(sequence.tokens)
        stamps.append(answer.observation_stamp)
        sent.append(answer.stats.bytes_up)
        said.append(answer.text)
    assert len(set(said)) > 1
    assert max(sent) < 2 * min(sent)  # one new picture each

    # Steps that this node knows nothing of are left out.
    stranger = camera.ask(
        picture(9), INSTRUCTION, history_stamps=[Decode.Request().not_before],
        history_actions=["stop"],
    )  # fmt: skip
    plain = camera.ask(picture(9), INSTRUCTION)
    assert stranger.success and stranger.text == plain.text
    unpaired = camera.ask(picture(9), INSTRUCTION, history_stamps=stamps[:2])
    assert unpaired.code == Decode.Response.INVALID_REQUEST
    assert "one action for each" in unpaired.message
