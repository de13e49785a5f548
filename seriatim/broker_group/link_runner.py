"""One link on this member, at run time: feeds events to the replica core and runs the effects that it orders.

All of it runs on the loop; a step and its effects are never interrupted, so what the core says in order happens in order.
An idle link has no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol, assert_never

from seriatim.broker_group.batch_cache import BatchCache
from seriatim.broker_group.core import replica, replica_events
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord, Role
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.broker_group.core.resync import Holding
from seriatim.broker_group.layout import StoredPosition
from seriatim.broker_group.store import Store
from seriatim.broker_group.writer import settling
from seriatim.protocol import log
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import DiskFailed, OlderVersion, SeriatimError, UnknownLink, copied
from seriatim.protocol.hashing import hash_after_batch
from seriatim.protocol.names import ChainVersion, Index
from seriatim.protocol.position import Position

_log = log.logger("broker.link")

FLIGHT_BYTES: Final = 16 * 1024 * 1024
FLIGHT_BATCHES: Final = 512
"""Bounds of what one link may have taken and not committed; beyond them its stream isn't read."""
MEMBER_FLIGHT_BYTES: Final = 512 * 1024 * 1024
"""The same of all links of a member together: beyond it none is read that has something in flight. So each still gets on, a batch
at a time, and a disk that stands still under a thousand of them doesn't fill the memory.
"""

REST_S: Final = 1.0
"""So long after its sender has left a link keeps the stream to its slave: a thousand links that nobody sends to would keep a
thousand, and lose them all at once."""


class Sender(Protocol):
    """The stream that brings a link's batches: from the sender on the master, from the master on the slave."""

    def acknowledge(self, index: Index) -> None: ...

    def confirm(self, index: Index, digest: bytes) -> None: ...

    def end(self, error: SeriatimError) -> None: ...


class SlaveLink(Protocol):
    """The master's stream to the slave."""

    def forward(self, encoded: EncodedBatch) -> None: ...

    def tell_committed(self, index: Index) -> None: ...

    def end(self, error: SeriatimError) -> None: ...

    def let_go(self) -> None: ...


class Flight:
    """What all links of a member have taken and not committed."""

    def __init__(self) -> None:
        self.size_bytes = 0


