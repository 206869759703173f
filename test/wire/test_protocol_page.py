# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md against the code: every example byte for byte, every field table, every number."""

from __future__ import annotations

import hmac
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from dsd_ros.cloud.drafts import MOST_AHEAD, MOST_DRAFTED
from dsd_ros.cloud.server import MAX_UNSENT_FRAMES
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.methods.split import (
    finish_split_tree,
    remaining_nodes,
    rounded_up,
    split_residual,
    verify_split_tree,
)
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.packing import (
    pack_chances,
    pack_distribution,
    pack_head,
    pack_ids,
    pack_kept,
    pack_probabilities,
    pack_rows,
    unpack_chances,
    unpack_distribution,
    unpack_head,
    unpack_kept,
    unpack_probabilities,
    unpack_rows,
)
from dsd_ros.decoding.rejection import check_tree
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.decoding.truncation import restored, truncate
from dsd_ros.edge.drafters import LEAD
from dsd_ros.vlm.loading import tokenizer_fingerprint
from dsd_ros.wire import messages as m
from dsd_ros.wire.authentication import REMEMBERED, Token
from dsd_ros.wire.codec import FRAMES, WireError, decode, encode, pack_varints, unpack_varints
from dsd_ros.wire.pictures import decode_picture, picture_digest

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
STRUCTS = {struct.__name__: FRAMES.get(struct, struct) for struct in get_args(m.Message)}
IDS = {"tokens": m.MAX_DRAFT, "resampled": m.MAX_DRAFT, "verified": m.MAX_REPLY}
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
UINT16, UINT32 = (1 << 16) - 1, (1 << 32) - 1


def message_of(frame: msgspec.Struct) -> m.Message:
    """What a frame says; a message without a layout of its own is its own frame."""
    return decode(msgspec.msgpack.encode(frame)) if isinstance(frame, tuple(FRAMES.values())) else frame


class Example:
    """A block of the page: a name, a message's fields as JSON, and its bytes with the names of what they are."""

    def __init__(self, text: str) -> None:
        head, listing = text.split("\n\n")
        self.name, fields = head.split("\n", 1)
        self.kind, literal = fields.split(" ", 1)
        values = json.loads(literal)
        self.given = set(values)
        struct = STRUCTS[self.kind]
        for name, value in values.items():
            if name in IDS:
                values[name] = pack_varints(value)
            elif name == "history":
                values[name] = [past_of(one) for one in value]
            elif isinstance(value, str) and takes_bytes(struct, name):
                values[name] = bytes.fromhex(value)
        self.frame = struct(**values)
        self.message = message_of(self.frame)
        self.lines: list[tuple[bytes, list[str]]] = []
        for line in listing.strip().split("\n"):
            digits, _, names = line.partition("# ")
            data = bytes.fromhex(digits)
            if not names:  # what does not fit into one line goes on in the next
                before, listed = self.lines.pop()
                data, names = before + data, ", ".join(listed)
            self.lines.append((data, names.split(", ")))
        self.hex = b"".join(data for data, _ in self.lines)


def past_of(values: dict[str, Any]) -> m.Past:
    return m.Past(**values | {name: bytes.fromhex(values[name]) for name in ("image", "digest")})


def parts(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The types a field may have, nil aside."""
    found = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return [one for one in found if not isinstance(one, msgspec.inspect.NoneType)]


def takes_bytes(struct: type[msgspec.Struct], name: str) -> bool:
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    kinds = parts(msgspec.inspect.type_info(types[name]))
    return any(isinstance(kind, msgspec.inspect.BytesType) for kind in kinds)


EXAMPLES = {e.name: e for e in (Example(text) for kind, text in BLOCKS if kind == "message")}
FIGURES: dict[str, dict[str, Any]] = {
    figures.pop("example"): figures for figures in (json.loads(text) for kind, text in BLOCKS if kind == "json")
}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its two head lines."""
    _, found, rest = PAGE.partition(f"\n{heading}\n")
    assert found, heading
    rows = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE).group().strip().split("\n")
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows[2:]]


