# SPDX-License-Identifier: Apache-2.0
"""Two vocabularies: drafts in the target's tokens, of a model that has others."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings as profile, strategies as st
from reciting_model import ENGLISH, GERMAN, RecitingModel, byte_level, metaspace

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.drafters import LEAD, TextDrafter
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.translation import Translation
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.vlm.errors import ModelError
from dsd_ros.wire.client import Limits

SENTENCE = "The red chair is ahead on the left, it's 15 cm away: Größe 漢字 🪑🚪!  Action: forward 25 cm"
KINDS = {
    "english": byte_level(),
    "german": byte_level(GERMAN, 330, end="</s>"),
    "bytes": byte_level("", 258),
    "composed": byte_level(GERMAN, 350, nfc=True),
    "metaspace": metaspace(),
}
VOCABULARIES = {name: Vocabulary(tokenizer.to_str()) for name, tokenizer in KINDS.items()}
ENDS = {"german": "</s>", "metaspace": "</s>"}
PAIRS = [(draft, target) for draft in KINDS for target in KINDS if draft != target]


def end_of(kind: str) -> int:
    return KINDS[kind].token_to_id(ENDS.get(kind, "<|im_end|>"))


def drafter_of(draft: str, target: str, text: str, **values) -> tuple[RecitingModel, TextDrafter]:
    model = RecitingModel(KINDS[draft], text, ENDS.get(draft, "<|im_end|>"), **values)
    drafter = TextDrafter(model, DecodeSettings(max_tokens=400), Translation(VOCABULARIES[target], model))
    drafter.begin(ReplyRequest(1, None, "", None, str, Limits()), frozenset({end_of(target)}))
    return model, drafter


def draft_of(drafter: TextDrafter, verified: list[int], length: int = 32) -> list[int]:
    """After the verified tokens, in the target's."""
    drafter.follow(verified)
    while len(drafter.next()) < length and not drafter.far_enough:
        pass
    return drafter.next()[:length]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_a_draft_that_knows_the_text_is_accepted_and_computes_little_twice(draft, target):
    """Whatever the two tokenizers, the end included; verified as a target does that says the text itself."""
    wanted = [*VOCABULARIES[target].encode(SENTENCE), end_of(target)]
    model, drafter = drafter_of(draft, target, SENTENCE)
    done = drafted = accepted = 0
    while done < len(wanted):
        tokens = draft_of(drafter, wanted[:done], 4)
        right = 0
        while right < len(tokens) and tokens[right] == wanted[done + right]:
            right += 1
        done, drafted, accepted = done + right + 1, drafted + len(tokens), accepted + right
    assert accepted >= 0.55 * drafted
    assert model.passes <= 1.3 * len(VOCABULARIES[draft].encode(SENTENCE)) + drafted - accepted


def test_a_wrong_draft_goes_back_to_what_the_target_said():
    german, english = VOCABULARIES["german"], VOCABULARIES["english"]
    _, drafter = drafter_of("english", "german", "The red chair is behind the table.")
    said = german.encode("The red chair")
    assert draft_of(drafter, [])[: len(said)] == said
    said = german.encode("The red box")
    drafter.follow(said)
    # All the words in the model's own tokens, the first of them still in its cache.
    assert drafter._begun.tokens == english.encode("The red box")
    assert german.decode(draft_of(drafter, said))[0].startswith("ir is behind the table.")
    drafter.follow([*said, *german.encode(" is")])
    assert drafter._begun.tokens[:3] == english.encode("The red box")[:3]


def test_half_a_character_is_completed_or_left_to_the_target():
    target = VOCABULARIES["english"]
    chair, before = target.encode("🪑"), target.encode("a ")
    assert len(chair) == 4
    _, drafter = drafter_of("german", "english", "a 🪑b")
    assert draft_of(drafter, before + chair[:2], 2) == chair[2:]
    assert draft_of(drafter, before + chair) == [*target.encode("b"), end_of("english")]
    _, drafter = drafter_of("german", "english", "a door")
    assert draft_of(drafter, before + chair[:2]) == []
    assert target.decode(draft_of(drafter, before + chair)[:-1])[0] == "oor"


def test_the_end_is_the_targets_end():
    _, drafter = drafter_of("metaspace", "english", "Done")
    assert draft_of(drafter, []) == [*VOCABULARIES["english"].encode("Done"), end_of("english")]
    _, drafter = drafter_of("english", "german", "")
    assert draft_of(drafter, []) == [end_of("german")]
    # The one of the same name where there is one, the turn's rather than the text's where not.
    translation = Translation(VOCABULARIES["composed"], RecitingModel(KINDS["english"], ""))
    assert translation.end_token(end_of("english"), frozenset({0, 7, 9})) == 0
    assert translation.end_token(end_of("english"), frozenset({7, 9})) == 9
    assert translation.end_token(end_of("english"), frozenset()) is None


def test_a_full_context_ends_the_drafts():
    _, drafter = drafter_of("english", "german", ENGLISH, max_length=6)
    tokens = draft_of(drafter, [])
    assert drafter.far_enough and 0 < len(tokens) < 32
    assert VOCABULARIES["german"].encode(ENGLISH)[: len(tokens) - 1] == tokens[:-1]


def test_files_that_are_no_tokenizers_are_refused(tmp_path):
    with pytest.raises(ModelError, match="give the target's model directory"):
        Vocabulary.load(tmp_path / "none.json")
    with pytest.raises(ModelError, match="give the target's model directory"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        Vocabulary.load(tmp_path)
    KINDS["german"].save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert Vocabulary.load(path).tokenizer_fingerprint == VOCABULARIES["german"].tokenizer_fingerprint


def test_the_noise_of_a_token_is_that_of_the_targets_token_of_the_same_text():
    model = RecitingModel(KINDS["english"], SENTENCE)
    size = VOCABULARIES["english"].vocab_size
    ids = Translation(VOCABULARIES["german"], model).noise_of(size, lambda n: np.arange(n, dtype=float))
    ours, theirs = VOCABULARIES["english"].texts(), VOCABULARIES["german"].texts()
    shared = [token for token, text in ours.items() if text in theirs.values()]
    assert len(shared) > 60 and any(len(ours[token]) > 1 for token in shared)
    for token in shared:
        assert theirs[int(ids[token])] == ours[token]
    assert ids[min(model.eos_token_ids)] == np.euler_gamma


@given(pair=st.sampled_from(PAIRS), seed=st.integers(0, 1 << 30))
@profile(max_examples=60)
def test_whatever_is_verified_it_drafts_far_enough_in_bounded_time(pair, seed):
    """Halves of characters, special tokens, ids beyond, and tokens that contradict a character that was begun, too."""
    chance = random.Random(seed)
    _, drafter = drafter_of(*pair, SENTENCE)
    verified: list[int] = []
    for _ in range(6):
        passes = 0
        while not drafter.far_enough:
            drafter.next()
            passes += 1
        assert passes <= 8 * (LEAD + 1)
        draft = drafter.next()
        assert len(draft) <= LEAD + 8 and all(token in VOCABULARIES[pair[1]] for token in draft)
        verified += draft[: chance.randrange(len(draft) + 1)]
        verified += [chance.randrange(700) for _ in range(chance.randrange(1, 4))]
        drafter.follow(verified)