class LinkRunner:
    """See the module. `source` is the stream that brings batches, `slave` the one that passes them on, if there is one."""

    def __init__(self, record: LinkRecord, store: Store, cache: BatchCache, of_all: Flight) -> None:
        self._store = store
        self._cache = cache
        self._of_all = of_all
        self._changed: asyncio.Event | None = None
        self._flight_bytes: dict[Index, int] = {}
        self._kept: asyncio.Future[None] | None = None
        self._holding: Holding | None = None
        self.flight_bytes = 0
        self.size_bytes = 0
        self.source: Sender | None = None
        self._left_at_s = 0.0
        self._rest: asyncio.TimerHandle | None = None
        self.slave: SlaveLink | None = None
        self.readers: dict[Callable[[], None], None] = {}  # a set in the order in which they came
        self._committed_learnt = Index(0)
        self.seal_failure: DiskFailed | None = None
        self.is_let_go = False
        self.state = self._loaded(record)

    def _loaded(self, record: LinkRecord) -> Replica:
        link = record.key
        last = self._store.last_position(link)
        self.size_bytes = last.size_bytes
        committed = self._store.position_before(link, last.committed_index).position
        flight = tuple(self._store.positions(link, committed.index))
        tail = flight[-1] if flight else committed
        phase = SealPhase.SEALED if record.is_sealed else SealPhase.OPEN
        return Replica(record, committed, tail.index, tail, Index(0), flight, phase=phase)

    def reload(self, record: LinkRecord) -> None:
        """The disk was changed beneath a sealed link (cut, or copied from the peer): start from what it has now."""
        self._cache.forget(record.key)
        self._holding = None
        self.state = self._loaded(record)
        self._tell_change()

    @property
    def record(self) -> LinkRecord:
        return self.state.record

    @property
    def key(self) -> LinkKey:
        return self.state.record.key

    @property
    def readable_end(self) -> Index:
        """Readers may have what is below: what is known to be committed, or all up to a recorded end."""
        record = self.record
        if record.end is not None:
            return Index(min(record.end, self.state.durable))
        return self.state.committed.index

    @property
    def is_readable_end_known(self) -> bool:
        """Whether `readable_end` is all there is: not behind a seal without an end, nor where records are still to be copied."""
        end = self.record.end
        return self.state.phase is SealPhase.OPEN if end is None else self.state.durable >= end

    @property
    def is_left_unsure(self) -> bool:
        """A slave that has records of which nobody has told it whether they are committed, nor is there to do so, since REST_S."""
        is_unsure = self.record.role is Role.SLAVE and self.state.phase is SealPhase.OPEN and bool(self.state.flight)
        return is_unsure and self.source is None and asyncio.get_running_loop().time() >= self._left_at_s + REST_S

    @property
    def is_quiet(self) -> bool:
        """Nothing taken waits for the disk."""
        return self.state.durable == self.state.tail.index

    @property
    def is_full(self) -> bool:
        """A bound on what is in flight is reached."""
        if self.flight_bytes >= FLIGHT_BYTES or len(self.state.flight) >= FLIGHT_BATCHES:
            return True
        return self.flight_bytes > 0 and self._of_all.size_bytes >= MEMBER_FLIGHT_BYTES

    def holding(self) -> Holding:
        """What the disk has, for resync; read once, as long as neither record nor records change. Raises DiskFailed."""
        record, durable, known = self.record, self.state.durable, self._holding
        if known is not None and known.record is record and known.next_index == durable:
            return known
        hash_at_end: bytes | None = None
        if record.end is not None:
            position = self._store.position_at(record.key, record.end)
            hash_at_end = None if position is None else position.hash
        self._holding = Holding(record, durable, hash_at_end)
        return self._holding

    def hash_at(self, index: Index) -> bytes | None:
        """Running hash at `index`; None where no batch ends there. Raises DiskFailed."""
        position = self.position_at(index)
        return None if position is None else position.hash

    def position_at(self, index: Index) -> Position | None:
        return replica.position_at(self.state, index) or self._store.position_at(self.key, index)

    def is_here(self, encoded: EncodedBatch, index: Index) -> bool:
        """Whether a batch, wherever its bytes are from, is the one that was stored at `index`, by the link's hashes. Raises DiskFailed."""
        before, header = self.hash_at(index), encoded.header
        if header.first_index != index or before is None:
            return False
        return hash_after_batch(before, encoded.header_bytes) == self.hash_at(header.end_index)

    # ---- streams

    def attach(self, source: Sender) -> None:
        """From now on this stream brings batches, and no other."""
        former, self.source = self.source, source
        if former is not None:
            former.end(OlderVersion("another stream was opened for this link", epoch=self.record.epoch))

    def detach(self, source: Sender) -> None:
        """The stream is at its end."""
        if self.source is source:
            self.source = None
            self._left_at_s = asyncio.get_running_loop().time()
            self.rest_soon()

    def slave_ended(self, slave: SlaveLink, reason: str) -> None:
        """The stream to the slave is at its end; whoever waits for it to be ready is told, too."""
        if self.slave is slave:
            self.slave = None
            self.apply(replica_events.PeerGone(reason))
            self._tell_change()

    def rest_soon(self) -> None:
        """Let the stream to the slave go, unless somebody sends within REST_S."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = None
        if self.slave is not None and self.source is None:
            self._rest = asyncio.get_running_loop().call_later(REST_S, self._rest_now)

    def _rest_now(self) -> None:
        self._rest = None
        if self.source is None:
            self.apply(replica_events.SenderAway())
            if self.state.flight:  # its sender left while the slave was slow
                self.rest_soon()

    # ---- events

    def apply(self, event: replica_events.Event, encoded: EncodedBatch | None = None) -> SeriatimError | None:
        """Step and run the effects. Returns the error with which the event was refused. `encoded`: the batch that it tells of, if any."""
        before = self.state
        self.state, effects = replica.step(before, event)
        refused: SeriatimError | None = None
        for effect in effects:
            if isinstance(effect, replica_events.Refuse):
                refused = effect.error
            else:
                self._run(effect, encoded)
        if self._flight_bytes and self.state.phase is SealPhase.SEALED:
            self._forget_flight()
        if self.state is not before:
            self._tell_change()
        return refused

    def _run(self, effect: replica_events.Effect, encoded: EncodedBatch | None) -> None:  # noqa: C901, PLR0912 - a table
        source, slave = self.source, self.slave
        match effect:
            case replica_events.Forward():
                if slave is not None and encoded is not None:
                    slave.forward(encoded)
            case replica_events.Store():
                if encoded is not None:
                    self._store_batch(effect, encoded)
            case replica_events.Acknowledge(index):
                if source is not None:
                    source.acknowledge(index)
            case replica_events.Confirm(index, digest):
                if source is not None:
                    source.confirm(index, digest)
            case replica_events.TellCommitted(index):
                if slave is not None:
                    slave.tell_committed(index)
            case replica_events.PushCommitted(index):
                self._committed(index)
            case replica_events.EndStreams(error):
                self._end_streams(error)
            case replica_events.DropPeer(error):
                if slave is not None:
                    slave.end(error)
            case replica_events.LetPeerGo():
                self._let_slave_go()
            case replica_events.KeepRecord(record):
                self.keep(record)
            case replica_events.WriteSeal(record):
                if not self.is_let_go:  # it would be left on the disk, behind the deletion
                    self._store.put_link(record, self._seal_written)
            case replica_events.Refuse():
                pass  # it is returned
            case _:
                assert_never(effect)

    def _let_slave_go(self) -> None:
        slave, self.slave = self.slave, None
        if slave is not None:
            _log.info("slave let go, nobody sends", **self.record.named)
            slave.let_go()

    def _store_batch(self, effect: replica_events.Store, encoded: EncodedBatch) -> None:
        index = effect.position.index
        self._flight_bytes[index] = encoded.size_bytes
        self._count(encoded.size_bytes)
        self._cache.add(self.key, encoded)
        self.size_bytes += encoded.size_bytes
        stored = StoredPosition(effect.position, effect.committed_index, self.size_bytes)
        self._store.append(self.record, encoded, stored, self._flushed)

    def _flushed(self, index: int, error: DiskFailed | None) -> None:
        if error is None:
            self.apply(replica_events.Flushed(Index(index)))
            if self._committed_learnt > self.state.committed.index:
                self.apply(replica_events.CommittedLearnt(self._committed_learnt))
        else:
            self.apply(replica_events.WriteFailed(error.message))

    def _seal_written(self, _: int, error: DiskFailed | None) -> None:
        if error is None:
            self.apply(replica_events.SealWritten())
            _log.info("link sealed", **self.record.named, next_index=self.state.durable)
        else:
            self.seal_failure = error
            self._tell_change()
            _log.error("seal can't be written", **self.record.named, reason=error)

    def _committed(self, index: Index) -> None:
        sizes = self._flight_bytes
        for passed in [position for position in sizes if position <= index]:
            self._count(-sizes.pop(passed))
        self.wake_readers()

    def wake_readers(self) -> None:
        """What they may have, or may be, has changed."""
        for wake in self.readers:
            wake()

    def _forget_flight(self) -> None:
        """Nothing of it is on its way any more, and nobody will say that it is committed."""
        self._flight_bytes.clear()
        self._count(-self.flight_bytes)

    def _count(self, size_bytes: int) -> None:
        self.flight_bytes += size_bytes
        self._of_all.size_bytes += size_bytes

    def _end_streams(self, error: SeriatimError) -> None:
        source, self.source = self.source, None
        if source is not None:
            source.end(error)
        if self.slave is not None:
            self.slave.end(error)

    def keep(self, record: LinkRecord) -> None:
        """Write the link's record; `kept` waits for it. What the link takes after this is behind it on the disk."""
        self._kept = asyncio.get_running_loop().create_future()
        self._store.put_link(record, settling(self._kept))

    def learn_committed(self, index: Index) -> None:
        """Slave: the master says what is committed; what isn't durable here yet counts when it is."""
        self._committed_learnt = max(index, self._committed_learnt)
        self.apply(replica_events.CommittedLearnt(self._committed_learnt))

    # ---- waiting

    async def kept(self) -> None:
        """Wait until the record that a step asked to keep is on disk. Raises DiskFailed."""
        if self._kept is not None:
            await asyncio.shield(self._kept)

    def _tell_change(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def until(self, claim: Callable[[], bool]) -> None:
        """Wait until `claim` holds; it is looked at after each step. The caller sets the deadline."""
        while not claim():
            if self._changed is None:
                self._changed = asyncio.Event()
            await self._changed.wait()

    async def sealed(self, chain_version: ChainVersion) -> SeriatimError | None:
        """Seal, and wait until the seal is on disk. Returns the error with which it was refused."""
        refused = self.apply(replica_events.SealAsked(chain_version))
        if refused is not None:
            return refused
        await self.until(
            lambda: self.state.phase is SealPhase.SEALED or self.seal_failure is not None or self.is_let_go
        )
        if self.is_let_go:
            return no_longer_kept(self.key)
        return None if self.seal_failure is None else copied(self.seal_failure)

    def apply_drop(self) -> None:
        """The link is being forgotten: end its streams, wake its readers, and whoever waits for its seal."""
        self.is_let_go = True
        self._forget_flight()
        self._end_streams(no_longer_kept(self.key))
        self._tell_change()
        self.wake_readers()

    def changed_record(self, record: LinkRecord) -> None:
        """What was written of the link beside the replica's own steps: end, cursors."""
        self.state = replace(self.state, record=record)
        self._tell_change()
        self.wake_readers()


def no_longer_kept(key: LinkKey) -> UnknownLink:
    """For whoever asks something of a link that was let go."""
    return UnknownLink("this link is no longer kept", queue_id=key[0], epoch=key[1])
