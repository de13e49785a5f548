"""The newest batches in memory: found by where they start, bounded by what they take."""

from __future__ import annotations

from seriatim.broker_group.batch_cache import BESIDE_BYTES, BatchCache
from seriatim.protocol import batch
from seriatim.protocol.batch import EncodedBatch, RecordColumns
from seriatim.protocol.names import Epoch, Index, QueueId

LINK = (QueueId(1), Epoch(1))
NEXT = (QueueId(1), Epoch(2))


def one_record(index: int) -> EncodedBatch:
    return batch.encode(RecordColumns([b"x" * 100], [index], "producer", [0]), Index(index))


def test_small_batches_count_with_their_objects_and_the_oldest_goes_first() -> None:
    size_bytes = one_record(0).size_bytes
    cache = BatchCache(3 * (size_bytes + BESIDE_BYTES))
    for index in range(10):
        cache.add(LINK, one_record(index))
    assert [index for index in range(10) if cache.get(LINK, Index(index))] == [7, 8, 9]
    cache.add(NEXT, one_record(0))
    assert cache.get(LINK, Index(7)) is None
    assert cache.get(NEXT, Index(0)) is not None


def test_what_is_larger_than_all_of_it_isn_t_kept() -> None:
    cache = BatchCache(BESIDE_BYTES)
    cache.add(LINK, one_record(0))
    assert cache.get(LINK, Index(0)) is None


def test_a_link_is_forgotten_and_another_batch_at_the_same_index_outlives_the_one_before() -> None:
    cache = BatchCache(2 * (one_record(0).size_bytes + BESIDE_BYTES))
    cache.add(LINK, one_record(0))
    cache.forget(LINK)
    assert cache.get(LINK, Index(0)) is None
    again = one_record(0)
    cache.add(LINK, again)
    cache.add(NEXT, one_record(0))  # the one before goes, which nobody finds any more
    assert cache.get(LINK, Index(0)) is again
