"""Two members, driven as `broker_group.broker`, `link_runner`, `replication` and `append` drive the replica core.

A step works on a copy of the group's parts and gives the next group and what the rest of the world is told. What the shells do
between two awaits is one step here; a task that waits for a condition goes on as soon as it holds.
"""

from __future__ import annotations

from seriatim.broker_group.core import invariants, replica, replica_events
from seriatim.broker_group.core.link_record import START, LinkRecord, Role
from seriatim.broker_group.core.replica import Replica, SealPhase
from seriatim.coordinator.core import seal as seal_core
from seriatim.coordinator.core.events import SendOpen, SendSeal
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import (
    BadChecksum,
    CallerError,
    Fenced,
    OlderVersion,
    PartlyResend,
    PeerLost,
    Resend,
    Sealed,
    SeriatimError,
    UnknownLink,
    Unreachable,
    WrongIncarnation,
    WrongIndex,
)
from seriatim.protocol.marks import merged
from seriatim.protocol.names import ChainVersion, Epoch, Index, QueueId
from tests.simulation.exhaustive.parts import (
    MASTER,
    NOBODY,
    PLACES,
    SLAVE,
    Append,
    DiskLink,
    Entry,
    Group,
    Member,
    Open,
    Replication,
    Runner,
    Write,
)
from tests.simulation.exhaustive.values import Value, shared

_HARMLESS = (CallerError, Resend, PartlyResend, WrongIndex, BadChecksum)
Output = tuple

# What a defect may change in the world; the names say what is right.
checks_incarnation = True
another_disk_answers = False
waits_for_equal_copies = True
slave_confirms_what_it_has = True
seals_are_flushed = True


