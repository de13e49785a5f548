"""Two replicas and the stream between them, driven as `broker_group.link_runner` and `replication` do."""

from __future__ import annotations

from typing import Any

from seriatim.broker_group.core import invariants, replica, replica_events
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import (
    SeriatimError,
    UnknownLink,
)
from seriatim.protocol.names import Index
from seriatim.protocol.position import START
from tests.simulation.exhaustive import switches
from tests.simulation.exhaustive.parts import (
    MASTER,
    SLAVE,
    Append,
    Entry,
    Group,
    Member,
    Replication,
    Runner,
    Write,
)
from tests.simulation.exhaustive.values import Value, shared


class Pair:
    """The working copy of a group's parts. `outputs`: for the world, in order. `is_safe`: no failure can happen any more."""

    def __init__(self, group: Group, *, is_safe: bool, is_thrifty: bool) -> None:
        self._is_safe = is_safe
        self._is_thrifty = is_thrifty
        self.members: list[Member] = list(group.members)
        self.appends: list[Append] = list(group.appends)
        self.replications: list[Replication] = list(group.replications)
        self.outputs: list[tuple[Any, ...]] = []

    def _runner(self, place: int, epoch: int) -> Runner | None:
        return self.members[place].runner(epoch)

    def _replica(self, place: int, epoch: int) -> Replica:
        runner = self._runner(place, epoch)
        if runner is None:
            raise AssertionError(f"no link {epoch}")
        state: Replica = runner.replica.content
        return state

    def _put(self, place: int, runner: Runner) -> None:
        member = self.members[place]
        others = tuple(one for one in member.runners if one.epoch != runner.epoch)
        self.members[place] = member._replace(runners=tuple(sorted((*others, runner), key=lambda one: one.epoch)))

    def _write(self, place: int, write: Write) -> None:
        member = self.members[place]
        self.members[place] = member._replace(unflushed=(*member.unflushed, write))

    def apply(
        self, place: int, epoch: int, event: replica_events.Event, batch: Value | None = None
    ) -> SeriatimError | None:
        """As LinkRunner.apply: returns the error with which the event was refused."""
        runner = self._runner(place, epoch)
        if runner is None:
            raise AssertionError(f"{type(event).__name__} for a link that isn't there")
        state, effects = replica.step(runner.replica.content, event)
        invariants.check(state)
        self._put(place, runner._replace(replica=shared(state)))
        refused = None
        for effect in effects:
            if isinstance(effect, replica_events.Refuse):
                refused = effect.error
            else:
                self._run(place, epoch, effect, batch)
        return refused

    def _run(self, place: int, epoch: int, effect: replica_events.Effect, batch: Value | None) -> None:
        match effect:
            case replica_events.Store():
                if batch is None:
                    raise AssertionError("a store without a batch")
                entry = Entry(shared(effect.position), effect.committed_index, batch)
                self._write(place, Write("batch", epoch, entry=entry))
            case replica_events.KeepRecord():
                self._write(place, Write("keep", epoch, record=shared(effect.record)))
            case replica_events.WriteSeal():
                self._write(place, Write("seal", epoch, record=shared(effect.record)))
                if not switches.seals_are_flushed:
                    self.apply(place, epoch, replica_events.SealWritten())
            case replica_events.EndStreams():
                self._end_streams(place, epoch, effect.error)
            case replica_events.Acknowledge():
                self._acknowledge(epoch, effect.index)
            case replica_events.Confirm():
                self._confirm(epoch, effect.index, effect.hash)
            case replica_events.Forward():
                self._to_slave(epoch, batch, 0)
            case replica_events.TellCommitted():
                self._to_slave(epoch, None, effect.index)
            case replica_events.DropPeer():
                self._end_replication(epoch)
            case _:
                pass

    def _end_streams(self, place: int, epoch: int, error: SeriatimError) -> None:
        if place == SLAVE:
            for number, one in enumerate(self.replications):
                if one.epoch == epoch and one.is_slave_open:
                    self.replications[number] = one._replace(is_slave_open=False, messages=())
            return
        for number, stream in enumerate(self.appends):
            if stream.epoch == epoch and stream.state in ("source", "refused"):
                self.appends[number] = ended(stream, shared(error))
        self._end_replication(epoch)

    def _acknowledge(self, epoch: int, index: int) -> None:
        self.outputs.append(("acknowledged", epoch, int(index)))
        for number, stream in enumerate(self.appends):
            if stream.epoch == epoch and stream.state in ("source", "refused"):
                self.appends[number] = with_ack(stream, index)

    def _slave_stream(self, epoch: int) -> int | None:
        """The master's present stream to its slave."""
        for number, one in enumerate(self.replications):
            if one.epoch == epoch and one.is_master_open:
                return number
        return None

    def _to_slave(self, epoch: int, batch: Value | None, committed: int) -> None:
        number = self._slave_stream(epoch)
        if number is None:
            return
        one = self.replications[number]
        messages = one.messages
        if batch is None and messages and messages[-1][0] is None:
            messages = messages[:-1]  # the newest committed index says all before it
        self.replications[number] = one._replace(messages=(*messages, (batch, int(committed))))

    def _confirm(self, epoch: int, index: int, digest: bytes) -> None:
        for number, one in enumerate(self.replications):
            if one.epoch == epoch and one.is_slave_open:
                if not switches.slave_confirms_what_it_has:
                    index, digest = index + 1, b"?" * 32
                self.replications[number] = one._replace(confirm=(int(index), digest))

    def _end_replication(self, epoch: int) -> None:
        """The master's end: what is on its way may still reach the slave."""
        number = self._slave_stream(epoch)
        if number is None:
            return
        one = self.replications[number]
        self.replications[number] = one._replace(
            is_master_open=False, confirm=None, messages=one.messages if one.is_slave_open else ()
        )
        self.apply(MASTER, epoch, replica_events.PeerGone("ended"))

    def _take(self, place: int, epoch: int, batch: Value, token: int | None) -> SeriatimError | None:
        """As append.take."""
        member = self.members[place]
        runner = member.runner(epoch)
        if runner is None:
            return UnknownLink("unknown")
        encoded: EncodedBatch = batch.content
        header = encoded.header
        before = after = None
        if header.first_index < runner.replica.content.committed.index:
            before = self._hash_at(place, epoch, header.first_index)
            after = self._hash_at(place, epoch, header.end_index)
        event = replica_events.BatchArrived(
            header,
            encoded.header_bytes,
            token,  # type: ignore[arg-type]
            0.0,
            1.0 if member.session == "on" else 0.0,
            hash_before=before,
            hash_after=after,
        )
        return self.apply(place, epoch, event, batch)

    def _hash_at(self, place: int, epoch: int, index: int) -> bytes | None:
        if index == 0:
            return START.hash
        for entry in self.members[place].entries(epoch):
            if entry.position.content.index == index:
                return entry.position.content.hash
        return None

    # ---- the stream between the two

    def replication_opened(self, number: int) -> None:
        """The slave reads the opening of a stream (service.Replicate)."""
        one = self.replications[number]
        slave = self.members[SLAVE]
        runner = slave.runner(one.epoch)
        is_right = slave.is_up and (not switches.checks_incarnation or shared(slave.incarnation) is one.slave)
        if not is_right or runner is None or runner.replica.content.phase is not SealPhase.OPEN:
            self._end_replication(one.epoch)
            return
        self.replications = [
            other._replace(is_slave_open=False, messages=()) if other.epoch == one.epoch else other
            for other in self.replications
        ]
        self.replications[number] = one._replace(phase="greeted", is_slave_open=True)

    def greeted(self, number: int) -> None:
        """The master reads what the slave has, and makes the copies equal (SlaveStream._equalise)."""
        one = self.replications[number]
        epoch = one.epoch
        runner = self._runner(MASTER, epoch)
        if one.confirm is None or runner is None:
            raise AssertionError("nothing to read")
        (index, digest), mine = one.confirm, runner.replica.content.tail.index
        one = one._replace(confirm=None)
        self.replications[number] = one
        if not switches.waits_for_equal_copies:
            self.replications[number] = one._replace(phase="ready")
            self.apply(MASTER, epoch, replica_events.PeerReady(Index(index), digest))
        elif index > mine:
            self.replications[number] = one._replace(phase="copying")
            self._copy(epoch, mine, index)
        elif self._hash_at(MASTER, epoch, index) != digest:
            self._end_replication(epoch)
        elif index == mine:
            self._peer_ready(number, index, digest)
        else:
            rest = [entry for entry in self.members[MASTER].entries(epoch) if entry.position.content.index > index]
            self.replications[number] = one._replace(
                phase="filling", messages=tuple((entry.batch, 0) for entry in rest)
            )

    def _copy(self, epoch: int, from_index: int, end: int) -> None:
        for entry in self.members[SLAVE].entries(epoch):
            if from_index < entry.position.content.index <= end:
                encoded: EncodedBatch = entry.batch.content
                event = replica_events.BatchCopied(encoded.header, encoded.header_bytes)
                if self.apply(MASTER, epoch, event, entry.batch) is not None:
                    self._end_replication(epoch)
                    return

    def _peer_ready(self, number: int, index: int, digest: bytes) -> None:
        one = self.replications[number]
        self.replications[number] = one._replace(phase="ready")
        self.apply(MASTER, one.epoch, replica_events.PeerReady(Index(index), digest))

    def confirmed(self, number: int) -> None:
        """The master reads a confirmation."""
        one = self.replications[number]
        runner = self._runner(MASTER, one.epoch)
        if one.confirm is None or runner is None:
            raise AssertionError("nothing to read")
        index, digest = one.confirm
        self.replications[number] = one._replace(confirm=None)
        if one.phase == "filling":
            if index >= runner.replica.content.tail.index:
                self._peer_ready(number, index, digest)
        else:
            self.apply(MASTER, one.epoch, replica_events.PeerConfirmed(Index(index), digest))

    def replicated(self, number: int) -> None:
        """The slave reads a message (service._replicated)."""
        one = self.replications[number]
        (batch, committed), messages = one.messages[0], one.messages[1:]
        self.replications[number] = one._replace(messages=messages)
        if batch is not None:
            error = self._take(SLAVE, one.epoch, batch, None)
            if error is not None:
                self._end_streams(SLAVE, one.epoch, error)
                return
        runner = self._runner(SLAVE, one.epoch)
        if runner is not None and committed > runner.replica.content.committed.index:
            learnt = max(committed, runner.learnt)
            self._put(SLAVE, runner._replace(learnt=learnt))
            self.apply(SLAVE, one.epoch, replica_events.CommittedLearnt(Index(learnt)))

    def slave_end_noticed(self, number: int) -> None:
        """The master sees that the slave's end is closed."""
        self._end_replication(self.replications[number].epoch)

    def patience_over(self, number: int) -> None:
        """The slave still doesn't know the link (SlaveStream._serve)."""
        self._end_replication(self.replications[number].epoch)

    def replication_broken(self, number: int) -> None:
        """The master's end sees a break; the slave may go on to read for a while."""
        self._end_replication(self.replications[number].epoch)


def ended(stream: Append, error: Value | None) -> Append:
    return stream._replace(state="ended", batches=(), error=error)


def with_ack(stream: Append, index: int) -> Append:
    """What the sender knew already when it opened the stream tells it nothing."""
    return stream._replace(ack=int(index)) if stream.is_used and index > stream.first_index else stream


def is_quiet(state: Replica) -> bool:
    """It takes records, and its disk has all that it took."""
    return state.phase is SealPhase.OPEN and state.durable == state.tail.index