def type_text(kind: msgspec.inspect.Type) -> str:
    """How the page writes a field's type and bounds."""
    match kind:
        case msgspec.inspect.Metadata():
            return type_text(kind.type)
        case msgspec.inspect.UnionType():
            return " or ".join(map(type_text, parts(kind)))
        case msgspec.inspect.IntType():
            high = kind.le if kind.le is not None else kind.lt - 1
            names = {UINT16: "uint16", UINT32: "uint32", m.MAX_VOCABULARY - 1: "id"}
            named = names.get(high) if kind.ge == 0 else None
            return named or (f"int {kind.ge}..{'2^63-1' if high == 2**63 - 1 else high}")
        case msgspec.inspect.FloatType():
            low = f"above {kind.gt:g}" if kind.gt is not None else f"{kind.ge:g}"
            return f"float {low}..{kind.le:g}"
        case msgspec.inspect.BoolType():
            return "bool"
        case msgspec.inspect.ListType():
            if isinstance(kind.item_type, msgspec.inspect.StructType):
                return f"list({kind.max_length}) of {kind.item_type.cls.__name__}"
            return f"list({kind.max_length}) of {type_text(kind.item_type)}"
        case msgspec.inspect.BytesType() | msgspec.inspect.StrType():
            word = "bin" if isinstance(kind, msgspec.inspect.BytesType) else "str"
            low = kind.min_length or 0
            return f"{word} {low}..{kind.max_length}" if low != kind.max_length else f"{word} {low}"
    raise AssertionError(kind)


