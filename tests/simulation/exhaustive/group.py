"""A group: its processes, disks and sessions, and whoever waits for something in it."""

from __future__ import annotations

from seriatim.broker_group.core import replica, replica_events
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.protocol.errors import (
    PeerLost,
    Sealed,
    Unreachable,
)
from seriatim.protocol.marks import merged
from seriatim.protocol.names import Index
from seriatim.protocol.position import START, Position
from tests.simulation.exhaustive import switches
from tests.simulation.exhaustive.parts import (
    MASTER,
    NOBODY,
    SLAVE,
    DiskLink,
    Group,
    Member,
    Open,
    Replication,
    Runner,
    Write,
)
from tests.simulation.exhaustive.replication import ended, is_quiet
from tests.simulation.exhaustive.requests import AskedPair
from tests.simulation.exhaustive.values import Value, shared


class GroupStep(AskedPair):
    """One step. `outputs`: for the world, in order. `is_safe`: no failure can happen any more.

    Some steps are taken at once, because every later moment for them gives nothing that another order doesn't give:

    - Flushes of records alone (only once nothing can crash between write and flush). Who waits for one is an OpenLink, or
      a Seal, whose answer may then be given: an answer that is late for the disk's sake is an order, behind it, that is late.
      A member that is sealing takes nothing more, so what it will answer is settled when it is asked.
    - A slave's reading of a replication stream's opening, where no earlier stream of the link is open at the slave: until the
      master reads what the slave has, nothing follows, and what the slave has can't change.
    - The master's reading of that, as long as no sender has a stream to the link: all that follows is the answer of OpenLink.
    """

    # ---- disk, process, session

    def flushed(self, place: int) -> None:
        """The disk has all that was written; what waited for it is told, in order (Writer._complete)."""
        member = self.members[place]
        writes = member.unflushed
        self.members[place] = member._replace(unflushed=(), links=on_disk(member.links, writes))
        batches: dict[int, int] = {}
        told: list[Write] = []
        for write in writes:
            if write.entry is None:
                told.append(write)
                continue
            if write.epoch not in batches:
                told.append(write)
            batches[write.epoch] = write.entry.position.content.index
        for write in told:
            self._written(place, write, batches.get(write.epoch, 0))

    def _written(self, place: int, write: Write, index: int) -> None:
        epoch = write.epoch
        if write.kind == "batch":
            self.apply(place, epoch, replica_events.Flushed(Index(index)))
            runner = self._runner(place, epoch)
            if runner is not None and runner.learnt > runner.replica.content.committed.index:
                self.apply(place, epoch, replica_events.CommittedLearnt(Index(runner.learnt)))
        elif write.kind == "seal" and switches.seals_are_flushed:
            self.apply(place, epoch, replica_events.SealWritten())
        elif write.kind == "unheard" and write.record is not None:
            state = loaded(write.record.content, DiskLink(epoch))
            self._put(place, Runner(epoch, shared(state), seals=((write.owner, write.disk_id),)))

    def crashed(self, place: int, survivors: int, is_blank: bool) -> None:
        """The process dies; of what wasn't flushed, the disk keeps the first `survivors` writes."""
        member = self.members[place]
        for write in member.unflushed:
            self._refused("seal", write.owner, place, Unreachable("crashed"))
        for runner in member.runners:
            for waiting in runner.opens:
                self._refused("open", waiting.owner, place, Unreachable("crashed"))
            for owner, _ in runner.seals:
                self._refused("seal", owner, place, Unreachable("crashed"))
        links = on_disk(member.links, member.unflushed[:survivors])
        self.members[place] = member._replace(
            is_up=False,
            comes_blank=is_blank,
            session="gone",
            runners=(),
            unflushed=(),
            links=() if is_blank else links,
        )
        if place == MASTER:
            self.appends = [one if one.state == "ended" else ended(one, None) for one in self.appends]
            self.replications = [
                one._replace(is_master_open=False, confirm=None) for one in self.replications if one.is_slave_open
            ]
        else:
            self.replications = [
                one._replace(is_slave_open=False, messages=()) for one in self.replications if one.is_master_open
            ]

    def restarted(self, place: int) -> None:
        """It loads its links, seals them, and registers (protocol.md 5.5), all in one step: before it registers, whoever asks
        it for something finds nobody, as if it were still down.
        """
        member = self.members[place]
        if member.comes_blank:
            member = member._replace(disk=member.disk + 1, start=1, comes_blank=False)
        else:
            member = member._replace(start=member.start + 1)
        runners = tuple(
            Runner(link.epoch, shared(loaded(link.record.content, link)))
            for link in member.links
            if link.record is not None
        )
        self.members[place] = member._replace(is_up=True, session="on", runners=runners)
        self._seal_open_links(place)

    def session_loss_noticed(self, place: int) -> None:
        """It seals its links; that nothing more is taken or confirmed is seen at once, the flushes behind it by nobody."""
        self.members[place] = self.members[place]._replace(session="starting")
        self._seal_open_links(place)

    def _seal_open_links(self, place: int) -> None:
        for runner in self.members[place].runners:
            record: LinkRecord = runner.replica.content.record
            if not record.is_sealed and record.opened_start and runner.replica.content.phase is SealPhase.OPEN:
                self.apply(place, runner.epoch, replica_events.SealAsked(record.chain_version))
        while self.members[place].unflushed:
            self.flushed(place)

    def registered(self, place: int) -> None:
        self.members[place] = self.members[place]._replace(session="on")

    def session_changed(self, place: int, session: str) -> None:
        self.members[place] = self.members[place]._replace(session=session)

    # ---- what waits for a condition

    def frozen(self) -> Value:
        self._settle()
        while self._is_thrifty and self._hurry():
            self._settle()
        return shared(Group((self.members[0], self.members[1]), tuple(self.appends), tuple(self.replications)))

    def settled(self) -> None:
        """Nothing happened."""

    def _settle(self) -> None:
        for number, one in enumerate(self.replications):
            if one.phase == "greeted" and one.is_slave_open:
                self._settle_greeting(number)
            elif one.phase == "copying" and one.is_master_open:
                self._settle_copy(number)
        for number, stream in enumerate(self.appends):
            if stream.state == "refused":
                runner = self._runner(MASTER, stream.epoch)
                if runner is None or not runner.replica.content.flight:
                    self.appends[number] = ended(stream, stream.error)
        for place in (MASTER, SLAVE):
            for runner in self.members[place].runners:
                if runner.opens or runner.seals:
                    self._settle_runner(place, runner)
        self.appends = [one for one in self.appends if one.is_used or one.state != "ended"]
        self.replications = [
            one for one in self.replications if one.is_master_open or (one.is_slave_open and one.messages)
        ]

    def _settle_greeting(self, number: int) -> None:
        one = self.replications[number]
        runner = self._runner(SLAVE, one.epoch)
        if runner is None:
            return
        state: Replica = runner.replica.content
        if state.phase is SealPhase.OPEN and state.durable == state.tail.index:
            self.replications[number] = one._replace(phase="greeting", confirm=(int(state.tail.index), state.tail.hash))

    def _settle_copy(self, number: int) -> None:
        runner = self._runner(MASTER, self.replications[number].epoch)
        if runner is not None and runner.replica.content.durable == runner.replica.content.tail.index:
            tail = runner.replica.content.tail
            self._peer_ready(number, tail.index, tail.hash)

    def _settle_runner(self, place: int, runner: Runner) -> None:
        state: Replica = runner.replica.content
        waiting = []
        for one in runner.opens:
            left = self._still_opening(place, runner.epoch, state, one)
            if left is not None:
                waiting.append(left)
        seals = runner.seals
        if state.phase is SealPhase.SEALED:
            for owner, disk_id in seals:
                if owner != NOBODY:
                    self.outputs.append(("sealed", owner, place, shared(self._seal_answer(place, state, disk_id))))
            seals = ()
        now = self._runner(place, runner.epoch)
        if now is not None:
            self._put(place, now._replace(opens=tuple(waiting), seals=seals))

    def _still_opening(self, place: int, epoch: int, state: Replica, one: Open) -> Open | None:
        """The OpenLink as it goes on waiting, or None when it was answered (Broker.open_link)."""
        if one.owner == NOBODY:
            return None  # all that it does was done; only its answer waits
        if one.stage == "connecting":
            if not state.is_peer_ready:
                if self._slave_stream(epoch) is not None and state.phase is SealPhase.OPEN:
                    return one
                self._refused("open", one.owner, place, PeerLost("the other member can't be reached"))
                return None
            one = Open(one.owner, "keeping")
        if one.stage == "keeping":
            if any(write.kind == "keep" and write.epoch == epoch for write in self.members[place].unflushed):
                return one
            one = Open(one.owner, "settling", int(state.tail.index))
        if state.phase is not SealPhase.OPEN:
            self._refused("open", one.owner, place, Sealed("this link takes no more records"))
            return None
        is_on_two = place == SLAVE or state.confirmed >= one.index or not state.is_peer_ready
        if state.durable < one.index or (switches.waits_for_equal_copies and not is_on_two):
            return one
        position = next(at for at in (state.tail, state.committed, *state.flight) if at.index == one.index)
        self.outputs.append(("opened", one.owner, place, shared(position_message(state.record, position))))
        return None

    def _seal_answer(self, place: int, state: Replica, disk_id: str) -> SealAnswer:
        """As service.seal."""
        incarnation = self.members[place].incarnation
        is_unlike = disk_id != incarnation.disk_id and state.record.end is None
        if is_unlike and not switches.another_disk_answers:
            return SealAnswer(Wholeness.UNKNOWN, incarnation, (), "another disk")
        positions = tuple(position_message(state.record, one) for one in replica.sealed_positions(state))
        is_whole = state.record.is_whole and disk_id == incarnation.disk_id
        wholeness = Wholeness.WHOLE if is_whole else Wholeness.PARTIAL
        return SealAnswer(wholeness, incarnation, positions)

    def _hurry(self) -> bool:
        """Take one of the steps that are taken at once. False: there is none."""
        if self._is_safe:
            for place in (MASTER, SLAVE):
                if self._has_records_only(self.members[place]):
                    self.flushed(place)
                    return True
        for number, one in enumerate(self.replications):
            if one.phase == "opening" and self._is_first_stream(one):
                self.replication_opened(number)
                return True
            if one.phase == "greeting" and one.confirm is not None and one.is_master_open and one.is_slave_open:
                runner = self._runner(MASTER, one.epoch)
                is_alone = not any(stream.epoch == one.epoch for stream in self.appends)
                if is_alone and runner is not None and is_quiet(runner.replica.content):
                    self.greeted(number)
                    return True
        return False

    def _has_records_only(self, member: Member) -> bool:
        sealing = {
            one.epoch for one in member.runners if one.replica.content.phase in (SealPhase.WAITING, SealPhase.WRITING)
        }
        return bool(member.unflushed) and all(one.entry is None or one.epoch in sealing for one in member.unflushed)

    def _is_first_stream(self, one: Replication) -> bool:
        slave = self.members[SLAVE]
        runner = slave.runner(one.epoch)
        return (
            one.is_master_open
            and slave.is_up
            and shared(slave.incarnation) is one.slave
            and runner is not None
            and is_quiet(runner.replica.content)
            and not any(other.is_slave_open for other in self.replications if other.epoch == one.epoch)
        )


