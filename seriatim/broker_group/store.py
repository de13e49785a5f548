"""A member's disk: RocksDB, and nothing else of Seriatim imports it; beside it the files of `segments`.

Keys, big-endian so that they sort: `B` queue epoch first-index → the batch, header and payload end to end, or its place in the
link's segment file; `P` queue epoch end-index → committed index, size, hash and marks after that batch; `L` queue epoch → link
record; `S` queue epoch → how far the link's segment file is used; `C` queue epoch subscription → cursor; `M` name → identity of
the disk; `Q` queue → version and content of its newest chain document that was read. A batch, or its place, and its position are one atomic write, and so are an end and the cut that it asks for.

A batch goes to the segment file where it is large and its link is `sync`; elsewhere RocksDB's log is what decides
when it is flushed, and in `memory` whether at all.

How writes become durable without holding up the loop: see `writer` and `log_files`. Reads hold the interpreter lock
for as long as they take, so they are kept short: at most a few batches a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import rocksdict

from seriatim.broker_group import directories, layout
from seriatim.broker_group.core import cursors, link_record, rocksdb_log
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.flush_mark import Flushed, FlushMark
from seriatim.broker_group.layout import StoredPosition
from seriatim.broker_group.log_files import LogFiles
from seriatim.broker_group.segments import SUFFIX, LargeBatch, Place, SegmentFiles
from seriatim.broker_group.writer import Deletion, Done, Write, Writer, ignored, is_the_disk_s, settling
from seriatim.protocol import batch, log
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import BadChecksum, DiskFailed, DiskFull, InvalidArgument, MalformedFrame
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, Index, QueueId, SubscriptionId
from seriatim.protocol.position import START, Position

_log = log.logger("broker.store")

FORMAT: Final = 2
"""Of the directory. 1 had no segment files, and is read."""

SEGMENT_BYTES: Final = 16 * 1024
"""Batches from this size on go to segment files: below it a second file to flush costs more than it saves."""
MOST_BATCHES: Final = 512
"""Of one read: small ones cost some 20 us each, and the interpreter's lock."""
_LAST: Final = Index((1 << 64) - 1)
_OF_RECORDS: Final = (SUFFIX, ".sst", ".blob")
"""The names of the files that hold records end so."""
BLOB_BYTES: Final = 4096
MEMORY_BYTES: Final = 64 * 1024 * 1024
COMPACTION_TRIGGER: Final = 4
"""So many tables of what was written last are put in order together (RocksDB's own number), unless room is short."""
MOST_FORGOTTEN: Final = 5000
"""Links dropped or cut before RocksDB is told to clear away what it notes of that: each read goes through it, and the first behind
a drop puts it in order (5,000 links: 0.3 ms and 4 ms, of the loop; 20,000: 1.4 and 28). Where little is written it keeps that for months.
"""
MOST_FORGOTTEN_BYTES: Final = 4 * MEMORY_BYTES
"""The same, of what lies in RocksDB itself: a queue is deleted to have its room, and where little is written that would stay taken."""
CLEARING_S: Final = 10.0
"""So long it is at that: what it has in memory is written first, beside all else."""
NOTES_BYTES: Final = 8 * 1024 * 1024
"""Of one of RocksDB's own accounts of what it does (LOG): a thousandth of all that is ever written, and no retention lets go of it."""
CHAIN_FLUSH_S: Final = 0.1
"""A copy of a chain is flushed within that, if nothing else is: it matters only where ZooKeeper loses its own."""


