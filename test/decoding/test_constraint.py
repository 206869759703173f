# SPDX-License-Identifier: Apache-2.0
"""Constrained replies: the rules follow from the text, and whoever keeps to them ends in an action."""

from __future__ import annotations

import json
import random
import re
import time

import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from reciting_model import ENGLISH, byte_level, metaspace
from tokenizers import Tokenizer, models
from worded_table import FORM, WORDS, worded_tokenizer

from dsd_ros.decoding.constraint import BARRED, Automaton, Constrainer, ReplyForm, Rule, State, apply_rule, token_bytes
from dsd_ros.navigation.run.actions import Grammar, parse_reply, read_grammar
from dsd_ros.paths import models_directory

GRAMMARS = {
    "dsd": read_grammar("dsd"),
    "navila": read_grammar("navila"),
    "words": Grammar.of(
        {
            "marks": ["Jetzt:", "Now"],
            "forward": {"phrases": ["go {} m", "größer {}"], "amounts": {"0.25": 25, "0.5": 50}},
            "stop": {"phrases": ["stop", "stop it", "Stop it at once"]},
            "end": "!E",
        },
        "words",
    ),
    "arrows": read_grammar("internvla-n1"),
    "numbers": Grammar.of(
        {
            "marks": ["Action:"],
            "forward": {"phrases": ["forward {} cm"], "amounts": "20..300"},
            "turn_left": {"phrases": ["left {}"], "amounts": "5..90"},
            "go_to": {"phrases": ["go to ({x}, {y})"], "picture": [640, 480]},
            "stop": {"phrases": ["stop"]},
            "most": 3,
            "between": ", ",
        },
        "numbers",
    ),
}
TOKENIZERS = {
    "shipped": Tokenizer.from_file(str(models_directory() / "draft" / "tokenizer.json")),
    "bytes": byte_level("", 258),
    "merges": byte_level(ENGLISH, 400),
    "metaspace": metaspace(
        ENGLISH + " größer Jetzt: The next action is I think I should move forward 0123456789 cm !.E ↑←→↓STOP (),"
    ),
}
CONSTRAINERS = {name: Constrainer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
LIMIT = 96


def end_of(tokenizer: Tokenizer) -> int:
    ends = ("<|im_end|>", "</s>")
    return next(id_ for id_ in map(tokenizer.token_to_id, ends) if id_ is not None)


def constraint_of(kind: str, grammar: str, limit: int = LIMIT):
    form = ReplyForm(**GRAMMARS[grammar].written, limit=limit)
    return CONSTRAINERS[kind].of(form, frozenset([end_of(TOKENIZERS[kind])]))


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text, flags=re.ASCII)


def test_a_form_travels_as_text():
    for grammar in GRAMMARS.values():
        form = ReplyForm(**grammar.written, limit=96)
        assert ReplyForm.parse(form.text) == form
        plain = form.most == 1 and not any("{" in text for text in form.actions)
        assert len(json.loads(form.text)) == (3 if plain else 5)  # what says more is not taken for words
    assert " turn left 15 degree" in ReplyForm(**GRAMMARS["navila"].written, limit=96).actions
    assert all(parse_reply(f"{mark}{text}", grammar) for grammar in GRAMMARS.values()
               for mark in grammar.marks or [""] for text in grammar.written["actions"] if "{" not in text)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "form that replies are to have"),
        ('{"marks": ["a:"], "actions": [" go"], "limit": 0}', "must hold marks, actions and limit"),
        ('{"marks": ["a:"], "actions": [" go"], "limit": 9, "more": 1}', "must hold marks"),
        ('{"marks": "a:", "actions": [" go"], "limit": 9}', "must be texts"),
        ('{"marks": [], "actions": [" go"], "limit": 9}', "printable words"),
        ('{"marks": ["a:"], "actions": ["go"], "limit": 9}', "a space between"),
        ('{"marks": [], "actions": ["go"], "limit": 9, "before": ["go"], "most": 5}', "1 to 4 actions"),
        ('{"marks": [], "actions": ["go"], "limit": 9, "most": 2}', "1 to 4 actions"),
        ('{"marks": [], "actions": ["go"], "limit": 9, "before": "go", "most": 2}', "must be texts"),
        ("[1]", "cannot be used"),
        ('{"marks": ["A:"], "actions": [" ga:"], "limit": 9}', "'A:' is part of another"),
        ('{"marks": ["a:"], "actions": [" go  on"], "limit": 9}', "printable words"),
        ('{"marks": ["a:", "ba:"], "actions": [" go"], "limit": 9}', "'a:' is part of another"),
        ('{"marks": ["\\ud800"], "actions": [" go"], "limit": 9}', "cannot be used"),
        (
            f'{{"marks": ["a:"], "actions": {json.dumps([f" {n:04}" for n in range(3000)])}, "limit": 9}}',
            "at most 16384",
        ),
        (f'{{"marks": {json.dumps([f"a{n}:" for n in range(9)])}, "actions": [" go"], "limit": 9}}', "at most 8 marks"),
        (f'{{"marks": ["a:"], "actions": [" {"go" * 65}"], "limit": 9}}', "128 characters in each"),
        ("[" * 100_000, "cannot be used"),
    ],
)
def test_forms_that_are_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        ReplyForm.parse(text)
    assert "\n" not in str(error.value)


