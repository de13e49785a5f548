"""Lines of a file or of standard input as records.

Reading waits for input and for news alike (a signal, a deposal), so that neither has to wait for a line that may never
come, and no line that was read is lost over it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import NamedTuple

from seriatim.protocol.batch import MAX_PAYLOAD_BYTES, MAX_RECORD_BYTES
from seriatim.protocol.errors import InvalidArgument, RecordTooLarge
from seriatim.protocol.names import SEQ_MAX

_CHUNK_BYTES = 1 << 18
_MAX_LINE_BYTES = MAX_PAYLOAD_BYTES
"""A line may have a seq and a key's separator besides its record, and is no record where it is longer than this."""
_SEQ_DIGITS = len(str(SEQ_MAX))


class Line(NamedTuple):
    """One record's parts; `seq` is None where lines carry none."""

    value: bytes
    key: bytes | None
    seq: int | None


def chunks(descriptor: int, news_descriptor: int) -> Iterator[list[bytes]]:
    """Whole lines without their line ends, as they come, until the input ends.

    An empty list says that `news_descriptor` was readable; what could be read from it is taken. A last line without a
    line end counts as a line at the input's end. Raises RecordTooLarge where no line end comes before a line is too long for
    any record.
    """
    parts: list[bytes] = []  # of a line whose end hasn't come yet
    size_bytes = 0
    whole = 0
    while True:
        readable, _, _ = select.select([descriptor, news_descriptor], [], [])
        if news_descriptor in readable:
            os.read(news_descriptor, _CHUNK_BYTES)
            yield []
            continue
        data = os.read(descriptor, _CHUNK_BYTES)
        if not data:
            if size_bytes:
                yield [b"".join(parts)]
            return
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*parts, lines[0]))
            parts.clear()
            size_bytes = 0
            whole += len(lines)
            yield lines
        parts.append(rest)
        size_bytes += len(rest)
        if size_bytes > _MAX_LINE_BYTES:
            raise RecordTooLarge(
                f"line {whole + 1} has no end after {size_bytes} bytes, a record at most {MAX_RECORD_BYTES}",
                limit_bytes=MAX_RECORD_BYTES,
            )


def parsed(text: bytes, number: int, *, key_separator: bytes | None, has_seq: bool) -> Line:
    """A line's parts: `SEQ<tab>` first where `has_seq`, then `KEY<separator>` where one is given and there.

    Raises InvalidArgument, naming the line, where the seq isn't one.
    """
    seq: int | None = None
    if has_seq:
        front, tab, text = text.partition(b"\t")
        # Python reads no number of more than some thousand digits.
        is_number = front.isdigit() and len(front.lstrip(b"0")) <= _SEQ_DIGITS
        seq = int(front.lstrip(b"0") or b"0") if is_number else SEQ_MAX + 1
        if not tab or seq > SEQ_MAX:
            raise InvalidArgument(f"line {number}: it has to start with its seq, a number, and a tab")
    if key_separator is None:
        return Line(text, None, seq)
    key, separator, value = text.partition(key_separator)
    return Line(value, key, seq) if separator else Line(text, None, seq)