class Store:
    """One member's disk. Made by `open_store`; used from the loop's thread.

    `why_no_room`: why `free_bytes` couldn't tell, for people; empty where it could.
    """

    why_no_room = ""

    def __init__(
        self,
        directory: Path,
        database: rocksdict.Rdict,
        segments: SegmentFiles,
        mark: FlushMark,
        lock: int,
        incarnation: Incarnation,
        segment_bytes: int,
    ) -> None:
        self.directory = directory
        self.incarnation = incarnation
        self._database = database
        self._segments = segments
        self._segment_bytes = segment_bytes
        self._lock = lock
        self._forgotten = 1  # what an earlier start was told to forget counts as one
        self._forgotten_bytes = 0
        self._clearing_until_s = 0.0
        self._is_clearing_up = False
        self._logs = LogFiles(directory / "data")
        self._mark = mark
        self._writer = Writer(_Sink(database, self._logs, segments, mark), asyncio.get_running_loop())

    @property
    def failure(self) -> DiskFailed | None:
        """Why nothing is written any more, as long as this process lives; None where all is well."""
        return self._writer.failure

    @property
    def stands_still(self) -> bool:
        """Whether the disk answers nothing, and hasn't for a while."""
        return self._writer.stands_still

    def forget_orphans(self) -> None:
        """Remove the segment files in which no place was ever given, or is any more, after a crash. Raises DiskFailed."""
        try:
            self._segments.keep_only({link for link, _ in self._segments_used()})
        except OSError as error:
            raise DiskFailed(f"can't remove segment files in {self.directory}: {error.strerror}") from error

    def free_bytes(self) -> int:
        """Room for more; none where the disk failed, or can't tell: then it takes no records, which is seen, and goes on being asked."""
        if self.failure is not None:
            return 0
        try:
            found = os.statvfs(self.directory)
        except OSError as error:
            self.why_no_room = f"what room {self.directory} has can't be told: {error.strerror}"
            return 0
        self.why_no_room = ""
        return found.f_bavail * found.f_frsize

    def make_room(self, *, is_short: bool, is_enough_to_copy: bool) -> None:
        """While room is short, or much was forgotten, have RocksDB clear away what it was told to forget, if that has room itself.

        It does that as it writes, and a member that takes no records has next to nothing to write: what retention lets go
        would stay on the disk, and the disk full.
        """
        is_much = self._forgotten >= MOST_FORGOTTEN or self._forgotten_bytes >= MOST_FORGOTTEN_BYTES
        is_due = is_enough_to_copy and (is_much or (is_short and self._forgotten > 0))
        if is_due:
            self._forgotten = self._forgotten_bytes = 0
            self._clearing_until_s = time.monotonic() + CLEARING_S
        is_urgent = is_enough_to_copy and (is_short or time.monotonic() < self._clearing_until_s)
        if is_urgent is self._is_clearing_up and not is_due:
            return
        self._is_clearing_up = is_urgent
        self._writer.submit(Write((), ignored, flush_within_s=None, waits_for_flush=False, clears_up=is_urgent))

    def forget_cached(self) -> None:
        """What was written before is next read from the disk, and not from the system's memory. From any thread; may take seconds."""
        for suffix in _OF_RECORDS:  # of these only: RocksDB's lock ends when anybody here closes its lock file
            for path in self.directory.rglob(f"*{suffix}"):
                with contextlib.suppress(OSError), path.open("rb") as file:  # who reads it meets what is wrong
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    async def close(self) -> None:
        """Finish what was submitted, flush, and let go of the directory. Raises DiskFailed where that can't be done any more."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.close()
        self._logs.close()
        self._mark.close()
        self._segments.close()
        try:
            self._database.close()
        except Exception as error:
            raise DiskFailed(f"the disk failed: {error}") from error
        finally:
            os.close(self._lock)

    # ---- writing

    def append(self, record: LinkRecord, encoded: EncodedBatch, stored: StoredPosition, done: Done) -> None:
        """Write a batch and the position after it. `done` is called with the position's index when it is kept as the link's durability asks."""
        link, position = record.key, stored.position
        durability = record.durability
        flush_s = record.flush_ms / 1000
        key, size_bytes = layout.key(b"B", link, encoded.header.first_index), encoded.size_bytes
        puts: tuple[tuple[bytes, bytes], ...] = (
            (layout.key(b"P", link, position.index), layout.encode_position(stored)),
        )
        large = None
        if durability is Durability.SYNC and size_bytes >= self._segment_bytes:
            large = LargeBatch(link, key, encoded.header_bytes, encoded.payload)
        else:
            puts = ((key, b"".join((encoded.header_bytes, encoded.payload))), *puts)
        self._writer.submit(
            Write(
                puts=puts,
                done=done,
                tag=position.index,
                flush_within_s={Durability.SYNC: 0.0, Durability.MEMORY: None}.get(durability, flush_s),
                waits_for_flush=durability in (Durability.SYNC, Durability.INTERVAL),
                uses_log=durability is not Durability.MEMORY,
                size_bytes=size_bytes,
                batch=large,
            )
        )

    def put_link(self, record: LinkRecord, done: Done) -> None:
        """Write a link's record; `done` when it is flushed, and with it all that was written before."""
        empties_memory = record.is_sealed and record.durability is Durability.MEMORY
        value = link_record.encode(record)
        self._writer.submit(Write(((layout.key(b"L", record.key), value),), done, empties_memory=empties_memory))

    async def keep_link(self, record: LinkRecord) -> None:
        """Write a link's record and wait until it is flushed. Raises DiskFailed."""
        await self._wait(((layout.key(b"L", record.key), link_record.encode(record)),))

    async def keep_cursor(self, link: LinkKey, cursor: CursorRecord) -> None:
        """Write a cursor and wait until it is flushed. Raises DiskFailed."""
        await self._wait(((layout.key(b"C", link, cursor.subscription_id), cursors.encode(cursor)),))

    async def forget_cursors(self, link: LinkKey, of: Collection[SubscriptionId]) -> None:
        """Raises DiskFailed."""
        keys = [layout.key(b"C", link, one) for one in of]
        await self._wait((), tuple(Deletion(key, key + b"\0") for key in keys))
        self._forgotten += len(keys)

    def put_chain(self, queue_id: QueueId, version: ChainVersion, data: bytes) -> None:
        """Keep a copy of a queue's chain; nobody waits for it."""
        puts = ((layout.key(b"Q", (queue_id, Epoch(0))), version.to_bytes(8, "big") + data),)
        self._writer.submit(Write(puts, ignored, flush_within_s=CHAIN_FLUSH_S, waits_for_flush=False))

    async def forget_chain(self, queue_id: QueueId) -> None:
        """Raises DiskFailed."""
        await self._wait((), (Deletion(*layout.all_of(b"Q", (queue_id, Epoch(0)))),))

    async def cut(self, record: LinkRecord, end: Index) -> None:
        """In one write: the record, and no batch or position at or beyond `end`. Raises DiskFailed.

        What of a segment file isn't used any more stays in it, as much as was in flight, unless nothing is kept.
        """
        link = record.key
        deletions = [Deletion(*layout.all_of(b"B", link, end)), Deletion(*layout.all_of(b"P", link, end + 1))]
        if end == 0:
            deletions.append(Deletion(*layout.all_of(b"S", link)))
        puts = ((layout.key(b"L", link), link_record.encode(record)),)
        await self._wait(puts, tuple(deletions), None if end else link)
        self._forgotten += 1

    async def drop(self, link: LinkKey) -> None:
        """Forget a link: batches, positions, cursors and record. Raises DiskFailed."""
        deletions = tuple(Deletion(*layout.all_of(kind, link)) for kind in (b"B", b"P", b"C", b"L", b"S"))
        size_bytes = 0
        with contextlib.suppress(DiskFailed):  # what can't be read can be forgotten all the same
            size_bytes = max(0, self.last_position(link).size_bytes - self._segments.size_bytes(link))
        await self._wait((), deletions, link)
        self._forgotten += 1
        self._forgotten_bytes += size_bytes

    async def flushed(self) -> None:
        """Wait until all that was written before is flushed. Raises DiskFailed."""
        await self._wait(())

    async def _wait(
        self,
        puts: tuple[tuple[bytes, bytes], ...],
        deletions: tuple[Deletion, ...] = (),
        empties: LinkKey | None = None,
    ) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer.submit(Write(puts, settling(future), deletions=deletions, empties=empties))
        await future

    # ---- reading; each raises DiskFailed where the disk can't be read

    def links(self) -> list[LinkRecord]:
        """Every link's record."""
        return [link_record.decode(value) for _, value in self._scan(b"L", b"M")]

    def chains(self) -> Iterator[tuple[QueueId, ChainVersion, bytes]]:
        """The chains that are kept, by rising queue."""
        for key, value in self._scan(b"Q", b"R"):
            yield layout.link_of(key)[0], *_kept_chain(value)

    def chain(self, queue_id: QueueId) -> tuple[ChainVersion, bytes] | None:
        """The one that is kept of this queue."""
        value = self._get(layout.key(b"Q", (queue_id, Epoch(0))))
        return None if value is None else _kept_chain(value)

    def cursors(self, link: LinkKey) -> list[CursorRecord]:
        return [cursors.decode(value) for _, value in self._scan(*layout.all_of(b"C", link))]

    def last_position(self, link: LinkKey) -> StoredPosition:
        """After the link's last batch; START for none."""
        return self.position_before(link, _LAST)

    def position_before(self, link: LinkKey, index: Index) -> StoredPosition:
        """The last position at or before `index`."""
        found = self._seek_back(layout.key(b"P", link, index), layout.key(b"P", link))
        return StoredPosition(START, Index(0), 0) if found is None else layout.decode_position(*found)

    def position_at(self, link: LinkKey, index: Index) -> Position | None:
        """The position at exactly `index`; None where no batch ends there."""
        if index == 0:
            return START
        value = self._get(layout.key(b"P", link, index))
        return None if value is None else layout.decode_position(layout.key(b"P", link, index), value).position

    def positions(self, link: LinkKey, after: Index) -> list[Position]:
        """All positions behind `after`, in rising order."""
        found = self._scan(*layout.all_of(b"P", link, after + 1))
        return [layout.decode_position(key, value).position for key, value in found]

    def position_behind(self, link: LinkKey, index: Index) -> Position | None:
        """The first position behind `index`; None for none. One read, however long the link is."""
        found = next(self._scan(*layout.all_of(b"P", link, index + 1)), None)
        return None if found is None else layout.decode_position(*found).position

    def batches(self, link: LinkKey, from_index: Index, end: Index, limit_bytes: int) -> list[EncodedBatch]:
        """Batches from the one that holds `from_index` on, all below `end`, until `limit_bytes` or MOST_BATCHES are reached (at least one).

        Raises BadChecksum where one was damaged; what comes before it is given first, so the next call raises. Raises it
        also where batches are missing: what the positions promise can't be absent (never *not there* of something
        that can't be read).
        """
        if from_index >= end:
            return []
        start = self.position_before(link, from_index).position.index
        found: list[EncodedBatch] = []
        size_bytes, expected = 0, int(start)
        for key, value in self._scan(layout.key(b"B", link, start), layout.key(b"B", link, end)):
            index = layout.number_of(key)
            try:
                encoded = batch.parse(*self._parts(link, value))
                _check_place(encoded, index, expected)
            except (BadChecksum, MalformedFrame) as error:
                if found:
                    return found
                raise BadChecksum(
                    f"the batch at index {expected} is damaged on this disk: {error.message}",
                    epoch=link[1],
                    index=expected,
                ) from error
            found.append(encoded)
            expected = encoded.header.end_index
            size_bytes += encoded.size_bytes
            if size_bytes >= limit_bytes or len(found) == MOST_BATCHES:
                if (place := Place.of(value)) is not None:  # who reads so much reads on
                    self._segments.read_ahead(link, place.end)
                break
        if not found:
            raise BadChecksum(
                f"the batch at index {expected} can't be found on this disk", epoch=link[1], index=expected
            )
        return found

    def _parts(self, link: LinkKey, value: bytes) -> tuple[bytes, bytes]:
        """Header and payload of a stored batch. Raises BadChecksum or MalformedFrame where its bytes can't be had."""
        place = Place.of(value)
        if place is None:
            return batch.split(value)
        found = self._segments.read(link, place)
        if found is None:
            raise BadChecksum("its bytes aren't where they were written")
        return found

    def lost(self) -> list[tuple[LinkKey, Index]]:
        """Batches that are surely gone: their place is beyond what there is of the link's segment file.

        All others are checked when they are read.
        """
        found: list[tuple[LinkKey, Index]] = []
        for link, used_bytes in self._segments_used():
            size_bytes = self._segments.size_bytes(link)
            if size_bytes >= used_bytes:
                continue
            for batch_key, stored in self._scan(*layout.all_of(b"B", link)):
                if (place := Place.of(stored)) is not None and place.end > size_bytes:
                    found.append((link, layout.number_of(batch_key)))
        return found

    def _segments_used(self) -> Iterator[tuple[LinkKey, int]]:
        """How far the segment file of each link that has one is used."""
        for key, value in self._scan(b"S", b"T"):
            yield layout.link_of(key), int.from_bytes(value, "big")

    def repair(self, link: LinkKey, encoded: EncodedBatch) -> None:
        """Write a batch again, as the peer has it; its position is there already."""
        value = b"".join((encoded.header_bytes, encoded.payload))
        key = layout.key(b"B", link, encoded.header.first_index)
        self._writer.submit(Write(((key, value),), ignored, size_bytes=len(value)))

    def _get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = self._database.get(key)
        except Exception as error:
            raise DiskFailed(f"the disk can't be read: {error}") from error
        return value

    def _scan(self, first: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        # The library encodes the bounds of its read options even in raw mode, so the range is watched here.
        try:
            found = self._database.iter()
            found.seek(first)
            while found.valid():
                key = found.key()
                if key >= end:
                    break
                yield key, found.value()
                found.next()
            found.status()
        except Exception as error:
            raise DiskFailed(f"the disk can't be read: {error}") from error

    def _seek_back(self, key: bytes, first: bytes) -> tuple[bytes, bytes] | None:
        try:
            found = self._database.iter()
            found.seek_for_prev(key)
            pair = (found.key(), found.value()) if found.valid() and found.key() >= first else None
            found.status()
        except Exception as error:
            raise DiskFailed(f"the disk can't be read: {error}") from error
        return pair


def _check_place(encoded: EncodedBatch, index: int, expected: int) -> None:
    if index != expected or encoded.header.first_index != index:
        raise BadChecksum(f"another batch is in the place of the one at index {expected}")


def _kept_chain(value: bytes) -> tuple[ChainVersion, bytes]:
    return ChainVersion(int.from_bytes(value[:8], "big")), value[8:]


class _Sink:
    """RocksDB, as the writer's thread sees it."""

    def __init__(self, database: rocksdict.Rdict, logs: LogFiles, segments: SegmentFiles, mark: FlushMark) -> None:
        self._database = database
        self._logs = logs
        self._segments = segments
        self._mark = mark
        self._logged = database.latest_sequence_number()  # what isn't logged behind that may be lost with the process
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment] # the stub calls it a method

    def placed(self, writes: Sequence[Write]) -> list[Write]:
        large = [write.batch for write in writes if write.batch is not None]
        if not large:
            return list(writes)
        places = iter(self._segments.append(large))
        self._segments.sync()
        found = []
        for write in writes:
            one = write
            if write.batch is not None:
                place = next(places)
                used = (layout.key(b"S", write.batch.link), place.end.to_bytes(8, "big"))
                one = replace(write, puts=((write.batch.key, place.encode()), *write.puts, used))
            found.append(one)
        return found

    def write(self, writes: Sequence[Write], *, uses_log: bool) -> None:
        changes = rocksdict.WriteBatch(raw_mode=True)
        for write in writes:
            for deletion in write.deletions:
                changes.delete_range(deletion.first, deletion.end)
            for key, value in write.puts:
                changes.put(key, value)
        self._database.write(changes, None if uses_log else self._unlogged)
        if uses_log:
            self._logged = self._database.latest_sequence_number()
            self._logs.wrote()

    def flush(self) -> None:
        self._logs.sync()
        self._mark.keep(self._logged, self._logs.flushed)

    def empty_memory(self) -> None:
        self._database.flush(True)

    def clear_up(self, *, is_urgent: bool) -> None:
        trigger = 1 if is_urgent else COMPACTION_TRIGGER
        with contextlib.suppress(Exception):  # the next write meets what is wrong
            self._database.set_options({"level0_file_num_compaction_trigger": str(trigger)})
            if is_urgent:
                self._database.flush(False)

    def remove_segments(self, link: LinkKey) -> None:
        self._segments.remove(link)


