"""Frames of a pipe between processes: cuts what has arrived into messages, without waiting for the rest of one.

The format is that of `multiprocessing.connection.Connection.send_bytes`: a length of four bytes, or -1 and a length of
eight, before each message. Its own `recv` waits for a whole message, and an engine may freeze in the middle of one.
"""

from __future__ import annotations

import struct
from typing import Final

_SHORT: Final = struct.Struct("!i")
_LONG: Final = struct.Struct("!Q")


class FrameReader:
    """Owns the beginning of a message whose end has not arrived yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in what was read; returns the messages that are complete, oldest first."""
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while (bounds := self._bounds(start)) is not None:
            begin, start = bounds
            frames.append(bytes(self._buffer[begin:start]))
        del self._buffer[:start]
        return frames

    def _bounds(self, start: int) -> tuple[int, int] | None:
        """Where the message whose length stands at `start` begins and ends; None where it is not complete."""
        begin = start + _SHORT.size
        if len(self._buffer) < begin:
            return None
        (length,) = _SHORT.unpack_from(self._buffer, start)
        if length < 0:
            if len(self._buffer) < begin + _LONG.size:
                return None
            (length,) = _LONG.unpack_from(self._buffer, begin)
            begin += _LONG.size
        return (begin, begin + length) if len(self._buffer) >= begin + length else None
