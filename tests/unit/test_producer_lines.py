"""Lines as records: what is no line, and what is no seq."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from seriatim.producer.sources.lines import Line, chunks, parsed
from seriatim.protocol import errors
from seriatim.protocol.batch import MAX_PAYLOAD_BYTES, MAX_RECORD_BYTES


@contextmanager
def given(*parts: bytes) -> Iterator[Iterator[list[bytes]]]:
    """Chunks of what a pipe is given part by part, by a thread."""
    reading, writing = os.pipe()
    news_reading, news_writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe:
            try:
                for part in parts:
                    pipe.write(part)
                pipe.flush()
            except BrokenPipeError:
                pass

    thread = threading.Thread(target=write)
    thread.start()
    yield chunks(reading, news_reading)
    for descriptor in (reading, news_reading, news_writing):
        os.close(descriptor)
    thread.join()


def test_a_line_that_no_record_can_hold_is_refused_before_it_ends_and_those_before_it_are_given() -> None:
    with given(b"one\n", b"two\n", b"x" * (4 * MAX_PAYLOAD_BYTES)) as lines:
        assert next(lines) == [b"one", b"two"] or next(lines) == [b"two"]
        with pytest.raises(errors.RecordTooLarge, match="line 3 has no end"):
            next(lines)


def test_a_line_as_long_as_a_record_comes_whole_at_a_cost_that_rises_with_its_length() -> None:
    large = b"1\t" + b"x" * MAX_RECORD_BYTES
    with given(large, b"\nlast") as lines:
        began_s = time.thread_time()
        assert [line for one in lines for line in one] == [large, b"last"]
        assert time.thread_time() - began_s < 2


def test_a_seq_of_any_number_of_digits_is_a_seq_or_refused() -> None:
    refused = ("1" * 5000, "1" * 21, str(2**64), "")
    for front in refused:
        with pytest.raises(errors.InvalidArgument, match="line 3: it has to start with its seq"):
            parsed(front.encode() + b"\tv", 3, key_separator=None, has_seq=True)
    for front, seq in (("0" * 5000 + "12", 12), ("0" * 5000, 0), (str(2**64 - 1), 2**64 - 1)):
        assert parsed(front.encode() + b"\tv", 1, key_separator=None, has_seq=True) == Line(b"v", None, seq)
