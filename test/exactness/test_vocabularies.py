# SPDX-License-Identifier: Apache-2.0
"""Draft and target with different tokenizers: the tokens are the target's, and good drafts are accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from reciting_model import ENGLISH, GERMAN, RecitingModel, byte_level, metaspace
from safetensors.torch import load_file, save_file
from tiny_models import SPECIAL_TOKENS, make_tiny_model, make_tokenizer

from dsd_lab.pair.scenes import held_out_scenes
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierRefused
from dsd_ros.edge.drafters import ModelDrafter, TextDrafter
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.session import EdgeSession, check_settings
from dsd_ros.edge.translation import Translation
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.client import Limits

MODELS = Path(__file__).parents[2] / "models"
TEXT = f"Ahead, it's 15 cm away: Größe 漢字 🪑🚪! {ENGLISH}"
# What a draft gets wrong now and then.
HEARD = TEXT.replace("left", "lift").replace("sight", "slght").replace("Action: tu", "Aktion: to")
TOKENIZERS = {
    "english": byte_level(),
    "german": byte_level(GERMAN, 330, end="</s>"),
    "bytes": byte_level("", 258),
    "composed": byte_level(GERMAN, 350, nfc=True),
    "metaspace": metaspace(),
}
BLACK = np.zeros((28, 28, 3), np.uint8)


def reciting(kind: str, text: str) -> RecitingModel:
    return RecitingModel(TOKENIZERS[kind], text, "</s>" if kind in ("german", "metaspace") else "<|im_end|>")


def merged(directory: Path, size: int) -> Path:
    """Give a tiny model's directory a tokenizer with merges: the same specials, other tokens."""
    learnt = json.loads(byte_level(ENGLISH, size).to_str())["model"]["merges"]
    tokenizer = json.loads(make_tokenizer(other=True).to_str())
    vocab = tokenizer["model"]["vocab"]
    # The specials stand in the vocabulary as well, or they would be numbered after the merges.
    vocab |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    for pair in learnt:
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer["model"]["merges"] = learnt
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Two tiny drafts: bytes in another order, and with merges."""
    other = make_tiny_model(tmp_path_factory.mktemp("other"), 5, other_tokenizer=True)
    words = make_tiny_model(tmp_path_factory.mktemp("words"), 6, vocab_rows=400)
    return [load_model(ModelSettings(str(path))) for path in (other, merged(words, 360))]


def decode(channel, draft, vocabulary, scenes, **values):
    settings = DecodeSettings(**({"max_tokens": 400} | values))
    with EdgeSession(channel, draft, settings, vocabulary=vocabulary) as session:
        return [session.decode(image, text) for image, text in scenes]


@pytest.mark.parametrize("kind", ["english", "german", "metaspace"])
def test_the_reply_is_the_targets_in_whatever_tokens_the_draft_says_it(kind):
    target = reciting(kind, TEXT)
    vocabulary = Vocabulary(TOKENIZERS[kind].to_str())
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        (alone,) = decode(channel, None, vocabulary, [(BLACK, "go")], mode="ar")
        assert alone.text == TEXT and alone.finished
        for other in TOKENIZERS:
            (reply,) = decode(channel, reciting(other, HEARD), vocabulary, [(BLACK, "go")])
            assert reply.tokens == alone.tokens and reply.text == TEXT, other


def test_tiny_models(target, target_directory, foreign, picture):
    vocabulary = Vocabulary.load(target_directory)
    scenes = [(picture(seed), "find the can") for seed in range(4)]
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        for sampling in ({}, {"temperature": 0.9, "seed": 3}):
            said = []
            for draft, mode in ((None, "ar"), *((draft, "stream") for draft in foreign)):
                found = decode(channel, draft, vocabulary, scenes, mode=mode, max_tokens=24, **sampling)
                said.append([(reply.tokens, reply.text, reply.finished) for reply in found])
            assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("max_tokens", [1, 2, 8])
def test_the_longest_reply_is_cut_at_the_same_token(max_tokens):
    target, draft = reciting("german", TEXT), reciting("english", TEXT)
    vocabulary = Vocabulary(TOKENIZERS["german"].to_str())
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        for longest in (max_tokens, len(vocabulary.encode(TEXT)) + 1):
            values = {"max_tokens": longest}
            (alone,) = decode(channel, None, vocabulary, [(BLACK, "go")], mode="ar", **values)
            (reply,) = decode(channel, draft, vocabulary, [(BLACK, "go")], **values)
            assert reply.tokens == alone.tokens and reply.finished == alone.finished
            assert len(reply.tokens) == longest


def test_a_draft_whose_context_is_full_leaves_the_rest_to_the_target():
    target, draft = reciting("german", TEXT), reciting("bytes", TEXT)
    draft.max_length = 40
    vocabulary = Vocabulary(TOKENIZERS["german"].to_str())
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        (reply,) = decode(channel, draft, vocabulary, [(BLACK, "go")])
    assert reply.text == TEXT


def test_rounds_need_the_targets_tokenizer(target_directory, foreign):
    with pytest.raises(ValueError, match="needs a draft model with the target's tokenizer; use mode stream"):
        check_settings(DecodeSettings(mode="dsd"), foreign[0], Vocabulary.load(target_directory))


def test_the_same_network_in_other_tokens_drafts_as_its_twin(tmp_path):
    """Its vocabulary in another order: with the target's noise it drafts what it would have in the target's tokens."""
    shutil.copytree(MODELS / "draft", tmp_path / "draft")
    renumber(tmp_path / "draft")
    same, other = (load_model(ModelSettings(str(path))) for path in (MODELS / "draft", tmp_path / "draft"))
    vocabulary, settings = Vocabulary.load(MODELS / "target"), DecodeSettings(temperature=1.0, max_tokens=60)
    images, labels = held_out_scenes(3)
    ends = same.eos_token_ids
    for number, (image, frame) in enumerate(zip(images, labels, strict=True), 1):
        instruction = f"find the {frame.replies[0][0]}"
        request = ReplyRequest(number, image, instruction, None, same.decode_text, Limits())
        one = ModelDrafter(same, settings)
        another = TextDrafter(other, settings, Translation(vocabulary, other))
        drafts = []
        for drafter in (one, another):
            drafter.begin(request, ends)
            for verified in ([], [200, 7], None):
                if verified is not None:
                    drafter.follow(verified)
                while not drafter.far_enough:
                    drafter.next()
                drafts.append(drafter.next())
        first, after, _, translated, after_translated, _ = drafts
        assert len(translated) >= len(first) - 1 > 10
        assert translated[: len(first)] == first[: len(translated)]
        assert after_translated[:4] == after[:4]


def test_refusals_name_the_remedy(target, foreign):
    """Without the target's tokenizer, and with one that is not the target's."""
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        for vocabulary in (None, Vocabulary(TOKENIZERS["german"].to_str())):
            session = EdgeSession(channel, foreign[0], DecodeSettings(), vocabulary=vocabulary)
            with pytest.raises(VerifierRefused, match="target_tokenizer"):
                session.open()


def renumber(directory: Path) -> None:
    """Reverse the ids of a model's tokens, all but the specials in front."""
    weights = load_file(directory / "model.safetensors")
    (name,) = [name for name in weights if "embed_tokens" in name]  # the head is tied to it
    first, size = len(SPECIAL_TOKENS), len(weights[name])
    order = [*range(first), *range(size - 1, first - 1, -1)]  # its own inverse
    weights[name] = weights[name][torch.tensor(order)].contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: order[token] for text, token in vocab.items()}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
