"""As much of the websocket's framing (RFC 6455) as it takes to speak between two frames of somebody else."""

from __future__ import annotations

import os


class FrameBoundaries:
    """Follows a websocket's stream (RFC 6455), to know when it is between two frames."""

    def __init__(self) -> None:
        self._open = False  # the HTTP part is over
        self._head = b""  # what came of the HTTP part, or of a frame's header
        self._left = 0  # of the payload

    @property
    def between(self) -> bool:
        return self._open and not self._head and not self._left

    def pass_on(self, data: bytes) -> None:
        if not self._open:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data, self._head, self._open = self._head[end + 4 :], b"", True
        while data:
            if self._left:
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
                continue
            self._head, data = self._head + data[:1], data[1:]
            self._left = _payload_of(self._head)
            if self._left >= 0:
                self._head = b""
            else:
                self._left = 0


def _payload_of(head: bytes) -> int:
    """Bytes of payload behind a whole header of a frame; -1 while the header is not whole."""
    if len(head) < 2:
        return -1
    length, mask = head[1] & 0x7F, 4 if head[1] & 0x80 else 0
    more = {126: 2, 127: 8}.get(length, 0)
    if len(head) < 2 + more + mask:
        return -1
    return int.from_bytes(head[2 : 2 + more], "big") if more else length


def websocket_frame(data: bytes, masked: bool) -> bytes:
    """One final binary frame (RFC 6455, section 5.2); a client's frames are masked."""
    length, mask_bit = len(data), 0x80 if masked else 0
    if length < 126:
        head = bytes((0x82, mask_bit | length))
    elif length < 1 << 16:
        head = bytes((0x82, mask_bit | 126)) + length.to_bytes(2, "big")
    else:
        head = bytes((0x82, mask_bit | 127)) + length.to_bytes(8, "big")
    if not masked:
        return head + data
    key = os.urandom(4)
    return head + key + bytes(byte ^ key[index % 4] for index, byte in enumerate(data))
