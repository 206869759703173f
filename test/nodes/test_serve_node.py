# SPDX-License-Identifier: Apache-2.0
"""OpenAI's API by a node: conversations over DDS topics."""

from __future__ import annotations

import base64
import io
import json
import socket
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from lifecycle_msgs.msg import Transition
from PIL import Image

from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.prompts import Chat

PICTURES = [np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8) for seed in (1, 2)]


def picture_part(picture: np.ndarray) -> dict:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_a_conversation_over_topics_gets_the_targets_own_reply(rig, tiny_pair):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.host("serve_node", model__path=tiny_pair[1], serve__port=port, decode__max_tokens=24)
    rig.until_active("verifier_node")
    rig.until_active("serve_node")
    url = f"http://127.0.0.1:{port}/v1"
    with urlopen(f"{url}/models", timeout=60) as answer:
        (model,) = json.load(answer)["data"]
    content = [picture_part(PICTURES[0]), {"type": "text", "text": "and\n"}, picture_part(PICTURES[1])]
    messages = [{"role": "system", "content": "Be  brief."}, {"role": "user", "content": content}]
    body = json.dumps({"model": model["id"], "messages": messages}).encode()
    target = load_model(ModelSettings(str(tiny_pair[0])))
    chat = Chat.of([("system", ["Be  brief."]), ("user", [None, "and\n", None])])
    sequence = target.prefill(PICTURES[1], chat, [(PICTURES[0], "")])
    while len(sequence.tokens) < 24 and not set(sequence.tokens) & target.eos_token_ids:
        sequence.append([int(sequence.next_logits().argmax())])
    ask = Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    for _ in range(2):  # the second time the verifier has the first picture
        with urlopen(ask, timeout=60) as answer:
            reply = json.load(answer)
        assert reply["choices"][0]["message"]["content"] == target.decode_text(sequence.tokens)
        assert reply["usage"]["prompt_tokens"] == sequence.prompt_length
    assert rig.change("serve_node", Transition.TRANSITION_DEACTIVATE)
    with pytest.raises(URLError):
        urlopen(f"{url}/models", timeout=5)
