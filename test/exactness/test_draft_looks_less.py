# SPDX-License-Identifier: Apache-2.0
"""A draft that reads less of a picture (`draft_image_tokens`): the reply is the target's, whatever the draft misses."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import IMAGE_CUTS, DecodeSettings, SettingsError
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

INSTRUCTION = "find the silver bottle"
MODES = [
    {"mode": "dsd"},
    {"mode": "dsd", "shape": "budget", "tree_budget": 6},
    {"mode": "fsd", "predraft_workers": 2},
    {"mode": "fsd", "predraft_workers": 4, "predraft_batch": 4, "pipeline_depth": 2},
    {"mode": "mc-dsd"},
    {"mode": "auto"},
]
COUPLED = {"proof": "coupled", "temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request, tmp_path_factory):
    """(target with exits, draft) of one family."""
    folder = tmp_path_factory.mktemp("less")
    target = load_model(ModelSettings(str(make_tiny_model(folder / "target", 5, layers=4, family=request.param))))
    target.exits = ExitAdapters.untrained(target)
    draft = make_tiny_model(folder / "draft", 5, noise=0.08, vocab_rows=320, family=request.param)
    return target, load_model(ModelSettings(str(draft)))


@pytest.mark.parametrize("cut", IMAGE_CUTS)
@pytest.mark.parametrize("sampling", [{}, COUPLED], ids=["greedy", "coupled"])
def test_every_mode_gives_the_targets_own_replies(pair, picture, cut, sampling):
    target, draft = pair
    walk = [(picture(1, 140, 112), []), (picture(2, 150, 70), [(picture(1, 140, 112), "stop")])]
    replies, lengths = [], []
    begin = draft.open

    def opened(*given):
        lengths.append(len(given))
        return begin(*given)

    with pytest.MonkeyPatch.context() as patch, VerifierEngine(target) as engine:
        patch.setattr(draft, "open", opened)
        for values in ({"mode": "ar"}, *MODES):
            settings = DecodeSettings(**values | sampling, max_tokens=12, draft_image_tokens=3, draft_image_cut=cut)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings) as session:
                replies.append([session.decode(image, INSTRUCTION, history=past).tokens for image, past in walk])
    assert all(reply == replies[0] for reply in replies)
    assert len(replies[0][0]) > 3 and replies[0][0] != replies[0][1]
    assert lengths and set(lengths) == {5}  # it did read less


def test_a_shrunk_picture_is_what_a_smaller_one_would_be(pair, picture):
    _, draft = pair
    image = picture(1, 168, 140)
    whole, less = draft.prefill(image, "go"), draft.prefill(image, "go", (), 6)
    height, width = draft.images.resized(168, 140, 6)
    tokens = height * width // draft.images.side_factor**2
    assert 1 <= tokens <= 6 < draft.images.image_tokens(168, 140)
    assert whole.prompt_length - less.prompt_length == draft.images.image_tokens(168, 140) - tokens
    assert draft.images.resized(168, 140, 10_000) == draft.images.resized(168, 140)


@torch.inference_mode()
def test_dropped_tokens_leave_the_others_at_their_places(pair, picture):
    """As transformers' layers read the tokens that are kept, at the positions that all of them have together."""
    _, draft = pair
    past = [(picture(2, 84, 140), "stop")]
    whole, less = (draft.open(picture(1, 168, 140), "go", past, most, "drop") for most in (0, 4))
    before, after = whole._prompt, less._prompt
    ids = torch.tensor(draft.prompt_tokens("go", draft.images.image_tokens(168, 140), [
        (draft.images.image_tokens(84, 140), "stop")
    ]))  # fmt: skip
    text = ids != draft.hf.config.image_token_id
    assert after.length == int(text.sum()) + 2 * 4
    kept = [row for row in range(before.length) if any(torch.equal(before.hidden[0, row], h) for h in after.hidden[0])]
    assert set(text.nonzero()[:, 0].tolist()) <= set(kept) and len(kept) == after.length
    for one, other in zip((*after.rotations, after.hidden), (*before.rotations, before.hidden), strict=True):
        assert torch.equal(one, other[:, kept])
    if before.deep is not None:
        assert torch.equal(after.deep, before.deep[:, kept])
    # What follows stands where it would have stood behind the whole prompt.
    assert less._rope_delta + after.length == whole._rope_delta + before.length
    first = less.next_logits()
    less.append([7, 8])
    together = less.next_logits()
    again = draft.open(picture(1, 168, 140), "go", past, 4, "drop")
    assert torch.allclose(again.verify([7, 8])[[0, 2]], torch.stack([first, together]), atol=1e-4)
    assert torch.equal(draft.open(picture(1, 168, 140), "go", past, 99, "drop")._prompt.hidden, before.hidden)


def test_a_draft_without_pictures_is_left_alone(pair):
    _, draft = pair
    assert torch.equal(draft.prefill(None, "go", (), 3, "drop").next_logits(), draft.prefill(None, "go").next_logits())


def test_wrong_settings_are_named():
    with pytest.raises(SettingsError, match="draft_image_tokens"):
        DecodeSettings(draft_image_tokens=-1)
    with pytest.raises(SettingsError, match="draft_image_cut"):
        DecodeSettings(draft_image_cut="guess")
