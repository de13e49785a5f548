"""Messages on a stream of bytes, without the socket: what `direct` writes, and how it cuts what arrives.

A frame is its size (u32, little-endian, of what follows the kind), its kind (u8) and so many bytes. A small one is cut out of one
buffer that all arrives in; the bytes of a large one are received where they stay, so that nothing copies them afterwards. That buffer
is small until it has been full: a thousand readers that wait would else keep 64 MB for what they never say.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from seriatim.protocol.batch import MAX_PAYLOAD_BYTES
from seriatim.protocol.errors import MalformedFrame

MAX_FRAME_BYTES: Final = 2 * MAX_PAYLOAD_BYTES
"""Of a message by gRPC, too."""
BUFFER_BYTES: Final = 64 * 1024
"""A frame that doesn't fit into so much has a buffer of its own."""
FIRST_BUFFER_BYTES: Final = 4 * 1024
LARGE_BYTES: Final = 1024 * 1024
"""So much room a frame gets at first; more once that has come."""
_HEAD: Final = struct.Struct("<IB")


class Kind(IntEnum):
    """open: what the stream is for, the first frame of who opens it. end: nothing more comes. error: why it ends, as JSON."""

    OPEN = 1
    MESSAGE = 2
    END = 3
    ERROR = 4


Data = bytes | memoryview
Frame = tuple[Kind, Data]


def encode(kind: Kind, *parts: Data) -> list[Data]:
    """A frame whose content is these parts, to be written in one go; large ones stay by themselves, for joining would copy them.

    Raises MalformedFrame where it is over MAX_FRAME_BYTES.
    """
    size_bytes = sum(map(len, parts))
    small: list[Data] = [_HEAD.pack(_checked(size_bytes), kind)]
    if size_bytes <= BUFFER_BYTES:
        return [b"".join((*small, *parts))]
    written: list[Data] = []
    for part in parts:
        if len(part) <= BUFFER_BYTES:
            small.append(part)
            continue
        if small:
            written.append(b"".join(small))
        written.append(part)
        small = []
    return [*written, b"".join(small)] if small else written


def _checked(size_bytes: int, max_bytes: int = MAX_FRAME_BYTES) -> int:
    if size_bytes > max_bytes:
        raise MalformedFrame(f"a frame has at most {max_bytes} bytes here, not {size_bytes}")
    return size_bytes


class FrameReader:
    """Cuts bytes into frames: fill `room()`, from its beginning, and say with `filled` how much came."""

    def __init__(self, first_max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`first_max_bytes`: what the first frame may have at most; its sender is nobody yet."""
        self._use(bytearray(FIRST_BUFFER_BYTES))
        self._used_bytes = 0
        self._max_bytes = first_max_bytes
        self._large: memoryview | None = None
        self._large_kind = Kind.MESSAGE
        self._large_bytes = 0
        self._large_used_bytes = 0

    def _use(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)

    def room(self) -> memoryview:
        """Where the next bytes go: at least one."""
        if self._large is not None:
            return self._large[self._large_used_bytes :]
        return self._view[self._used_bytes :]

    def filled(self, size_bytes: int) -> list[Frame]:
        """What is whole now, in order; a large frame's bytes are nobody else's. Raises MalformedFrame: nothing can be read behind it."""
        if self._large is not None:
            self._large_used_bytes += size_bytes
            if self._large_used_bytes < len(self._large):
                return []
            if self._large_used_bytes < self._large_bytes:
                self._large = _grown(self._large, self._large_bytes)
                return []
            large, self._large = self._large, None
            return [(self._large_kind, large)]
        self._used_bytes += size_bytes
        if self._used_bytes == len(self._buffer) < BUFFER_BYTES:  # there is more, likely
            self._use(self._buffer + bytes(BUFFER_BYTES - len(self._buffer)))
        return self._cut()

    def _cut(self) -> list[Frame]:
        frames: list[Frame] = []
        at, used_bytes = 0, self._used_bytes
        while used_bytes - at >= _HEAD.size:
            size_bytes, number = _HEAD.unpack_from(self._buffer, at)
            kind = _kind(number)
            start, end = at + _HEAD.size, at + _HEAD.size + _checked(size_bytes, self._max_bytes)
            if end <= used_bytes:
                self._max_bytes = MAX_FRAME_BYTES
                frames.append((kind, bytes(self._view[start:end])))
                at = end
                continue
            if _HEAD.size + size_bytes > BUFFER_BYTES:
                self._large_kind, self._large_bytes, self._large_used_bytes = kind, size_bytes, used_bytes - start
                self._large = _grown(self._view[start:used_bytes], size_bytes)
                at = used_bytes
            break
        self._used_bytes = used_bytes - at
        if at:
            self._view[: self._used_bytes] = self._view[at:used_bytes]
        return frames


def _grown(part: memoryview, size_bytes: int) -> memoryview:
    """The part of a frame of this size that came, with room behind it: for no more than has come, or LARGE_BYTES.

    Who only says that much comes takes no memory by it.
    """
    found = memoryview(bytearray(min(size_bytes, max(LARGE_BYTES, 2 * len(part)))))
    found[: len(part)] = part
    return found


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError as error:
        raise MalformedFrame(f"a frame of kind {number} is not known here: is it Seriatim that talks?") from error