def open_store(directory: Path, place: str, segment_bytes: int = SEGMENT_BYTES) -> Store:
    """Open a member's directory, making it where it isn't there, and begin a new start on it.

    `place`: cluster, group and member; a directory serves one place for ever. The start is on disk before anything else
    is done. `segment_bytes`: batches from this size on go to segment files. Raises InvalidArgument where another process
    has it, or where it belongs to another place or a newer version; DiskFailed where it can't be read, DiskFull where that needs more room.
    """
    try:
        directories.make(directory)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InvalidArgument(f"can't use the directory {directory}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise InvalidArgument(f"another broker runs on the directory {directory}") from error
        raise InvalidArgument(f"can't lock the directory {directory}: {error.strerror}") from error
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock)
        try:
            mark = FlushMark(directory)
            held.callback(mark.close)
            _check_is_whole(directory, mark.before)
            _cut_torn(directory / "data", mark.before)
            database = rocksdict.Rdict(str(directory / "data"), _options())
        except DiskFailed:
            raise
        except Exception as error:
            raise _not_opened(directory, error) from error
        held.callback(_closed, database)
        try:
            found = database.get(b"Midentity")
            _check_is_all(directory, database.latest_sequence_number(), mark.before.number, is_named=found is not None)
            new = {"disk_id": uuid.uuid4().hex, "start": 0, "place": place}
            identity: dict[str, Any] = json.loads(found) if found else new
            _check_identity(directory, identity, place)
            identity |= {"start": identity["start"] + 1, "format": FORMAT}
            synced = rocksdict.WriteOptions()
            synced.sync = True
            database.put(b"Midentity", json.dumps(identity).encode(), synced)
            mark.keep(database.latest_sequence_number(), {})
            incarnation = Incarnation(identity["disk_id"], identity["start"])
            store = Store(directory, database, _segments(directory), mark, lock, incarnation, segment_bytes)
            store.forget_orphans()
        except Exception as error:
            if is_the_disk_s(error):
                raise _not_opened(directory, error) from error
            raise
        held.pop_all()
    return store


