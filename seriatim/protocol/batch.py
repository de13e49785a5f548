"""The batch: a run of records, encoded once by the producer and opaque to brokers.

A batch is a pair of byte strings. The *header* says what a broker needs: first index, count, the span of each source
and the payload's checksum. The *payload* holds the records by columns; only clients read it. A batch that is sent
again in another link gets a new header and keeps its payload.

Header, little-endian:
    magic `SRB` and version (4 bytes), flags u8, sources u8, header size u16, count u32, first index u64,
    payload size u32, payload crc32c u32, then per source: name size u16, name (UTF-8), first seq u64, last seq u64,
    count u32; at the end the crc32c u32 of all that is before it.

Payload (after zstd, where the flag says so): flags u8, then the columns, each of `count` rows:
    seq u64 (absent where one source's seqs have no gap), source number u8 (absent where there is one source),
    timestamp_ms i64 (one row where all are equal), value size u32, key size i32 (absent where no record has a key;
    -1: no key), headers size u32 (absent where none has any), then the values, keys and headers end to end.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import zstandard
from crc32c import crc32c

from seriatim.protocol.errors import BadChecksum, MalformedFrame, RecordTooLarge
from seriatim.protocol.marks import SourceSpan
from seriatim.protocol.names import SEQ_MAX, Index
from seriatim.protocol.record import Headers

MAGIC = b"SRB\x01"
MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
MAX_RECORD_BYTES = MAX_PAYLOAD_BYTES - 1024
"""Value, key and headers of one record: with what is written about it, it fits into a batch of its own."""
_LEAST_RECORD_BYTES = 4
"""In a payload, of an empty one: its size."""
MAX_SOURCES = 255
MAX_SOURCE_BYTES = 200

_FIXED = struct.Struct("<4sBBHIQII")
_SPAN = struct.Struct("<QQI")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64S, _I64S = ("L", "l") if struct.calcsize("l") == 8 else ("Q", "q")
"""As columns have them, a `long` where it is as long: half the time of a `long long`."""

Payload = bytes | memoryview
"""A broker leaves it where it arrived, in the message around it; a client has it as bytes."""

_ZSTD = 1

_HAS_SEQS = 1
_HAS_SOURCES = 2
_HAS_TIMESTAMPS = 4
_HAS_KEYS = 8
_HAS_HEADERS = 16

if sys.byteorder != "little" or array("I").itemsize != 4 or array("Q").itemsize != 8:  # pragma: no cover
    raise ImportError("seriatim's batch format needs a little-endian machine with 4-byte int and 8-byte long long")


@dataclass(frozen=True, slots=True)
class BatchHeader:
    """What a broker knows of a batch.

    `end_index` = `first_index` + `count`, exclusive. `spans` has one entry for each source in the batch.
    """

    first_index: Index
    count: int
    spans: tuple[SourceSpan, ...]
    payload_size: int
    payload_crc: int
    is_compressed: bool = False

    @property
    def end_index(self) -> Index:
        return Index(self.first_index + self.count)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A batch as it travels and lies on disk: parsed header, its bytes, and the payload's bytes."""

    header: BatchHeader
    header_bytes: bytes
    payload: Payload

    @property
    def size_bytes(self) -> int:
        return len(self.header_bytes) + len(self.payload)

    def at(self, first_index: Index) -> EncodedBatch:
        """The same records at another index: a new header, the same payload."""
        if first_index == self.header.first_index:
            return self
        header = BatchHeader(
            first_index,
            self.header.count,
            self.header.spans,
            self.header.payload_size,
            self.header.payload_crc,
            self.header.is_compressed,
        )
        return EncodedBatch(header, encode_header(header), self.payload)


