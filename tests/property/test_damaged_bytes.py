"""Whatever bytes come, they are a message, or a typed error: never another exception, and no memory for what they only say."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from seriatim.protocol import chain, chain_json, errors
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.batch_streams import APPEND, COPY, FETCH, REPLICATE, BatchMessage
from seriatim.protocol.checksums import without_checksum
from seriatim.protocol.errors import IncompatibleVersion, MalformedFrame, SeriatimError
from seriatim.protocol.names import Epoch, Incarnation, Index, Offset, QueueId
from seriatim.protocol.nodes import _NOT_READ
from seriatim.protocol.registration import CoordinatorRegistration, Registration

SPARE_BYTES = 4 * 1024 * 1024
BATCHES = [
    encode(RecordColumns([b"x" * 40] * 3, range(first, first + 3), "orders", [7] * 3), Index(first)) for first in (0, 3)
]
QUEUE = chain.ChainDocument(
    "c", QueueId(1), "q", chain.QueueSettings(), 1, chain.Dropped(Epoch(0), Offset(0), bytes(32), {}, {})
)
REGISTERED = Registration(Incarnation("d", 3), "10.0.0.1:7100")


def batches_in(codec: Any) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        found = codec.parse(data)
        if isinstance(found, BatchMessage):
            found.batches()

    return read


READERS: list[tuple[str, bytes, Callable[[bytes], Any], tuple[type[Exception], ...]]] = [
    *(
        (type(message).__name__, codec.serialize(message), batches_in(codec), (DecodeError, SeriatimError))
        for codec in (APPEND, REPLICATE, COPY, FETCH)
        for message in (BatchMessage.of_several(BATCHES), pb.FetchReply(committed_index=5))
    ),
    (
        "error",
        errors.to_wire(errors.WrongIndex("m", next_index=5)).encode(),
        lambda data: errors.from_wire(data.decode(errors="replace")),
        (MalformedFrame,),
    ),
    ("chain", chain_json.encode(QUEUE), chain_json.decode, (IncompatibleVersion,)),
    ("registration", REGISTERED.encode(), Registration.decode, _NOT_READ),
    ("coordinator", CoordinatorRegistration("a:1").encode(), CoordinatorRegistration.decode, _NOT_READ),
    ("message", b"", without_checksum, (DecodeError,)),
]


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SPARE_BYTES
    finally:
        tracemalloc.stop()


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """As it was written, but for some bytes that are others, are missing, or came twice; or nothing of it."""
    if not data or draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(changed)))
        size = draw(st.integers(0, 12))
        changed[at : at + size] = draw(st.one_of(st.binary(max_size=12), st.just(bytes(changed[at : at + 2 * size]))))
    return bytes(changed)


@pytest.mark.parametrize(("written", "read", "told"), [one[1:] for one in READERS], ids=[one[0] for one in READERS])
@given(data=st.data())
@settings(max_examples=80)
def test_whatever_bytes_come_they_are_read_or_refused(
    data: st.DataObject, written: bytes, read: Callable[[bytes], Any], told: tuple[type[Exception], ...]
) -> None:
    came = data.draw(damaged(written))
    with little_memory(), contextlib.suppress(*told):
        read(came)