def _closed(database: rocksdict.Rdict) -> None:
    """What it says then, it said before."""
    with contextlib.suppress(Exception):
        database.close()


def _not_opened(directory: Path, error: Exception) -> DiskFailed | DiskFull:
    """Where only room is missing nothing is damaged: nobody is to be sent for an empty directory."""
    is_full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
    kind = DiskFull if is_full else DiskFailed
    return kind(f"can't open the data in {directory}: {error}")


def _check_is_whole(directory: Path, flushed: Flushed) -> None:
    """What was never a database is made one, but not beside the records of one: it would be a blank disk, and remove them. Raises DiskFailed.

    Nor is one opened without its log, as RocksDB would, or without a part of it that RocksDB would pass over: what was written
    last, and acknowledged, would never have been. Who clears away log files by their names takes it for one of those; there
    is always one.
    """
    data = directory / "data"
    if not (data / "CURRENT").exists() and (flushed.number or any(directory.glob(f"segments/*{SUFFIX}"))):
        raise DiskFailed(f"{directory} held records, and in data/ is nothing that names them: is it mounted?")
    logs = sorted(data.glob("*.log"))
    if any(data.glob("*.sst")) and not logs:
        raise DiskFailed(
            f"{data} holds tables, and not the log (*.log) with what was written behind them: was it deleted?"
        )
    for path in (*data.glob("MANIFEST-*"), *logs):
        flushed_bytes = flushed.logs.get(int(path.stem), 0) if path.suffix == ".log" else 0
        at = rocksdb_log.damage(path.read_bytes(), flushed_bytes)
        if at is not None:
            raise DiskFailed(f"can't open the data in {directory}: Corruption: {path.name} is damaged at byte {at}")


