"""The protocol's structs as ROS messages and back.

What comes from a topic is validated like what comes from a socket: same bounds, same error.
"""

from __future__ import annotations

import array
import math
from typing import Any

import msgspec

from dsd_msgs import msg as ros
from dsd_ros.wire import messages as wire
from dsd_ros.wire.codec import WireError

# Which ROS message type carries which struct. Fields of the same name carry the same thing, except
# those in _BYTES (uint8 arrays), whose representation differs.
ROS_TYPES: dict[type, type] = {
    wire.SessionRequest: ros.SessionRequest,
    wire.SessionReply: ros.SessionReply,
    wire.Observation: ros.Observation,
    wire.Draft: ros.Draft,
    wire.Outcome: ros.Outcome,
    wire.Refusal: ros.Refusal,
    wire.SessionClose: ros.SessionClose,
    wire.Question: ros.Question,
    wire.QuestionReply: ros.QuestionReply,
    wire.Proposal: ros.Proposal,
    wire.Verdict: ros.Verdict,
    wire.Reveal: ros.Reveal,
    wire.QuestionEnd: ros.QuestionEnd,
}
_STRUCTS = {ros_type: struct for struct, ros_type in ROS_TYPES.items()}
_NESTED: dict[str, tuple[type, type]] = {"history": (wire.Past, ros.Past)}  # lists of messages
_BYTES = frozenset(
    {
        "resume", "ticket", "image", "evidence", "parents", "assumed", "distribution", "digest",
        "values",
    }
)  # fmt: skip
RENAMED = {"switch": "hands_over"}  # a word of C
_SHORTS = frozenset({"exit_layers"})  # uint16 arrays; every other list of numbers is one of uint32


def to_ros(message: wire.Message) -> Any:
    """The ROS message that says the same as a protocol message."""
    return _filled(ROS_TYPES[type(message)], message)


def _filled(ros_type: type, message: msgspec.Struct) -> Any:
    result = ros_type()
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, bytes):
            value = array.array("B", value)
        elif name in _NESTED:
            value = [_filled(_NESTED[name][1], one) for one in value]
        elif isinstance(value, list):
            value = array.array("H" if name in _SHORTS else "I", value)
        setattr(result, RENAMED.get(name, name), value)
    return result


def from_ros(message: Any) -> wire.Message:
    """The protocol message of a ROS message, every field checked.

    :raises WireError: naming the message and what is wrong with it.
    """
    struct = _STRUCTS.get(type(message))
    if struct is None:
        raise WireError(f"{type(message).__name__} is no message of the protocol.")
    try:
        return msgspec.convert([struct.__struct_config__.tag, *_values(message, struct)], struct)
    except msgspec.ValidationError as error:
        raise WireError(f"A {struct.__name__} that breaks the protocol: {error}") from error


def _values(message: Any, struct: type[msgspec.Struct]) -> list[Any]:
    """A message's fields as msgspec converts them; WireError."""
    values: list[Any] = []
    for name in struct.__struct_fields__:
        value = getattr(message, RENAMED.get(name, name))
        if name in _BYTES and not isinstance(value, str):  # a question's evidence is a word
            value = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
        elif name in _NESTED:
            value = [_values(one, _NESTED[name][0]) for one in value]
        elif isinstance(value, float) and not math.isfinite(value):
            # Comparisons with NaN pass msgspec's bounds.
            raise WireError(f"A {struct.__name__} whose {name} is no finite number.")
        elif not isinstance(value, (str, int, float, bool)):
            value = list(value)
        values.append(value)
    return values