class GroupStep:
    """One step. `outputs`: for the world, in order. `is_safe`: no failure can happen any more.

    Some steps are taken at once, because every later moment for them gives nothing that another order doesn't give:

    - Flushes of records alone (only once nothing can crash between write and flush). Who waits for one is an OpenLink, or
      a Seal, whose answer may then be given: an answer that is late for the disk's sake is an order, behind it, that is late.
      A member that is sealing takes nothing more, so what it will answer is settled when it is asked.
    - A slave's reading of a replication stream's opening, where no earlier stream of the link is open at the slave: until the
      master reads what the slave has, nothing follows, and what the slave has can't change.
    - The master's reading of that, as long as no sender has a stream to the link: all that follows is the answer of OpenLink.
    """

    def __init__(self, group: Group, *, is_safe: bool = False) -> None:
        self._is_safe = is_safe
        self.members: list[Member] = list(group.members)
        self.appends: list[Append] = list(group.appends)
        self.replications: list[Replication] = list(group.replications)
        self.outputs: list[Output] = []

    def frozen(self) -> Value:
        self._settle()
        while self._hurry():
            self._settle()
        return shared(Group((self.members[0], self.members[1]), tuple(self.appends), tuple(self.replications)))

    # ---- the replica core

    def _runner(self, place: int, epoch: int) -> Runner | None:
        return self.members[place].runner(epoch)

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
                if not seals_are_flushed:
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
                self.appends[number] = _ended(stream, shared(error))
        self._end_replication(epoch)

    def _acknowledge(self, epoch: int, index: int) -> None:
        self.outputs.append(("acknowledged", epoch, int(index)))
        for number, stream in enumerate(self.appends):
            if stream.epoch == epoch and stream.state in ("source", "refused"):
                self.appends[number] = _with_ack(stream, index)

    # ---- the stream between the two

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
                if not slave_confirms_what_it_has:
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

    def replication_opened(self, number: int) -> None:
        """The slave reads the opening of a stream (service.Replicate)."""
        one = self.replications[number]
        slave = self.members[SLAVE]
        runner = slave.runner(one.epoch)
        is_right = slave.is_up and (not checks_incarnation or shared(slave.incarnation) is one.slave)
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
        if not waits_for_equal_copies:
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

    # ---- the sender's stream

    def append_opened(self, number: int) -> None:
        """The master reads the opening of a stream (AppendStream._opened)."""
        stream = self.appends[number]
        master = self.members[MASTER]
        error = self._opening_error(stream, master)
        if error is not None:
            self.appends[number] = _ended(stream, shared(error))
            return
        for other, one in enumerate(self.appends):
            if one.epoch == stream.epoch and one.state in ("source", "refused"):
                self.appends[other] = _ended(one, shared(OlderVersion("another stream")))
        runner = master.runner(stream.epoch)
        if runner is None:
            raise AssertionError("an open stream without a link")
        self.appends[number] = _with_ack(stream._replace(state="source"), runner.replica.content.committed.index)

    def _opening_error(self, stream: Append, master: Member) -> SeriatimError | None:
        runner = master.runner(stream.epoch)
        if checks_incarnation and shared(master.incarnation) is not stream.incarnation:
            return WrongIncarnation("another incarnation")
        if runner is None:
            return UnknownLink("unknown")
        record: LinkRecord = runner.replica.content.record
        if record.role is not Role.MASTER:
            return UnknownLink("not the master")
        if stream.token < record.token:
            return Fenced("a newer sender was elected", token=record.token)
        tail = runner.replica.content.tail
        if stream.first_index > tail.index:
            return WrongIndex("not the next index", next_index=tail.index)
        return None

    def append_read(self, number: int) -> None:
        """The master reads a batch."""
        stream = self.appends[number]
        batch = stream.batches[0]
        stream = stream._replace(batches=stream.batches[1:])
        self.appends[number] = stream
        before = len(self.members[MASTER].unflushed)
        error = self._take(MASTER, stream.epoch, batch, stream.token)
        if len(self.members[MASTER].unflushed) > before:
            self.outputs.append(("stored", stream.epoch, stream.token))
        if error is None:
            return
        now = self.appends[number]
        if now.state == "source":
            refused = now._replace(state="refused", batches=(), error=shared(error))
            self.appends[number] = refused if isinstance(error, _HARMLESS) else _ended(now, shared(error))

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

    def acknowledgement_read(self, number: int) -> None:
        stream = self.appends[number]
        self.appends[number] = stream._replace(ack=-1)
        self.outputs.append(("sender", stream.sender, "acknowledged", stream.ack))

    def append_end_read(self, number: int) -> None:
        stream = self.appends.pop(number)
        self.outputs.append(("sender", stream.sender, "ended", stream.error))

    def append_broken(self, number: int) -> None:
        """The sender sees a break; what is on its way to the master may still arrive there."""
        stream = self.appends[number]
        self.appends[number] = stream._replace(is_used=False, ack=-1)
        self.outputs.append(("sender", stream.sender, "ended", None))

    def stream_wanted(self, sender: int, epoch: int, token: int, index: int, incarnation: Value) -> None:
        """The sender opens a stream, as soon as it has closed the one before."""
        self.appends.append(Append(sender, epoch, token, index, incarnation))
        master = self.members[MASTER]
        if not master.is_up:
            self.appends[-1] = _ended(self.appends[-1], None)

    def stream_closed(self, sender: int) -> None:
        for number, stream in enumerate(self.appends):
            if stream.sender == sender and stream.is_used:
                self.appends[number] = stream._replace(is_used=False, ack=-1)

    def batch_sent(self, sender: int, batch: Value) -> None:
        for number, stream in enumerate(self.appends):
            if stream.sender == sender and stream.is_used and stream.state in ("new", "source"):
                self.appends[number] = stream._replace(batches=(*stream.batches, batch))

    # ---- requests of coordinators

    def asked(self, place: int, owner: int, order: Value) -> None:
        """OpenLink or Seal arrives."""
        request: SendOpen | SendSeal = order.content
        if isinstance(request, SendOpen):
            self._open_asked(place, owner, request)
        else:
            self._seal_asked(place, owner, request)

    def _open_asked(self, place: int, owner: int, request: SendOpen) -> None:
        member, epoch = self.members[place], int(request.link.epoch)
        if checks_incarnation and request.side.incarnation != member.incarnation:
            self._refused("open", owner, place, WrongIncarnation("another incarnation"))
            return
        runner = member.runner(epoch)
        if runner is None:
            record = shared(_record(request, place, member))
            self._put(place, Runner(epoch, shared(Replica(record.content))))
            self._write(place, Write("keep", epoch, record=record))
        else:
            refused = self.apply(place, epoch, replica_events.Opened(request.version, request.token))
            if refused is not None:
                self._refused("open", owner, place, refused)
                return
        if place == MASTER and self._slave_stream(epoch) is None:
            self.replications.append(Replication(epoch, shared(self._replica(MASTER, epoch).record.peer)))
        runner = self._runner(place, epoch)
        if runner is not None:
            waiting = Open(owner, "connecting" if place == MASTER else "keeping")
            self._put(place, runner._replace(opens=(*runner.opens, waiting)))

    def _replica(self, place: int, epoch: int) -> Replica:
        runner = self._runner(place, epoch)
        if runner is None:
            raise AssertionError(f"no link {epoch}")
        state: Replica = runner.replica.content
        return state

    def _seal_asked(self, place: int, owner: int, request: SendSeal) -> None:
        member, epoch = self.members[place], int(request.link.epoch)
        side = request.link.side(PLACES[place])
        disk_id = "" if side is None else side.incarnation.disk_id
        runner = member.runner(epoch)
        if runner is None:
            record = LinkRecord(QueueId(1), Epoch(epoch), chain_version=request.version, is_sealed=True)
            self._write(place, Write("unheard", epoch, record=shared(record), owner=owner, disk_id=disk_id))
            return
        refused = self.apply(place, epoch, replica_events.SealAsked(request.version))
        if refused is not None:
            self._refused("seal", owner, place, refused)
            return
        runner = self._runner(place, epoch)
        if runner is not None:
            self._put(place, runner._replace(seals=(*runner.seals, (owner, disk_id))))

    def _refused(self, what: str, owner: int, place: int, error: SeriatimError) -> None:
        if owner != NOBODY:
            self.outputs.append((what, owner, place, shared(error)))

    def owner_left(self, owner: int, heir: int) -> None:
        """A call is over, or in another round (nobody waits for its answers any more), or goes on in another slot."""
        for place, member in enumerate(self.members):
            self.members[place] = member._replace(
                runners=tuple(
                    one._replace(
                        opens=tuple(waiting._replace(owner=heir) if waiting.owner == owner else waiting for waiting in one.opens),
                        seals=tuple((heir, disk) if who == owner else (who, disk) for who, disk in one.seals),
                    )
                    for one in member.runners
                ),
                unflushed=tuple(one._replace(owner=heir) if one.owner == owner else one for one in member.unflushed),
            )

    # ---- disk, process, session

    def flushed(self, place: int) -> None:
        """The disk has all that was written; what waited for it is told, in order (Writer._complete)."""
        member = self.members[place]
        writes = member.unflushed
        self.members[place] = member._replace(unflushed=(), links=_on_disk(member.links, writes))
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
        elif write.kind == "seal" and seals_are_flushed:
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
        links = _on_disk(member.links, member.unflushed[:survivors])
        self.members[place] = member._replace(
            is_up=False,
            comes_blank=is_blank,
            session="gone",
            runners=(),
            unflushed=(),
            links=() if is_blank else links,
        )
        if place == MASTER:
            self.appends = [
                one if one.state == "ended" else _ended(one, None) for one in self.appends
            ]
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

    def settled(self) -> None:
        """Nothing happened."""

    # ---- what waits for a condition

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
                if is_alone and runner is not None and _is_quiet(runner.replica.content):
                    self.greeted(number)
                    return True
        return False

    def _has_records_only(self, member: Member) -> bool:
        sealing = {
            one.epoch for one in member.runners if one.replica.content.phase in (SealPhase.WAITING, SealPhase.WRITING)
        }
        return bool(member.unflushed) and all(
            one.entry is None or one.epoch in sealing for one in member.unflushed
        )

    def _is_first_stream(self, one: Replication) -> bool:
        slave = self.members[SLAVE]
        runner = slave.runner(one.epoch)
        return (
            one.is_master_open
            and slave.is_up
            and shared(slave.incarnation) is one.slave
            and runner is not None
            and _is_quiet(runner.replica.content)
            and not any(other.is_slave_open for other in self.replications if other.epoch == one.epoch)
        )

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
                    self.appends[number] = _ended(stream, stream.error)
        for place in (MASTER, SLAVE):
            for runner in self.members[place].runners:
                if runner.opens or runner.seals:
                    self._settle_runner(place, runner)
        self.appends = [one for one in self.appends if one.is_used or one.state != "ended"]
        self.replications = [one for one in self.replications if one.is_master_open or (one.is_slave_open and one.messages)]

    def _settle_greeting(self, number: int) -> None:
        one = self.replications[number]
        runner = self._runner(SLAVE, one.epoch)
        if runner is None:
            return
        state: Replica = runner.replica.content
        if state.phase is SealPhase.OPEN and state.durable == state.tail.index:
            self.replications[number] = one._replace(
                phase="greeting", confirm=(int(state.tail.index), state.tail.hash)
            )

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
        if state.durable < one.index or (waits_for_equal_copies and not is_on_two):
            return one
        position = next(at for at in (state.tail, state.committed, *state.flight) if at.index == one.index)
        self.outputs.append(("opened", one.owner, place, shared(_position(state.record, position))))
        return None

    def _seal_answer(self, place: int, state: Replica, disk_id: str) -> SealAnswer:
        """As service.seal."""
        incarnation = self.members[place].incarnation
        if disk_id != incarnation.disk_id and not another_disk_answers:
            return SealAnswer(Wholeness.UNKNOWN, incarnation, (), "another disk")
        positions = tuple(_position(state.record, one) for one in replica.sealed_positions(state))
        is_whole = state.record.is_whole and disk_id == incarnation.disk_id
        wholeness = Wholeness.WHOLE if is_whole else Wholeness.PARTIAL
        return SealAnswer(wholeness, incarnation, positions)