@dataclass(slots=True)
class RecordColumns:
    """Records by columns: every list has one entry a record. Consecutive seqs may be a range.

    `sources` may be one string for all; `keys` and `headers` may be None where no record has any.
    Seqs of one source must rise.
    """

    values: list[bytes]
    seqs: Sequence[int]
    sources: str | list[str]
    timestamps_ms: list[int]
    keys: list[bytes | None] | None = None
    headers: list[Headers] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def source_of(self, row: int) -> str:
        return self.sources if isinstance(self.sources, str) else self.sources[row]

    def above(self, marks: Mapping[str, int], rows: range) -> list[int]:
        """Of these rows, those above their source's mark: no re-sends."""
        seqs, sources = self.seqs, self.sources
        if isinstance(sources, str):
            mark = marks.get(sources, -1)
            return [row for row in rows if seqs[row] > mark]
        return [row for row in rows if seqs[row] > marks.get(sources[row], -1)]

    def taken(self, rows: Sequence[int]) -> RecordColumns:
        """These rows' records."""
        return RecordColumns(
            [self.values[row] for row in rows],
            [self.seqs[row] for row in rows],
            self.sources if isinstance(self.sources, str) else [self.sources[row] for row in rows],
            [self.timestamps_ms[row] for row in rows],
            None if self.keys is None else [self.keys[row] for row in rows],
            None if self.headers is None else [self.headers[row] for row in rows],
        )

    def without_resends(self, marks: Mapping[str, int]) -> RecordColumns:
        """The records above their source's mark, in order; the same object where all of them are."""
        kept = self.above(marks, range(len(self)))
        return self if len(kept) == len(self) else self.taken(kept)


def _checksum(data: Payload) -> int:
    """Holds on to the interpreter's lock: to wait for it again would take longer than the checksum of half a megabyte, 0.02 ms."""
    return crc32c(data, gil_release_mode=0)


def _column(typecode: str, numbers: Sequence[int]) -> bytes:
    """As `array` of them, which reads each number by a format string, at three times the cost."""
    return struct.pack(f"{len(numbers)}{typecode}", *numbers)


def encode_header(header: BatchHeader) -> bytes:
    """The bytes of a header, checksum included."""
    parts: list[bytes] = []
    for span in header.spans:
        name = span.source.encode()
        parts += (_U16.pack(len(name)), name, _SPAN.pack(span.first_seq, span.last_seq, span.count))
    tail = b"".join(parts)
    size = _FIXED.size + len(tail) + 4
    fixed = _FIXED.pack(
        MAGIC,
        _ZSTD if header.is_compressed else 0,
        len(header.spans),
        size,
        header.count,
        header.first_index,
        header.payload_size,
        header.payload_crc,
    )
    body = fixed + tail
    return body + _U32.pack(_checksum(body))


def decode_header(data: bytes) -> BatchHeader:
    """Read a header.

    Raises MalformedFrame where the bytes are none, BadChecksum where they were damaged.
    """
    if len(data) < _FIXED.size + 4:
        raise MalformedFrame("these bytes are not the header of a batch")
    if _checksum(data[:-4]) != _U32.unpack_from(data, len(data) - 4)[0]:
        raise BadChecksum("the header of a batch is damaged")  # first: who sent it right is to send it again
    magic, flags, source_count, size, count, first_index, payload_size, payload_crc = _FIXED.unpack_from(data)
    if magic[:3] != MAGIC[:3]:
        raise MalformedFrame("these bytes are not the header of a batch")
    if magic != MAGIC:
        raise MalformedFrame(f"batch format {magic[3]} is not known here", format=magic[3])
    if size != len(data):
        raise MalformedFrame(f"the header says {size} bytes and has {len(data)}")
    spans = []
    at = _FIXED.size
    try:
        for _ in range(source_count):
            (name_size,) = _U16.unpack_from(data, at)
            at += 2
            name = data[at : at + name_size].decode()
            at += name_size
            spans.append(SourceSpan(name, *_SPAN.unpack_from(data, at)))
            at += _SPAN.size
    except (struct.error, UnicodeDecodeError) as error:
        raise MalformedFrame("the sources in the header of a batch can't be read") from error
    header = BatchHeader(Index(first_index), count, tuple(spans), payload_size, payload_crc, bool(flags & _ZSTD))
    if at != size - 4 or not _is_sound(header):
        raise MalformedFrame("the header of a batch contradicts itself")
    return header


def _is_sound(header: BatchHeader) -> bool:
    return (
        header.count > 0
        and header.payload_size <= MAX_PAYLOAD_BYTES
        and (header.is_compressed or _may_hold(header.payload_size, header.count))
        and sum(span.count for span in header.spans) == header.count
        and len({span.source for span in header.spans}) == len(header.spans)
        and all(span.count >= 1 and span.last_seq - span.first_seq + 1 >= span.count for span in header.spans)
    )


def _may_hold(size_bytes: int, count: int) -> bool:
    """Whether so many records can be in a payload of this size: who only says so takes no memory of whoever reads them by it."""
    return count * _LEAST_RECORD_BYTES < size_bytes