def position_message(record: LinkRecord, position: object) -> Position:
    """As service.position_message and messages.position_from."""
    index, digest, marks = position.index, position.hash, position.marks  # type: ignore[attr-defined]
    if index == 0:
        return START
    return Position(index, digest, merged(record.start_marks, marks))


def loaded(record: LinkRecord, link: DiskLink) -> Replica:
    """As LinkRunner._loaded."""
    positions = [entry.position.content for entry in link.entries]
    known = link.entries[-1].committed if link.entries else 0
    committed = next((one for one in reversed(positions) if one.index <= known), START)
    flight = tuple(one for one in positions if one.index > committed.index)
    tail = flight[-1] if flight else committed
    phase = SealPhase.SEALED if record.is_sealed else SealPhase.OPEN
    return Replica(record, committed, tail.index, tail, Index(0), flight, phase=phase)


def on_disk(links: tuple[DiskLink, ...], writes: tuple[Write, ...]) -> tuple[DiskLink, ...]:
    """The disk after these writes, in order."""
    by_epoch = {one.epoch: one for one in links}
    for write in writes:
        link = by_epoch.get(write.epoch, DiskLink(write.epoch))
        if write.entry is not None:
            link = link._replace(entries=(*link.entries, write.entry))
        if write.record is not None:
            link = link._replace(record=write.record)
        by_epoch[write.epoch] = link
    return tuple(by_epoch[epoch] for epoch in sorted(by_epoch))