def _is_quiet(state: Replica) -> bool:
    """It takes records, and its disk has all that it took."""
    return state.phase is SealPhase.OPEN and state.durable == state.tail.index


def _ended(stream: Append, error: Value | None) -> Append:
    return stream._replace(state="ended", batches=(), error=error)


def _with_ack(stream: Append, index: int) -> Append:
    """What the sender knew already when it opened the stream tells it nothing."""
    return stream._replace(ack=int(index)) if stream.is_used and index > stream.first_index else stream


def _position(record: LinkRecord, position: object) -> seal_core.Position:
    """As service.position_message and messages.position_from."""
    index, digest, marks = position.index, position.hash, position.marks  # type: ignore[attr-defined]
    if index == 0:
        return seal_core.START
    return seal_core.Position(index, digest, merged(record.start_marks, marks))


def _record(request: SendOpen, place: int, member: Member) -> LinkRecord:
    link = request.link
    other = link.slave if place == MASTER else link.master
    return LinkRecord(
        QueueId(1),
        link.epoch,
        role=Role.MASTER if place == MASTER else Role.SLAVE,
        durability=link.durability,
        max_record_bytes=request.max_record_bytes,
        peer=other.incarnation,
        start_marks=dict(link.marks_on_two),
        token=request.token,
        chain_version=ChainVersion(request.version),
        opened_start=member.start,
        has_cursors=True,
    )


def loaded(record: LinkRecord, link: DiskLink) -> Replica:
    """As LinkRunner._loaded."""
    positions = [entry.position.content for entry in link.entries]
    known = link.entries[-1].committed if link.entries else 0
    committed = next((one for one in reversed(positions) if one.index <= known), START)
    flight = tuple(one for one in positions if one.index > committed.index)
    tail = flight[-1] if flight else committed
    phase = SealPhase.SEALED if record.is_sealed else SealPhase.OPEN
    return Replica(record, committed, tail.index, tail, Index(0), flight, phase=phase)


def _on_disk(links: tuple[DiskLink, ...], writes: tuple[Write, ...]) -> tuple[DiskLink, ...]:
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