def default_text(value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return ""
    return "empty" if value in (b"", "", []) else json.dumps(value)


def default_of(field: msgspec.structs.FieldInfo, plain: m.Message) -> Any:
    """A field's default, where nil stands for it the one it has in ``plain``, a message of nothing else."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    if field.default is not None:
        return field.default
    value = getattr(plain, field.name)
    return int(value) if isinstance(value, float) else value


def test_the_page_is_of_this_version():
    assert f"PROTOCOL_VERSION {m.PROTOCOL_VERSION}." in PAGE
    rows = re.findall(r"\| `protocol_version` \| uint16 \|  \| (\d+)", PAGE)
    spoken = [one.message.protocol_version for one in EXAMPLES.values() if hasattr(one.message, "protocol_version")]
    assert {*map(int, rows), *spoken} == {m.PROTOCOL_VERSION} and len(rows) == 2 and len(spoken) == 2
    assert f"{m.MAX_FRAME_BYTES} bytes" in PAGE
    assert f"up to {MOST_AHEAD} beyond" in PAGE and f"up to {MOST_DRAFTED} of them in a step" in PAGE
    assert f"up to {LEAD} tokens ahead" in PAGE
    assert f"leaves {MAX_UNSENT_FRAMES} messages unread" in PAGE


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_is_what_the_codec_writes_and_reads(example):
    assert encode(example.message).hex(" ") == example.hex.hex(" ")
    assert decode(example.hex) == example.message


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_bytes_of_an_example_are_their_listing(example):
    values = msgspec.structs.asdict(example.frame)
    (head, [kind]), *rest = example.lines
    sent = [name for _, names in rest for name in names]
    assert kind == type(example.message).__name__
    assert sent == list(type(example.frame).__struct_fields__)[: len(sent)]
    assert example.given <= set(sent)
    for data, names in rest:
        assert data.hex() == b"".join(msgspec.msgpack.encode(values[n]) for n in names).hex()
    assert head == msgspec.msgpack.encode([0] * (1 + len(sent)))[: len(head) - 1] + head[-1:]


def test_every_message_has_an_example_and_a_table_of_its_fields():
    assert {type(e.message).__name__ for e in EXAMPLES.values()} == set(STRUCTS)
    assert len(EXAMPLES) == sum(kind == "message" for kind, _ in BLOCKS)
    plain = {
        "Draft": m.Draft(1, 0, 0, 0, []), "Outcome": m.Outcome(1, 0, 0, 0, 0),
        "DraftTokens": m.DraftTokens(1, 0, 0, 0), "VerifiedTokens": m.VerifiedTokens(1, 0, 0, []),
        "Observation": m.Observation(1, 0, "go", 0, 0, "none", b""),
    }  # fmt: skip
    for name, struct in (STRUCTS | {"Past": m.Past}).items():
        expected = []
        for field in msgspec.structs.fields(struct):
            default = default_of(field, plain.get(name))
            kind = type_text(msgspec.inspect.type_info(field.type))
            if field.name in IDS:
                kind = f"ids({m.MAX_REPLY if name == 'VerifiedTokens' else IDS[field.name]})"
            expected.append([field.name, kind, default_text(default)])
        tag = struct.__struct_config__.tag
        rows = table(f"### {name}: tag {tag}" if tag is not None else f"#### {name}")
        assert [row[:3] for row in rows] == expected, name


def test_every_mode_is_named_with_its_proof():
    rows = [(name.strip("`"), proof) for row in table("#### Modes") for name, proof in [row]]
    assert rows == [(name, preset.proof.value) for name, preset in PRESETS.items()]


def test_every_refusal_code_is_explained():
    assert [row[0] for row in table("## Refusals")] == [code.value for code in m.RefusalCode]


def test_every_reason_for_which_a_question_ends_is_explained():
    assert [row[0] for row in table("#### Why a question ends")] == [c.value for c in m.EndCode]


def test_a_head_and_what_is_revealed_are_those_of_the_examples():
    figures = FIGURES["head"]
    proposal = EXAMPLES["a proposal with a head"].message
    size = EXAMPLES["a question"].message.vocab_size
    p = np.array(figures["p"], np.float32)
    kept = np.sort(np.argsort(-p, kind="stable")[: EXAMPLES["a question"].message.head])
    assert kept.tolist() == figures["ids"] and p[kept].tolist() == figures["values"]
    assert figures["bound"] == np.delete(p, kept).max()
    assert proposal.token == p.argmax() and len(p) == size
    assert proposal.evidence == pack_head(kept, p[kept], figures["bound"], size)
    assert unpack_head(proposal.evidence, size)[2] == figures["bound"]
    told = EXAMPLES["a reveal"].message
    assert told.values == pack_probabilities(p[[2, 5]])
    assert unpack_probabilities(told.values, 2).tolist() == p[[2, 5]].tolist()


def test_the_proof_of_the_token_is_that_of_the_examples():
    figures = FIGURES["token"]
    key, token = figures["token"].encode(), bytes.fromhex(figures["session_key"])

    def mac(key: bytes, label: bytes, *parts: bytes) -> bytes:
        return hmac.new(key, b"dsd_ros " + label + b"\0" + b"".join(parts), "sha256").digest()

    def holds(message: m.Message, key: bytes, label: bytes, *before: bytes) -> bool:
        fields = message.__struct_fields__
        values = [getattr(message, name) for name in fields[: fields.index("tag")]]
        content = msgspec.msgpack.encode([message.__struct_config__.tag, *values, b""])
        return message.tag == message.tag[:4] + mac(key, label, *before, message.tag[:4], content)[:16]

    given = {name: bytes.fromhex(figures[name]) for name in figures if name != "token"}
    request, reply, draft, unknown = (EXAMPLES[name].message for name in (
        "a session opened", "an open session", "drafted tokens with a tag", "a session not known"
    ))  # fmt: skip
    request = msgspec.structs.replace(request, nonce=given["robot_nonce"], tag=given["request_tag"])
    reply = msgspec.structs.replace(reply, nonce=given["verifier_nonce"], tag=given["reply_tag"], ticket=b"")
    assert token == mac(key, b"session", request.nonce, reply.nonce, reply.session.to_bytes(4, "little"))
    assert mac(token, b"ticket")[:16] == given["ticket"]
    assert holds(request, key, b"open") and request.tag[:4] == bytes(4)
    assert holds(reply, token, b"down")
    assert holds(draft, token, b"up")
    assert holds(unknown, key, b"unknown", draft.tag)
    ours, theirs = (Token(figures["token"]).session_key(request.nonce, reply, robot=robot) for robot in (True, False))
    assert ours.ticket == given["ticket"]
    assert not ours.fault(reply) and not theirs.fault(draft)
    assert "1024 or more below" in " ".join(PAGE.split()) and REMEMBERED == 1024
    orders = {
        name: [field.strip("`") for field in order.split(", ")] for name, order in table("#### Order of the content")
    }
    for struct in get_args(m.Message):
        frame = list(FRAMES.get(struct, struct).__struct_fields__)
        assert orders.get(struct.__name__, frame) == list(struct.__struct_fields__)


def test_other_encodings_of_the_same_values_are_read_alike():
    close = bytes.fromhex("dc0002cc09cf0000000000000005")  # wider headers than are needed
    assert decode(close) == m.SessionClose(5)
    verified = EXAMPLES["the end of a reply"]
    values = list(msgspec.structs.astuple(verified.frame))
    written_out = [*values[:4], 0, 0, 0, True, b""]  # defaults too
    for same in (values[:8], values, written_out):
        assert decode(msgspec.msgpack.encode([5, *same])) == verified.message
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode([5, *written_out, 0]))  # one field too many
    request = list(msgspec.structs.astuple(EXAMPLES["a session opened"].message))
    request[5] = 1  # an integer for a float
    assert decode(msgspec.msgpack.encode([1, *request])).temperature == 1.0


def test_varints_are_those_of_the_example():
    figures = FIGURES["varints"]
    assert pack_varints(figures["ids"]).hex() == figures["bytes"]
    assert unpack_varints(bytes.fromhex(figures["bytes"]), 3) == figures["ids"]


def test_the_picture_is_the_one_described():
    figures = FIGURES["picture"]
    observation = EXAMPLES["an observation"].message
    assert decode_picture(observation).tolist() == figures["rows"]
    png = msgspec.structs.replace(observation, encoding="png", image=bytes.fromhex(figures["png"]))
    assert decode_picture(png).tolist() == figures["rows"]


def test_pictures_of_a_history_are_named_by_their_digests():
    rows = FIGURES["picture"]["rows"]
    seen, sent_along = EXAMPLES["an observation with a history"].message.history
    assert sent_along.digest == picture_digest(np.array(rows, np.uint8))
    assert decode_picture(sent_along).tolist() == rows
    assert not seen.image and seen.digest == picture_digest(np.array([[[0, 255, 0]]], np.uint8))


def test_the_tokenizer_is_fingerprinted_as_described():
    figures = FIGURES["fingerprint"]
    assert tokenizer_fingerprint(json.dumps(figures["tokenizer"])) == figures["fingerprint"]
    assert EXAMPLES["a session opened"].message.tokenizer_fingerprint == figures["fingerprint"]


def test_split_verification_is_that_of_the_example():
    figures = FIGURES["split"]
    p, q = (torch.tensor(figures[name]) for name in "pq")
    outcome, told = (EXAMPLES[name].message for name in ("a rejection", "the round after a rejection"))
    drafted = [1, 2]
    asked = torch.tensor(figures["chances"])
    assert pack_chances(rounded_up(asked).numpy()).hex() == figures["evidence"]
    assert rounded_up(asked).tolist() == figures["rounded_up"]
    assert rounded_up(torch.tensor([1 + 1e-6])).tolist() == [1.0]
    assert "(`evidence` 00dff0)" in PAGE
    chances = unpack_chances(bytes.fromhex("00dff0"), len(drafted))
    rejected = drafted[outcome.accepted]
    assert chances[outcome.accepted] == rounded_up(q)[rejected] == figures["rounded_up"][1]
    assert outcome.distribution == pack_distribution(p.numpy())
    assert unpack_distribution(outcome.distribution, len(p)).tolist() == p.tolist()
    rest = split_residual(p, q)
    said = [0.0 if q_x == 0 else q_x * min(1, p_x / r_x) for p_x, q_x, r_x in zip(
        p.tolist(), q.tolist(), rounded_up(q).tolist(), strict=True
    )]  # fmt: skip
    assert rest.tolist() == pytest.approx([a - b for a, b in zip(p.tolist(), said, strict=True)])
    assert (rest / rest.sum()).tolist() == pytest.approx(figures["resampled_by"], abs=1e-6)
    whole = np.array(figures["whole_p"], np.float32)
    assert bytes.fromhex(figures["whole_packed"]) == pack_distribution(whole)
    assert rest[told.resampled[0]] > 0 and told.round == outcome.round + 1
    assert told.confirmed == 5 + outcome.accepted + 1


def test_a_tree_is_that_of_the_example():
    figures = FIGURES["tree"]
    draft = EXAMPLES["a tree with truncated distributions"].message
    tree = TokenTree.from_bytes(draft.tokens, draft.parents)
    assert tree == TokenTree(tuple(figures["tokens"]), tuple(figures["parents"]))
    assert list(tree.inner) == figures["rows_of"]
    kept = [(np.array(ids), np.array(weights, np.float16)) for ids, weights in figures["kept"]]
    assert draft.evidence == pack_kept(kept, 8)
    q = torch.stack([restored(*row, 8) for row in unpack_kept(draft.evidence, 3, 8)])
    check_tree(tree, q)
    assert list(tree.path_to(figures["accepted"] - 1)) == figures["path"]


def test_a_tree_is_split_as_in_the_example():
    figures = FIGURES["split tree"]
    outcome = EXAMPLES["a first child rejected"].message
    tree = TokenTree(tuple(figures["tokens"]), tuple(figures["parents"]))
    assert f"`parents` {tree.parents_bytes().hex()}" in PAGE and f"`evidence` {figures['evidence']}" in PAGE
    q, p = torch.tensor(figures["q"]), torch.tensor(figures["p"])
    check_tree(tree, q)
    own = [q[tree.inner.index(at), x] for at, x in zip(tree.parents, tree.tokens, strict=True)]
    chances = unpack_chances(bytes.fromhex(figures["evidence"]), len(tree)).tolist()
    assert chances == rounded_up(torch.stack(own)).tolist()
    # Rows after nodes that are never visited do not matter.
    behind = torch.stack([p[0], torch.full((8,), 0.125), p[1], torch.full((8,), 0.125), p[2]])
    for seed in range(20):
        verdict = verify_split_tree(tree, chances, behind, np.random.default_rng(seed))
        assert verdict.owed and verdict.last + 1 == outcome.accepted == 0
        left = remaining_nodes(tree, verdict.last)
        assert list(left) == figures["left"]
        rows = unpack_rows(outcome.distribution, 1 + len(left), 8)
        assert outcome.distribution == pack_rows(rows)
        assert [row.tolist() for row in rows] == p.tolist()
        found = finish_split_tree(tree, verdict.last, q, p, np.random.default_rng(seed))
        assert [*tree.tokens_of(found.path), found.next_token] == figures["resampled"]
    rest = split_residual(p[0], q[0])
    assert (rest / rest.sum()).tolist() == figures["w"]


def test_truncation_is_that_of_the_example():
    figures = FIGURES["truncated"]
    evidence = bytes.fromhex(figures["evidence"])
    size = len(figures["q"])
    ids, weights = truncate(torch.tensor(figures["q"]), top_k=figures["top_k"])
    assert ids.tolist() == figures["ids"]
    assert pack_ids(ids, size).hex() == figures["packed_ids"]
    assert weights.astype("<f2").tobytes().hex() == figures["weights"]
    assert evidence == pack_kept([(ids, weights)], size)
    ((ids, weights),) = unpack_kept(evidence, 1, size)
    assert restored(ids, weights, size).tolist() == torch.tensor(figures["q_hat"]).tolist()
    assert figures["token"] in ids


def test_noise_is_that_of_the_example_and_of_the_description():
    figures = FIGURES["noise"]
    keyed = figures["seed"], figures["reply"], figures["position"]
    noise = gumbel(*keyed, len(figures["noise"]))
    assert noise.tolist() == figures["noise"]
    assert choose(torch.tensor(figures["p"]), noise) == figures["drawn"]

    def mix(value: int) -> int:
        value %= 1 << 64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return value ^ (value >> 31)

    def log(x: float) -> float:
        fraction, exponent = math.frexp(x)
        if fraction < math.sqrt(0.5):
            fraction, exponent = 2 * fraction, exponent - 1
        r = (fraction - 1) / (fraction + 1)
        s = 1 / 23
        for k in range(21, 0, -2):
            s = s * (r * r) + 1 / k
        return exponent * 0.6931471805599453 + 2 * r * s

    step, key = 0x9E3779B97F4A7C15, 0
    for part in keyed:
        key = mix(key ^ mix(part + step))
    assert f"{key:016x}" == figures["key"]
    for i, (bits, value) in enumerate(zip(figures["bits"], figures["noise"], strict=True)):
        assert mix((i + 1) * step + key) >> 12 == int(bits, 16)
        uniform = (int(bits, 16) + 0.5) / 2**52
        assert -log(-log(uniform)) == value
        assert -math.log(-math.log(uniform)) == pytest.approx(value, rel=1e-14)


def test_digests_are_those_of_the_example():
    figures = FIGURES["digest"]
    assert m.prefix_digest(figures["tokens"]).hex() == figures["digest"]
    assert m.prefix_digest([]).hex() == figures["digest_of_none"]
    ahead = EXAMPLES["a round sent ahead"].message
    assert ahead.assumed == m.prefix_digest(figures["tokens"])
    assert ahead.confirmed == len(figures["tokens"])
