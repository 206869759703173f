# SPDX-License-Identifier: Apache-2.0
"""Two vocabularies: incremental detokenizing, and drafts in the target's tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reciting_model import ENGLISH, GERMAN, RecitingModel, byte_level, metaspace

from dsd_ros.edge.translation import Translation
from dsd_ros.edge.vocabulary import Transcript, Vocabulary
from dsd_ros.vlm.errors import ContextError, ModelError

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
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40)


def end_of(kind: str) -> int:
    return KINDS[kind].token_to_id(ENDS.get(kind, "<|im_end|>"))


def reply_of(draft: str, target: str, text: str, **values):
    model = RecitingModel(KINDS[draft], text, ENDS.get(draft, "<|im_end|>"), **values)
    translation = Translation(VOCABULARIES[target], model)
    return model, translation.begin(model.prefill(None, ""), frozenset({end_of(target)}))


def draft_of(reply, length: int) -> tuple[list[int], bool]:
    """A draft in the target's tokens, and whether the draft model can continue after it."""
    while (drafted := reply.draft()) is not None and len(drafted) < length and not reply.ended:
        try:
            reply.take(int(reply.sequence.next_logits().argmax()))
        except ContextError:
            return drafted, False
    return (drafted or [])[:length], True


@pytest.mark.parametrize("kind", KINDS)
def test_a_transcript_says_what_the_whole_says(kind):
    vocabulary = VOCABULARIES[kind]
    for text in (SENTENCE, "", " ", "🪑", "a\n\n b ", ENGLISH):
        tokens = vocabulary.encode(text)
        text = vocabulary.decode(tokens)  # some lose a space in front
        transcript = Transcript(vocabulary)
        for count, token in enumerate(tokens):
            assert transcript.end(count) == len(transcript.text)
            transcript.append([token])
            assert text.startswith(transcript.text)
        assert transcript.text == text and not (text and transcript.pending)
        assert transcript.tokens == tokens
        for count in range(len(tokens), -1, -1):
            transcript.truncate(count)
            fresh = Transcript(vocabulary)
            fresh.append(tokens[:count])
            assert (transcript.text, transcript.pending) == (fresh.text, fresh.pending)
            assert text.startswith(transcript.text)


@settings(max_examples=100)
@given(st.sampled_from(["english", "bytes", "metaspace"]), TEXTS)
def test_any_text_survives_token_by_token(kind, text):
    vocabulary = VOCABULARIES[kind]
    tokens = vocabulary.encode(text)
    transcript = Transcript(vocabulary)
    transcript.append(tokens)
    assert transcript.text == vocabulary.decode(tokens)
    assert transcript.text == text or kind == "metaspace"  # which loses a space in front


def recite(model, translation, target: str, text: str, length: int) -> tuple[int, int]:
    """Verify round by round as a target does that says ``text``; drafted and accepted tokens."""
    wanted = [*VOCABULARIES[target].encode(text), end_of(target)]
    reply = translation.begin(model.prefill(None, ""), frozenset({end_of(target)}))
    done = drafted = accepted = 0
    while done < len(wanted):
        tokens, able = draft_of(reply, length)
        assert able and len(tokens) <= length
        right = 0
        while right < len(tokens) and tokens[right] == wanted[done + right]:
            right += 1
        reply.verified(wanted[done : done + right + 1])
        done, drafted, accepted = done + right + 1, drafted + len(tokens), accepted + right
    return drafted, accepted


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_draft_that_knows_the_text_is_accepted(draft, target, length):
    """Whatever the two tokenizers: the target's own tokens, its end included."""
    model = RecitingModel(KINDS[draft], SENTENCE, ENDS.get(draft, "<|im_end|>"))
    translation = Translation(VOCABULARIES[target], model)
    drafted, accepted = recite(model, translation, target, SENTENCE, length)
    assert accepted >= 0.55 * drafted


def test_nothing_is_computed_twice_while_it_is_right():
    for draft, target in (("bytes", "english"), ("english", "bytes")):
        model = RecitingModel(KINDS[draft], ENGLISH)
        recite(model, Translation(VOCABULARIES[target], model), target, ENGLISH, 4)
        assert model.passes <= 1.1 * len(VOCABULARIES[draft].encode(ENGLISH))


def test_a_wrong_draft_goes_back_to_what_the_target_said():
    _model, reply = reply_of("english", "german", "The red chair is behind the table.")
    said = VOCABULARIES["german"].encode("The red chair")
    assert draft_of(reply, 12)[0][: len(said)] == said
    reply.verified(VOCABULARIES["german"].encode("The red box"))
    # All the words in the model's own tokens, the first of them still in its cache.
    assert reply.sequence.tokens == VOCABULARIES["english"].encode("The red box")
    assert VOCABULARIES["german"].decode(draft_of(reply, 30)[0]).startswith("ir is behind the table.")
    reply.verified(VOCABULARIES["german"].encode(" is"))
    assert reply.sequence.tokens[:3] == VOCABULARIES["english"].encode("The red box")[:3]


