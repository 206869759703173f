# SPDX-License-Identifier: Apache-2.0
"""Look up message types by name: their Python classes, and the definitions that a bag stores.

A definition follows rosbag2: the fields of the message, then those of the types it contains.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, TypesysError, get_types_from_msg, get_typestore


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
    """A type's definition and its RIHS01 hash, of the .msg files that are installed.

    :raises TypeUnknown: when its .msg file, or that of a type it contains, is missing or cannot be read.
    """
    store = get_typestore(Stores.EMPTY)
    wanted = [name]
    while wanted:
        kind = wanted.pop()
        if kind in store.types:
            continue
        package, short = _parts(kind)
        try:
            found = get_types_from_msg((_share(package) / "msg" / f"{short}.msg").read_text(encoding="utf-8"), kind)
            store.register(found)
        except (OSError, TypesysError) as error:
            raise TypeUnknown(f"The definition of {kind} cannot be read: {error}.") from None
        for _, fields in found.values():
            wanted += [str(each) for _, about in fields for each in _contained(about)]
    return store.generate_msgdef(name, ros_version=2)[0], store.hash_rihs01(name)


def _contained(about: Any) -> list[str]:
    """The message types in the description of a field."""
    node, what = about
    if node == Nodetype.NAME:
        return [what]
    return _contained(what[0]) if node in (Nodetype.ARRAY, Nodetype.SEQUENCE) else []


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
