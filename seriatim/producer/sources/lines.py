"""Lines of a file or of standard input as records.

Reading waits for input and for news alike (a signal, a deposal), so that neither has to wait for a line that may never
come, and no line that was read is lost over it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from typing import NamedTuple

from seriatim.protocol.errors import InvalidArgument
from seriatim.protocol.names import SEQ_MAX

_CHUNK_BYTES = 1 << 18


class Line(NamedTuple):
    """One record's parts; `seq` is None where lines carry none."""

    value: bytes
    key: bytes | None
    seq: int | None


def chunks(descriptor: int, news_descriptor: int) -> Iterator[list[bytes]]:
    """Whole lines without their line ends, as they come, until the input ends.

    An empty list says that `news_descriptor` was readable; what could be read from it is taken. A last line without a
    line end counts as a line at the input's end.
    """
    rest = b""
    while True:
        readable, _, _ = select.select([descriptor, news_descriptor], [], [])
        if news_descriptor in readable:
            os.read(news_descriptor, _CHUNK_BYTES)
            yield []
            continue
        data = os.read(descriptor, _CHUNK_BYTES)
        if not data:
            if rest:
                yield [rest]
            return
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            yield lines


def parsed(text: bytes, number: int, *, key_separator: bytes | None, has_seq: bool) -> Line:
    """A line's parts: `SEQ<tab>` first where `has_seq`, then `KEY<separator>` where one is given and there.

    Raises InvalidArgument, naming the line, where the seq isn't one.
    """
    seq: int | None = None
    if has_seq:
        front, tab, text = text.partition(b"\t")
        if not tab or not front.isdigit() or int(front) > SEQ_MAX:
            raise InvalidArgument(f"line {number}: it has to start with its seq, a number, and a tab")
        seq = int(front)
    if key_separator is None:
        return Line(text, None, seq)
    key, separator, value = text.partition(key_separator)
    return Line(value, key, seq) if separator else Line(text, None, seq)
