# SPDX-License-Identifier: Apache-2.0
"""The .msg files of the protocol's messages, generated from their structs in src/dsd_ros/wire/messages.py.

python -m tools.msg_files      # writes src/dsd_msgs/msg; a test fails where these differ from what is committed
"""

from __future__ import annotations

import inspect
import io
import re
import tokenize
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from dsd_ros.wire import messages

FOLDER = Path(__file__).resolve().parents[1] / "src" / "dsd_msgs" / "msg"
# Fast DDS sets aside the room of the largest bounded message for every place in a topic's queue: 12 GB of address space
# for 300 messages of 40 MiB. Longer fields are bounded where they are read, in dsd_ros.ros.dds_channel.
LARGEST_BOUND = 1 << 16
STRUCTS = (*get_args(messages.Message), messages.Past)


def definition(struct: type[msgspec.Struct]) -> str:
    """The .msg file of a struct: its docstring, then a line per field with the comment that the source has there."""
    source = inspect.getsource(struct)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    head = (inspect.getdoc(struct) or "").replace("``", "`").splitlines()
    lines = [f"# {line}".rstrip() for line in head] + [""]
    for field in msgspec.structs.fields(struct):
        at = next(i for i, line in enumerate(source.splitlines(), 1) if re.match(rf"    {field.name}: ", line))
        lines.append(f"{ros_type(field.type)} {field.name}".ljust(36) + f" # {comments[at]}")
    return "\n".join(lines) + "\n"


def ros_type(kind: Any) -> str:
    """The ROS type that holds what an annotation allows. A string's bound counts bytes: four for each character."""
    limits = next(iter(getattr(kind, "__metadata__", ())), msgspec.Meta())
    if limits.extra and "msg" in limits.extra:
        return str(limits.extra["msg"])
    base = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if base is int:
        bits = (limits.le if limits.le is not None else limits.lt - 1).bit_length()
        return next(f"uint{size}" for size in (16, 32, 64) if bits <= size)
    if base is str:
        return f"string<={4 * limits.max_length}"
    if base is bytes:
        return "uint8[]" if limits.max_length > LARGEST_BOUND else f"uint8[<={limits.max_length}]"
    if get_origin(base) is list:
        return f"{ros_type(get_args(base)[0])}[<={limits.max_length}]"
    return {float: "float64", bool: "bool"}.get(base) or base.__name__


if __name__ == "__main__":
    for message in STRUCTS:
        (FOLDER / f"{message.__name__}.msg").write_text(definition(message), encoding="utf-8")