@profile(max_examples=200, deadline=None)
@given(st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 99999))
def test_a_range_holds_its_numbers_and_no_others(one, other, number):
    low, high = min(one, other), max(one, other)
    automaton = Automaton(ReplyForm((), (f"go {{{low}..{high}}} cm",), 9))
    for text in (f"go {number} cm", f"go {low} cm", f"go {high} cm", f"go 0{low} cm", f"go {number}"):
        node = automaton.walk(text.encode())
        said = re.fullmatch(r"go (0|[1-9][0-9]*) cm", text)
        assert (node in automaton.ends) == bool(said and low <= int(said[1]) <= high), text
    assert len(automaton.next) < 40  # whatever the range


def test_what_the_automaton_writes_is_what_the_grammar_reads():
    """Every text of up to two actions of a small grammar, and none besides."""
    grammar = Grammar.of(
        {
            "forward": {"phrases": ["f{}"], "amounts": "9..11"},
            "turn_left": {"phrases": ["l{}"], "amounts": {"": 15}},
            "go_to": {"phrases": ["{y}x{x}"], "picture": [2, 3]},
            "stop": {"phrases": ["s"]},
            "most": 2,
            "between": "+",
            "end": "!",
        },
        "small",
    )
    automaton, written, waiting = Automaton(ReplyForm(**grammar.written, limit=9)), set(), [(0, b"")]
    while waiting:
        node, text = waiting.pop()
        if node in automaton.ends:
            written.add(text.decode())
        waiting += [(longer, text + bytes([byte])) for byte, longer in automaton.next[node].items()]
    moves, points = ["f9", "f10", "f11", "l"], [f"{y}x{x}" for x in range(2) for y in range(3)]
    lasts = [*moves, *points, "s"]
    assert written == {f"{first}{last}{end}" for first in ("", *(f"{m}+" for m in moves)) for last in lasts
                       for end in ("", "!")}  # fmt: skip
    assert all(parse_reply(text, grammar) for text in written)


def test_ways_to_write_actions_are_bounded():
    actions = tuple("a" * length for length in range(1, 60))
    with pytest.raises(ValueError, match="can be combined in too many ways; at most 65536 are possible"):
        Automaton(ReplyForm((), actions, 9, tuple(f"{text}{end}" for text in actions for end in "ab"), 4))
    with pytest.raises(ValueError, match=r"\{9\.\.8\} holds no numbers"):
        Automaton(ReplyForm((), ("go {9..8}",), 9))


def test_tokens_have_the_bytes_that_they_decode_to():
    for name, tokenizer in TOKENIZERS.items():
        text = f"{'größer' if name == 'metaspace' else 'Größe 漢字 🪑'}: turn left\n  15 degrees."
        pieces, ids = token_bytes(tokenizer), tokenizer.encode(text, add_special_tokens=False).ids
        said = b"".join(pieces[id_] for id_ in ids).decode().strip()
        assert said == tokenizer.decode(ids).strip(), name
        assert pieces[end_of(tokenizer)] == b"" and (pieces.count(BARRED) == 128) == (name == "metaspace")
    with pytest.raises(ValueError, match="decodes by nothing; use a model"):
        token_bytes(Tokenizer(models.WordLevel({"a": 0}, "a")))


def test_a_vocabulary_that_cannot_write_an_action_is_refused():
    without = worded_tokenizer(tuple(word for word in WORDS if word not in (" no", "n")))
    with pytest.raises(ValueError, match="tokens cannot write '! no'; do not constrain"):
        Constrainer(without).of(FORM, frozenset([9]))
    with pytest.raises(
        ValueError, match="a reply of 3 tokens is too short for '! go on', which takes 4; raise max_tokens"
    ):
        Constrainer(worded_tokenizer()).of(ReplyForm(FORM.marks, FORM.actions, 3), frozenset([11]))
    with pytest.raises(ValueError, match="without a tokenizer"):
        Constrainer(None).of(FORM, frozenset())


