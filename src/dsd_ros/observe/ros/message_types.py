# SPDX-License-Identifier: Apache-2.0
"""Look up message types by name: their Python classes, and the definitions that a bag stores.

A definition follows rosbag2: the text of the .msg file, then those of the types it contains.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from functools import cache
from pathlib import Path

from rosbags.typesys import Stores, TypesysError, get_types_from_msg, get_typestore

_SEPARATOR = "=" * 80
_FIELD = re.compile(r"^\s*([A-Za-z][\w/]*)(?:<=\d+)?(?:\[[^\]]*\])?\s+[A-Za-z]\w*")
_BUILTIN = frozenset(
    {"bool", "byte", "char", "float32", "float64", "string", "wstring"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


class TypeUnknown(ValueError):
    """The message type is not installed; one sentence."""


def message_class(name: str) -> type:
    """The class of a message type such as ``std_msgs/msg/String``.

    :raises TypeUnknown: when it is not installed.
    """
    package, short = _parts(name)
    try:
        found: type = getattr(importlib.import_module(f"{package}.msg"), short)
    except (ImportError, AttributeError):
        raise TypeUnknown(
            f"The message type {name} is not installed here; install its package, or leave the topic out."
        ) from None
    return found


@cache
def definition(name: str) -> tuple[str, str]:
    """A type's definition and its RIHS01 hash.

    :raises TypeUnknown: when its .msg file, or that of a type it contains, is missing or cannot be read.
    """
    texts: dict[str, str] = {}
    _collect(name, texts)
    first, *others = texts
    parts = [texts[first], *(f"MSG: {'/'.join(_parts(other))}\n{texts[other]}" for other in others)]
    text = f"{_SEPARATOR}\n".join(part.rstrip("\n") + "\n" for part in parts)
    store = get_typestore(Stores.EMPTY)
    try:
        store.register(get_types_from_msg(text, name))
    except TypesysError as error:
        raise TypeUnknown(f"The definition of {name} cannot be read: {error}.") from None
    return text, store.hash_rihs01(name)


def _collect(name: str, texts: dict[str, str]) -> None:
    """Add the texts of a type and of all types it contains, depth first."""
    if name in texts:
        return
    package, short = _parts(name)
    path = _share(package) / "msg" / f"{short}.msg"
    try:
        texts[name] = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TypeUnknown(f"The definition of {name} cannot be read: {error}.") from None
    for line in texts[name].splitlines():
        found = _FIELD.match(line.split("#")[0])
        if found is None or found[1] in _BUILTIN:
            continue
        inner = found[1] if "/" in found[1] else f"{package}/{found[1]}"
        if inner == f"{package}/Header":
            inner = "std_msgs/Header"
        owner, _, kind = inner.rpartition("/")
        _collect(f"{owner.removesuffix('/msg')}/msg/{kind}", texts)


@cache
def _share(package: str) -> Path:
    """The share folder of a package: below a sourced prefix, or below a parent of its Python module."""
    places = [Path(p) for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    with contextlib.suppress(ImportError):
        places += Path(importlib.import_module(package).__file__ or "").resolve().parents
    for place in places:
        folder = place / "share" / package
        if (folder / "msg").is_dir():
            return folder
    raise TypeUnknown(f"The interfaces of the package {package} are not installed here.")


def _parts(name: str) -> tuple[str, str]:
    """Package and short name of a message type."""
    parts = name.split("/")
    if len(parts) != 3 or parts[1] != "msg" or not all(re.fullmatch(r"\w+", p) for p in parts):
        raise TypeUnknown(f"{name!r} is not a message type; an example is std_msgs/msg/String.")
    return parts[0], parts[2]
