"""A checksum behind what processes tell each other: TCP's own lets one of some 65,000 damaged segments by, and what repacks segments makes it anew.

Problem: a batch has one, of its own. All else had none, and is a message also with a bit flipped: a cursor that skips records, a mark
by which one counts as stored, a token or a version that nobody reaches for weeks, the place where a link is said to end, which is for good.

Idea: one more field at a message's end, of the highest number that protobuf has: the crc32c of all bytes before it. Versions before pass
over a field that they don't know, and write none: what has none is taken as it is. JSON has one more key for it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from crc32c import crc32c
from google.protobuf.message import DecodeError

_Data = bytes | memoryview

_FIELD: Final = struct.Struct("<5sI")
_TAG: Final = b"\xfd\xff\xff\xff\x0f"
"""Of field 536,870,911, four bytes long. No text ends so: it isn't UTF-8."""
SIZE_BYTES: Final = _FIELD.size
_KEY: Final = ', "crc32c": '


def with_checksum(data: _Data) -> bytes:
    """A message with its checksum behind it."""
    return b"".join((data, _FIELD.pack(_TAG, crc32c(data))))


def without_checksum(data: _Data) -> _Data:
    """The message, without its checksum if it has one. Raises DecodeError, as for bytes that are no message, where that isn't of these bytes."""
    start = len(data) - SIZE_BYTES
    if start < 0 or data[start : start + len(_TAG)] != _TAG:
        return data
    message = data[:start]
    if _FIELD.unpack_from(data, start)[1] != crc32c(message):
        raise DecodeError("a message that was damaged on its way")
    return message


def text_with_checksum(text: str) -> str:
    """A JSON object with its checksum as its last key."""
    return f"{text[:-1]}{_KEY}{crc32c(text.encode())}}}"


def is_whole(text: str) -> bool:
    """Whether a JSON object is as it was written, as far as can be told."""
    before, key, checksum = text.rpartition(_KEY)
    return not key or checksum == f"{crc32c(f'{before}}}'.encode())}}}"


# ---- gRPC ----------------------------------------------------------------------------------------------------------


class CheckedChannel:
    """A channel for a stub whose messages have checksums."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def unary_unary(self, path: str, **how: Any) -> Any:
        return self._channel.unary_unary(path, **_of_stub(how))

    def unary_stream(self, path: str, **how: Any) -> Any:
        return self._channel.unary_stream(path, **_of_stub(how))

    def stream_stream(self, path: str, **how: Any) -> Any:
        return self._channel.stream_stream(path, **_of_stub(how))


class CheckedServer:
    """Takes a service's handlers on their way to a server, for which all messages have checksums, or are written and read as `others` says by method."""

    def __init__(self, server: Any, others: Mapping[str, Mapping[str, Callable[..., Any]]] | None = None) -> None:
        self._server = server
        self._others = others or {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are looked up first, and are all there are; these hold the same methods unchanged."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """As grpc.Server's."""
        checked: dict[str, Any] = {
            name: _checked(handler, self._others.get(name, {})) for name, handler in handlers.items()
        }
        self._server.add_registered_method_handlers(service, checked)


def _of_stub(how: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **how,
        "request_serializer": written_by(how["request_serializer"]),
        "response_deserializer": _or_none(read_by(how["response_deserializer"])),
    }


def _or_none(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It, with None for bytes that are no message: that is what gRPC hands a caller on for them, with a traceback in the log."""

    def parsed(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return None

    return parsed


def _checked(handler: Any, other: Mapping[str, Callable[..., Any]]) -> Any:
    how = {
        "request_deserializer": read_by(handler.request_deserializer),
        "response_serializer": written_by(handler.response_serializer),
    }
    return handler._replace(**how | dict(other))


def written_by(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """It, with a checksum behind what it writes."""
    return lambda message: with_checksum(serialize(message))


def read_by(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It, of what has a checksum behind it or none. Raises DecodeError, too, where that isn't of these bytes."""
    return lambda data: parse(without_checksum(data))