def parse(header_bytes: bytes, payload: Payload) -> EncodedBatch:
    """Check a batch that arrived, and read its header.

    Raises MalformedFrame or BadChecksum; nothing of a batch that fails is used.
    """
    header = decode_header(header_bytes)
    if len(payload) != header.payload_size:
        raise MalformedFrame(f"the payload of a batch has {len(payload)} bytes, its header says {header.payload_size}")
    if _checksum(payload) != header.payload_crc:
        raise BadChecksum(f"the payload of the batch at index {header.first_index} is damaged")
    return EncodedBatch(header, header_bytes, payload)


def split(stored: bytes) -> tuple[bytes, bytes]:
    """Header and payload of a batch that was stored end to end. Raises MalformedFrame where there is none."""
    if len(stored) < _FIXED.size:
        raise MalformedFrame("these bytes are not a stored batch")
    (size,) = _U16.unpack_from(stored, 6)
    return stored[:size], stored[size:]


def encode(columns: RecordColumns, first_index: Index, *, compress: bool = False) -> EncodedBatch:
    """Encode records into a batch; `compress`: where that makes it smaller.

    Raises RecordTooLarge where the payload is over MAX_PAYLOAD_BYTES, ValueError where the columns are of different
    lengths, a seq is out of range, or the seqs of a source don't rise.
    """
    count = len(columns)
    if count == 0 or len(columns.seqs) != count or len(columns.timestamps_ms) != count:
        raise ValueError("columns of a batch must have one and the same length, and at least one row")
    spans, source_numbers = _spans(columns)
    flags = 0
    parts: list[bytes] = [b""]
    if not (len(spans) == 1 and spans[0].last_seq - spans[0].first_seq + 1 == count):
        flags |= _HAS_SEQS
        parts.append(_column(_U64S, columns.seqs))
    if source_numbers is not None:
        flags |= _HAS_SOURCES
        parts.append(source_numbers)
    first_timestamp = columns.timestamps_ms[0]
    if columns.timestamps_ms[-1] == first_timestamp and columns.timestamps_ms.count(first_timestamp) == count:
        parts.append(_I64.pack(first_timestamp))
    else:
        flags |= _HAS_TIMESTAMPS
        parts.append(_column(_I64S, columns.timestamps_ms))
    parts.append(_column("I", [len(value) for value in columns.values]))
    bodies = columns.values
    keys = columns.keys
    if keys is not None and keys.count(None) < count:
        flags |= _HAS_KEYS
        parts.append(_column("i", [-1 if key is None else len(key) for key in keys]))
        bodies = bodies + [key for key in keys if key is not None]
    if columns.headers is not None and any(columns.headers):
        flags |= _HAS_HEADERS
        encoded = [_encode_headers(headers) for headers in columns.headers]
        parts.append(_column("I", [len(one) for one in encoded]))
        bodies = bodies + encoded
    parts[0] = bytes((flags,))
    parts += bodies
    payload = b"".join(parts)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise RecordTooLarge(
            f"a batch of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}", limit_bytes=MAX_PAYLOAD_BYTES
        )
    is_compressed = False
    if compress:
        compressed = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(payload)
        is_compressed = len(compressed) < len(payload)  # what can't be made smaller grows, beyond what a broker takes
        if is_compressed:
            payload = compressed
    header = BatchHeader(first_index, count, spans, len(payload), _checksum(payload), is_compressed)
    return EncodedBatch(header, encode_header(header), payload)


def _spans(columns: RecordColumns) -> tuple[tuple[SourceSpan, ...], bytes | None]:
    seqs = columns.seqs
    if isinstance(columns.sources, str):
        first, last = seqs[0], seqs[-1]
        # Consecutive seqs, the usual case, are compared in one go instead of pair by pair, where that isn't plain to see.
        is_consecutive = (isinstance(seqs, range) and seqs.step == 1) or (
            last - first + 1 == len(seqs) and list(seqs) == list(range(first, last + 1))
        )
        if not is_consecutive and any(later <= earlier for earlier, later in pairwise(seqs)):
            raise ValueError(f"seqs of source {columns.sources!r} don't rise")
        if not 0 <= first <= last <= SEQ_MAX:
            raise ValueError(f"seq {first} or {last} is not an unsigned 64-bit number")
        _check_source(columns.sources)
        return (SourceSpan(columns.sources, first, last, len(seqs)),), None
    found: dict[str, SourceSpan] = {}
    for source, seq in zip(columns.sources, seqs, strict=True):
        span = found.get(source)
        if span is None:
            _check_source(source)
            found[source] = SourceSpan(source, seq, seq, 1)
        elif seq <= span.last_seq:
            raise ValueError(f"seqs of source {source!r} don't rise")
        else:
            found[source] = SourceSpan(source, span.first_seq, seq, span.count + 1)
    if len(found) > MAX_SOURCES:
        raise ValueError(f"a batch has at most {MAX_SOURCES} sources")
    spans = tuple(found.values())
    if len(spans) == 1:
        return spans, None
    number = {source: position for position, source in enumerate(found)}
    return spans, bytes([number[source] for source in columns.sources])


