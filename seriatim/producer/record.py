"""A record as an application hands it over: checked but for what depends on the term."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from seriatim.producer.core.sequencing import check_seq
from seriatim.protocol.batch import MAX_RECORD_BYTES
from seriatim.protocol.errors import InvalidArgument, RecordTooLarge
from seriatim.protocol.record import Headers

HeadersArgument = Mapping[str, bytes] | Iterable[tuple[str, bytes]] | None


class CheckedRecord:
    """See the module. `size_bytes`: of value, key and headers, as they count against the limit of a record."""

    __slots__ = ("headers", "key", "seq", "size_bytes", "source", "timestamp_ms", "value")

    def __init__(
        self,
        value: bytes,
        key: bytes | None,
        headers: Headers,
        seq: int | None,
        source: str | None,
        timestamp_ms: int | None,
    ) -> None:
        self.value = value
        self.key = key
        self.headers = headers
        self.seq = seq
        self.source = source
        self.timestamp_ms = timestamp_ms
        size_bytes = len(value)
        if key is not None:
            size_bytes += len(key)
        for name, content in headers:
            size_bytes += 4 * len(name) + len(content) + 6
        self.size_bytes = size_bytes


def checked(
    value: object, key: object, headers: object, seq: object, source: object, timestamp_ms: object
) -> CheckedRecord:
    """Of whatever an application hands over. Raises InvalidArgument for what can't be a record, RecordTooLarge for what no queue takes."""
    if source is not None and seq is None:
        raise InvalidArgument("a source of the user's needs a seq of the user's")
    if source is not None and not isinstance(source, str):
        raise InvalidArgument(f"a source is text, not {type(source).__name__}")
    if seq is not None and not isinstance(seq, int):
        raise InvalidArgument(f"a seq is a whole number, not {type(seq).__name__}")
    if seq is not None:
        check_seq(seq)
    if timestamp_ms is not None and not (isinstance(timestamp_ms, int) and -(2**63) <= timestamp_ms < 2**63):
        raise InvalidArgument(f"timestamp_ms {timestamp_ms!r} is not a signed 64-bit number")
    record = CheckedRecord(
        _as_bytes(value, "value"),
        None if key is None else _as_bytes(key, "key"),
        _as_headers(headers),
        seq,
        source,
        timestamp_ms,
    )
    if record.size_bytes > MAX_RECORD_BYTES:
        raise too_large(record.size_bytes, MAX_RECORD_BYTES)
    return record


def too_large(size_bytes: int, limit_bytes: int) -> RecordTooLarge:
    """What a record is refused with whose value, key and headers take so many bytes."""
    return RecordTooLarge(f"a record of {size_bytes} bytes is over the limit of {limit_bytes}", limit_bytes=limit_bytes)


def _as_bytes(content: object, what: str) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, bytearray | memoryview):
        return bytes(content)
    raise InvalidArgument(f"a {what} is bytes, not {type(content).__name__}")


def _as_headers(headers: object) -> Headers:
    if not headers:
        return ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(pairs, Iterable):
        raise InvalidArgument(f"headers are pairs of a name and bytes, not {type(headers).__name__}")
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidArgument(f"a header is a pair of a name and bytes, not {pair!r}")
        name, content = pair
        if not isinstance(name, str) or _size(name) >= 2**16:
            raise InvalidArgument("the name of a header is text of less than 65,536 bytes")
        checked.append((name, _as_bytes(content, "header")))
    return tuple(checked)


def _size(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the name of a header isn't text that can be written: {name!r}") from error
