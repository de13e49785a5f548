"""What senders and coordinators ask of a pair, driven as `broker_group.append`, `broker` and `service` do."""

from __future__ import annotations

from seriatim.broker_group.core import replica_events
from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.core.replica import Replica
from seriatim.coordinator.core.events import SendOpen, SendSeal
from seriatim.protocol.errors import (
    BadChecksum,
    CallerError,
    Fenced,
    OlderVersion,
    PartlyResend,
    Resend,
    SeriatimError,
    UnknownLink,
    WrongIncarnation,
    WrongIndex,
)
from seriatim.protocol.names import ChainVersion, Epoch, QueueId
from tests.simulation.exhaustive import switches
from tests.simulation.exhaustive.parts import (
    MASTER,
    NOBODY,
    PLACES,
    Append,
    Member,
    Open,
    Replication,
    Runner,
    Write,
)
from tests.simulation.exhaustive.replication import Pair, ended, with_ack
from tests.simulation.exhaustive.values import Value, shared

_HARMLESS = (CallerError, Resend, PartlyResend, WrongIndex, BadChecksum)


class AskedPair(Pair):
    """A pair with the streams and requests that reach it."""

    # ---- the sender's stream

    def append_opened(self, number: int) -> None:
        """The master reads the opening of a stream (AppendStream._opened)."""
        stream = self.appends[number]
        master = self.members[MASTER]
        error = self._opening_error(stream, master)
        if error is not None:
            self.appends[number] = ended(stream, shared(error))
            return
        for other, one in enumerate(self.appends):
            if one.epoch == stream.epoch and one.state in ("source", "refused"):
                self.appends[other] = ended(one, shared(OlderVersion("another stream")))
        runner = master.runner(stream.epoch)
        if runner is None:
            raise AssertionError("an open stream without a link")
        self.appends[number] = with_ack(stream._replace(state="source"), runner.replica.content.committed.index)

    def _opening_error(self, stream: Append, master: Member) -> SeriatimError | None:
        runner = master.runner(stream.epoch)
        if switches.checks_incarnation and shared(master.incarnation) is not stream.incarnation:
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
            self.appends[number] = refused if isinstance(error, _HARMLESS) else ended(now, shared(error))

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
            self.appends[-1] = ended(self.appends[-1], None)

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
        if switches.checks_incarnation and request.side.incarnation != member.incarnation:
            self._refused("open", owner, place, WrongIncarnation("another incarnation"))
            return
        runner = member.runner(epoch)
        if runner is None:
            record = shared(record_of(request, place, member))
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
                        opens=tuple(
                            waiting._replace(owner=heir) if waiting.owner == owner else waiting for waiting in one.opens
                        ),
                        seals=tuple((heir, disk) if who == owner else (who, disk) for who, disk in one.seals),
                    )
                    for one in member.runners
                ),
                unflushed=tuple(one._replace(owner=heir) if one.owner == owner else one for one in member.unflushed),
            )


def record_of(request: SendOpen, place: int, member: Member) -> LinkRecord:
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
        lacks=(),
    )