def _check_source(source: str) -> None:
    if not 0 < len(source.encode()) <= MAX_SOURCE_BYTES:
        raise ValueError(f"the name of a source has 1 to {MAX_SOURCE_BYTES} bytes: {source!r}")


def _encode_headers(headers: Headers) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        encoded = name.encode()
        parts += (_U16.pack(len(encoded)), encoded, _U32.pack(len(value)), value)
    return b"".join(parts)


def _decode_headers(data: bytes) -> Headers:
    headers = []
    at = 0
    while at < len(data):
        (name_size,) = _U16.unpack_from(data, at)
        at += 2
        name = data[at : at + name_size].decode()
        at += name_size
        (value_size,) = _U32.unpack_from(data, at)
        at += 4
        headers.append((name, data[at : at + value_size]))
        at += value_size
    return tuple(headers)


def decode(batch: EncodedBatch) -> RecordColumns:
    """The records of a batch. Raises MalformedFrame where the payload doesn't hold what the header says."""
    try:
        return _decode(batch)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise MalformedFrame(f"the payload of the batch at index {batch.header.first_index} can't be read") from error


def _decode(batch: EncodedBatch) -> RecordColumns:
    header, payload = batch.header, bytes(batch.payload)
    count = header.count
    if header.is_compressed:
        if zstandard.frame_content_size(payload) > MAX_PAYLOAD_BYTES:  # it would be made room for, whatever the limit
            raise ValueError("a payload that is too large")
        payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=MAX_PAYLOAD_BYTES)
        if not _may_hold(len(payload), count):
            raise ValueError("a column is too short")
    flags = payload[0]
    columns = _ColumnReader(payload, 1)
    spans = header.spans
    if flags & _HAS_SEQS:
        seqs = columns.take("Q", count)
    else:
        seqs = list(range(spans[0].first_seq, spans[0].first_seq + count))
    sources: str | list[str] = spans[0].source
    if flags & _HAS_SOURCES:
        sources = [spans[number].source for number in columns.take("B", count)]
    timestamps = columns.take("q", count) if flags & _HAS_TIMESTAMPS else columns.take("q", 1) * count
    value_sizes = columns.take("I", count)
    key_sizes = columns.take("i", count) if flags & _HAS_KEYS else None
    headers_sizes = columns.take("I", count) if flags & _HAS_HEADERS else None
    values = columns.cut(value_sizes)
    keys: list[bytes | None] | None = None
    if key_sizes is not None:
        bodies = iter(columns.cut([size for size in key_sizes if size >= 0]))
        keys = [None if size < 0 else next(bodies) for size in key_sizes]
    headers = None if headers_sizes is None else [_decode_headers(part) for part in columns.cut(headers_sizes)]
    if columns.at != len(payload):
        raise ValueError("bytes left over")
    return RecordColumns(values, seqs, sources, timestamps, keys, headers)


class _ColumnReader:
    """Takes columns off the front of a payload. Raises ValueError where it is too short."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = payload
        self.at = at

    def take(self, typecode: str, rows: int) -> list[int]:
        column = array(typecode)
        end = self.at + rows * column.itemsize
        column.frombytes(self._payload[self.at : end])
        if len(column) != rows:
            raise ValueError("a column is too short")
        self.at = end
        return column.tolist()

    def cut(self, sizes: Sequence[int]) -> list[bytes]:
        payload = self._payload
        bounds = list(accumulate(sizes, initial=self.at))
        if bounds[-1] > len(payload):
            raise ValueError("a column is too short")
        self.at = bounds[-1]
        return [payload[start:end] for start, end in pairwise(bounds)]