def test_half_a_character_is_completed_or_left_to_the_target():
    target = VOCABULARIES["english"]
    chair = target.encode("🪑")
    assert len(chair) == 4
    _, reply = reply_of("german", "english", "a 🪑b")
    reply.verified(target.encode("a ") + chair[:2])
    assert draft_of(reply, 2)[0] == chair[2:]
    reply.verified(chair[2:])
    assert draft_of(reply, 3)[0] == [*target.encode("b"), end_of("english")]
    _, reply = reply_of("german", "english", "a door")
    reply.verified(target.encode("a ") + chair[:2])
    assert draft_of(reply, 4)[0] == []
    reply.verified(chair[2:])
    assert target.decode(draft_of(reply, 9)[0][:-1]) == "oor"


def test_the_end_is_the_targets_end():
    _, reply = reply_of("metaspace", "english", "Done")
    tokens, _ = draft_of(reply, 9)
    assert tokens == [*VOCABULARIES["english"].encode("Done"), end_of("english")]
    # The one of the same name where there is one, the turn's rather than the text's where not.
    model = RecitingModel(KINDS["english"], "")
    translation = Translation(VOCABULARIES["composed"], model)
    assert translation.end_token(end_of("english"), frozenset({0, 7, 9})) == 0
    assert translation.end_token(end_of("english"), frozenset({7, 9})) == 9
    assert translation.end_token(end_of("english"), frozenset()) is None


def test_nothing_to_say_and_a_full_context():
    _, reply = reply_of("english", "german", "")
    assert draft_of(reply, 4) == ([end_of("german")], True)
    _, reply = reply_of("english", "german", ENGLISH, max_length=6)
    tokens, able = draft_of(reply, 30)
    assert not able and VOCABULARIES["german"].encode(ENGLISH)[: len(tokens) - 1] == tokens[:-1]


@settings(max_examples=150)
@given(
    st.sampled_from(PAIRS),
    TEXTS,
    st.lists(st.tuples(st.lists(st.integers(0, 700), max_size=6), st.integers(0, 7)), max_size=5),
)
def test_nothing_that_a_target_says_upsets_it(pair, text, rounds):
    """Tokens of any kind, half characters, special ones and ids beyond: a draft may miss, and no more."""
    _, reply = reply_of(*pair, text)
    said = []
    for news, length in rounds:
        tokens, _ = draft_of(reply, length)
        assert len(tokens) <= length
        assert all(token in VOCABULARIES[pair[1]] for token in tokens)
        reply.verified(news)
        said += news
    transcript = Transcript(VOCABULARIES[pair[1]])
    transcript.append(said)
    assert reply.sequence.tokens == reply._own.tokens


@settings(max_examples=150)
@given(
    st.sampled_from([("english", "german"), ("bytes", "english"), ("english", "metaspace")]),
    TEXTS,
    st.integers(0, 40),
    st.integers(1, 8),
)
def test_verified_and_drafted_tokens_say_the_text(pair, text, count, length):
    """Of any text, cut anywhere between the target's tokens, whole characters or not."""
    target = VOCABULARIES[pair[1]]
    text = text.lstrip() if "metaspace" in pair else text  # which a first space is nothing to
    tokens = target.encode(text)[:count]
    _, reply = reply_of(*pair, text)
    reply.verified(tokens)
    said, _ = draft_of(reply, length)
    assert said
    behind = [token for token in said if token != end_of(pair[1])]
    transcript = Transcript(target)
    transcript.append(tokens + behind)
    whole = target.decode(target.encode(text))
    assert whole.startswith(transcript.text)
    if len(behind) < len(said):
        assert transcript.text == whole


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
    model, reply = reply_of("english", "german", SENTENCE)
    size = VOCABULARIES["english"].vocab_size
    ids = reply.translation.noise_of(size, lambda n: np.arange(n, dtype=float))
    ours, theirs = VOCABULARIES["english"].texts(), VOCABULARIES["german"].texts()
    shared = [token for token, text in ours.items() if text in theirs.values()]
    assert len(shared) > 60 and any(len(ours[token]) > 1 for token in shared)
    for token in shared:
        assert theirs[int(ids[token])] == ours[token]
    assert ids[model.eos_token_ids and min(model.eos_token_ids)] == np.euler_gamma