def test_the_rules_of_a_small_vocabulary():
    """Each rule written down by hand."""
    constraint = Constrainer(worded_tokenizer()).of(ReplyForm(FORM.marks, FORM.actions, 20), frozenset([11]))
    x, space, mark, spaced, go, no, on, crossing, end = (WORDS.index(w) for w in
        ("x", " ", "!", " !", " go", " no", " on", "x!", "<end>"))  # fmt: skip

    def after(*tokens: int) -> Rule | None:
        return constraint.rule(constraint.state(tokens), len(tokens))

    assert after() == Rule(False, (crossing, end))  # "x!" is no mark on its own, and there is no action yet
    assert after(x) == Rule(False, (mark, crossing, end))
    assert after(x, space) == after()
    assert after(mark) == after(x, spaced) == after(x, space, mark) == Rule(True, (space, go, no))
    assert after(mark, space) == Rule(True, tuple(sorted((WORDS.index("g"), WORDS.index("n")))))
    assert after(mark, go) == Rule(True, tuple(sorted((space, on, end))))
    assert after(mark, no) == after(mark, go, on) == Rule(True, (end,))
    assert after(mark, no, end) is after(mark, x) is after(x, end) is None
    last = constraint.rule(constraint.state([x] * 16), 16)  # an action takes up to three tokens, and the end one
    assert last == Rule(True, (space, spaced))
    assert constraint.rule(constraint.state([x] * 15), 15) == Rule(False, (mark, crossing, end))


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_whoever_keeps_to_the_rules_ends_in_an_action(kind, grammar):
    tokenizer, constraint = TOKENIZERS[kind], constraint_of(kind, grammar)
    end, size = end_of(tokenizer), tokenizer.get_vocab_size()
    chance = random.Random(f"{kind}{grammar}")
    likely = [id_ for mark in GRAMMARS[grammar].marks for id_ in tokenizer.encode(f" {mark}").ids]
    actions, early = set(), 0
    for number in range(30):
        tokens: list[int] = []
        while len(tokens) < LIMIT and end not in tokens:
            rule = constraint.rule(constraint.state(tokens), len(tokens))
            if rule.only:
                tokens.append(chance.choice(rule.ids))
            elif (likely_now := likely[len(tokens) % len(likely)]) not in rule.ids and number % 2:
                tokens.append(likely_now)
            else:
                tokens.append(chance.choice([token for token in range(size) if token not in rule.ids]))
        action = parse_reply(tokenizer.decode(tokens), GRAMMARS[grammar]).action
        actions.add((action.kind, action.amount))
        early += len(tokens) < LIMIT - 8
        assert constraint.written(tokens)
    assert len(actions) >= 3 and (early or grammar != "dsd")


@profile(max_examples=40, deadline=None)
@given(st.sampled_from(list(TOKENIZERS)), st.sampled_from(["dsd", "navila"]), st.integers(0, 1 << 30))
def test_no_other_token_could_have_come(kind, grammar, seed):
    """What the rules forbid in free text would end the reply, or write a mark that no action follows."""
    tokenizer, constraint = TOKENIZERS[kind], constraint_of(kind, grammar, 2 * LIMIT)
    chance, end = random.Random(seed), end_of(tokenizer)
    marks, texts = [mark.lower() for mark in GRAMMARS[grammar].marks], GRAMMARS[grammar].written["actions"]
    said = "".join(
        chance.choice(["", " ", "an", "The next", "Act", "The next act", "I think I ", "\n"]) for _ in range(3)
    )
    tokens = tokenizer.encode(said, add_special_tokens=False).ids
    state = constraint.state(tokens)
    if state is None or state.writing:
        return
    rule = constraint.rule(state, len(tokens))
    before = " " + tokenizer.decode(tokens)
    pieces = token_bytes(tokenizer)
    for token in range(tokenizer.get_vocab_size()):
        text = squeezed(before.lower() + pieces[token].decode(errors="replace").lower())
        place = min((text.find(mark) + len(mark), mark) for mark in marks if mark in text) if any(
            mark in text for mark in marks) else None  # fmt: skip
        if token == end or pieces[token] == BARRED:
            assert token in rule.ids
        elif place is None:
            assert token not in rule.ids, (before, token)
        else:
            own = text[place[0] - len(place[1]) - 1] == " "
            rest = pieces[token].decode(errors="replace")
            rest = rest[len(rest) - (len(text) - place[0]) :]
            follows = any(action.startswith(rest) for action in texts)
            assert (token in rule.ids) != (own and follows), (before, token)


def test_the_largest_forms_take_no_more_than_their_length():
    """Not its square nor its cube: any robot may ask for one."""
    seconds = []
    for count in (4, 30):
        actions = tuple(f" {number:02} {'stop now ' * 13}"[:124].rstrip() for number in range(count))
        form = ReplyForm(tuple(f"Z{n}:" for n in range(8)), actions, 512)
        began = time.process_time()
        made = CONSTRAINERS["shipped"].of(form, frozenset([end_of(TOKENIZERS["shipped"])]))
        seconds.append(time.process_time() - began)
        assert made.rule(made.state([]), 0) is not None
    assert seconds[1] < 12 * seconds[0] + 0.5


def test_masks_of_trees_are_those_of_their_paths():
    constraint = Constrainer(worded_tokenizer()).of(FORM, frozenset([11]))
    tokens, parents = (0, 3, 6, 7, 2, 11), (-1, -1, 1, 1, 0, 3)
    logits = torch.randn(7, 14)
    masked = constraint.mask(logits, [0], tokens, parents)
    paths = [[0]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent + 1], token])
    for row, wanted, path in zip(masked, logits, paths, strict=True):
        apply_rule(wanted := wanted.clone(), constraint.rule(constraint.state(path), len(path)))
        assert torch.equal(row, wanted)
    assert torch.equal(constraint.mask(logits[-2:], [0], tokens, parents), masked[-2:])
    assert not torch.isinf(logits).any()
    assert constraint.state([2, 0]) is None and constraint.state([]) == State(False, b" ")