def _cut_torn(data: Path, flushed: Flushed) -> None:
    """Cut off what power failed amid, where that has its length and not its bytes: the last log that holds anything may end so. Raises OSError."""
    for path in sorted(data.glob("*.log"), key=lambda path: int(path.stem), reverse=True):
        content = path.read_bytes()
        if not any(content):
            continue
        at = rocksdb_log.torn(content, flushed.logs.get(int(path.stem), 0))
        if at is not None:
            with path.open("r+b") as file:
                file.truncate(at)
                os.fsync(file.fileno())
            _log.warning("a torn end of the log was cut off", file=path.name, at=at, bytes=len(content) - at)
        return


def _check_is_all(directory: Path, found: int, flushed: int, *, is_named: bool) -> None:
    """Raises DiskFailed where less was recovered than had been flushed, as far as that is seen."""
    if found < flushed:
        raise DiskFailed(
            f"can't open the data in {directory}: Corruption: {flushed - found} of {flushed} changes are missing that were flushed: "
            "the end of its log (*.log), or of MANIFEST, was cut off"
        )
    if flushed and not is_named:
        raise DiskFailed(f"can't open the data in {directory}: Corruption: what names this disk is missing")


def _check_identity(directory: Path, identity: dict[str, Any], place: str) -> None:
    if identity["place"] != place:
        raise InvalidArgument(f"the directory {directory} belongs to {identity['place']}, not to {place}")
    if identity.get("format", 1) > FORMAT:
        raise InvalidArgument(
            f"the directory {directory} has format {identity['format']}, and this version knows none above {FORMAT}: "
            "start the version that wrote it, or a newer one"
        )


def _segments(directory: Path) -> SegmentFiles:
    try:
        return SegmentFiles(directory / "segments")
    except OSError as error:
        raise DiskFailed(f"can't open the segment files in {directory}: {error.strerror}") from error


def _options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_enable_blob_files(True)
    options.set_min_blob_size(BLOB_BYTES)
    options.set_blob_file_size(256 * 1024 * 1024)
    options.set_enable_blob_gc(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_write_buffer_size(MEMORY_BYTES)
    options.set_level_zero_file_num_compaction_trigger(COMPACTION_TRIGGER)
    options.set_max_write_buffer_number(4)
    options.set_recycle_log_file_num(0)
    # A torn tail was never confirmed; anything else that can't be read must stop the start, not shorten a link silently: what RocksDB
    # takes for a torn tail and is none, or for none and is one, `rocksdb_log` and `flush_mark` find.
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_max_open_files(512)
    options.set_keep_log_file_num(3)
    options.set_max_log_file_size(NOTES_BYTES)
    return options
