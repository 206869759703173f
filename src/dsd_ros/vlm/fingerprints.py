"""Short names for what a model and a tokenizer are, compared when robot and verifier meet.

Two sides may pad their vocabularies differently but must cut text into the same tokens, so the
tokenizer's fingerprint covers what decides that, in a canonical form: equal tokenizers hash equal
whatever the layout of their files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import EXITS_FILE

WHOLE_FILE_BYTES = 256 << 20
_CHUNK = 1 << 20
_SAMPLES = 64


def tokenizer_fingerprint(serialized: str) -> str:
    """32 hex digits for a tokenizer's JSON: vocabulary, merges, added tokens, how text is cut."""
    value = json.loads(serialized)
    model = value["model"]
    canonical = {
        "type": model.get("type"),
        "vocab": model.get("vocab"),
        # Written as "a b" by older versions and as ["a", "b"] by newer ones.
        "merges": [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", [])],
        "added": sorted(
            [token["id"], token["content"], bool(token.get("special"))] for token in value.get("added_tokens", [])
        ),
        "normalizer": value.get("normalizer"),
        "pre_tokenizer": value.get("pre_tokenizer"),
    }
    return _digest(canonical)


def model_fingerprint(directory: Path) -> str:
    """32 hex digits for a model directory: its configuration and its weights, not its early exits.

    Files of up to 256 MiB are read whole. Of larger ones, where reading all would take longer than
    loading, the safetensors header (names, shapes, offsets), the size and 64 evenly spaced chunks
    of 1 MiB count: a retrained model differs there, one flipped bit may go unnoticed.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
        config.pop(key, None)
    files = sorted(f for f in directory.glob("*.safetensors") if f.name != EXITS_FILE)
    if not files:
        raise ModelError(f"{directory} holds no *.safetensors weights; download or train the model")
    return _digest([config, [[file.name, _weights_digest(file)] for file in files]])


def file_fingerprint(file: Path) -> str:
    """32 hex digits for a model in one file, read as ``model_fingerprint`` reads its weights."""
    return _digest(_weights_digest(file))


def _weights_digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if size <= WHOLE_FILE_BYTES:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        else:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, 64 << 20)))
            for sample in range(_SAMPLES):
                stream.seek((size - _CHUNK) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_CHUNK))
    return digest.hexdigest()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
