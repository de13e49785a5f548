"""Cursors at run time: told, committed on both members, drained, and brought up again on a member that missed some.

A commit is answered when both members have it. When the other one can't be reached, a coordinator first notes in the
chain document that its cursors of this link are stale; the note is taken back by the member that wrote it, after it has passed
on every cursor of the link. Note and take-back run under one lock with the commits, so neither can overtake a commit (H7).
Where one of them refuses it, for a newer reader was elected, it is taken back here, too: while this member stood still that one may
have been granted a place, and what is kept here of the older one would count some day (invariant 7).
What the other member passes on waits for none of that: it may have a commit of its own under way, which waits for this member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from seriatim.broker_group.broker import Broker
from seriatim.broker_group.coordinators import Coordinators, nobody_answers
from seriatim.broker_group.core import cursors
from seriatim.broker_group.core.cursors import CursorRecord
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.uninterrupted import Lock, uninterrupted
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Whose, whose_from
from seriatim.protocol.errors import (
    DeadlineOver,
    DiskFailed,
    Fenced,
    OlderGeneration,
    OlderVersion,
    SeriatimError,
    StaleCursor,
    UnknownLink,
    Unreachable,
    WrongIncarnation,
    copied,
)
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.names import Generation, Index, QueueId, SubscriptionId, Token

_log = log.logger("broker.cursors")

RELAY_TIMEOUT_S = 0.5
NOTE_TIMEOUT_S = 2.0
REPEAT_S = 1.0
TOGETHER_S = 0.1
"""The first that comes to a link's end is reported at once; who comes so soon behind it, together: each report is a write of the chain."""

Change = Callable[[CursorRecord | None], CursorRecord]


class CursorKeeper:
    """See the module. Cursors of a link are read from disk once, when they are first asked for."""

    def __init__(self, broker: Broker, coordinators: Coordinators) -> None:
        self._broker = broker
        self._coordinators = coordinators
        self._records: dict[LinkKey, dict[SubscriptionId, CursorRecord]] = {}
        # Who reads, where the disk couldn't take it: it counts beside what is there (H8).
        self._named: dict[LinkKey, dict[SubscriptionId, CursorRecord]] = {}
        self._locks: WeakValueDictionary[LinkKey, Lock] = WeakValueDictionary()
        self._write_locks: WeakValueDictionary[LinkKey, Lock] = WeakValueDictionary()
        self._noted: dict[LinkKey, set[Whose]] = {}
        self.under_way: set[asyncio.Task[Any]] = set()
        self._reported: dict[LinkKey, set[Whose]] = {}
        self._unreadable: set[LinkKey] = set()  # which was said

    def _lock(self, key: LinkKey) -> Lock:
        return self._locks.setdefault(key, Lock())

    def _write_lock(self, key: LinkKey) -> Lock:
        return self._write_locks.setdefault(key, Lock())

    def of_link(self, key: LinkKey) -> dict[SubscriptionId, CursorRecord]:
        records = self._records.get(key)
        if records is None:
            records = {record.subscription_id: record for record in self._broker.store.cursors(key)}
            self._records[key] = records
        return records

    def get(self, key: LinkKey, subscription_id: SubscriptionId) -> CursorRecord | None:
        """The cursor, with the newest reader that was named here."""
        record = self.of_link(key).get(subscription_id)
        named = self._named.get(key, {}).get(subscription_id)
        return record if named is None else cursors.further(record, named)

    def forget(self, key: LinkKey) -> None:
        """The link was dropped."""
        self._records.pop(key, None)
        self._named.pop(key, None)
        self._noted.pop(key, None)
        self._reported.pop(key, None)
        self._unreadable.discard(key)

    async def forget_deleted(self, documents: Mapping[QueueId, ChainDocument]) -> None:
        """Cursors of subscriptions that were deleted go, unless the disk failed. Raises DiskFailed.

        A link would have one of each that ever read it, and all of them passed on, under its lock, to a peer that missed a commit.
        """
        for key, records in list(self._records.items()):
            document = documents.get(key[0])
            deleted = set() if document is None else document.deleted_of(records)
            if deleted and self._broker.store.failure is None:
                await self._forget(key, deleted)

    @uninterrupted
    async def _forget(self, key: LinkKey, deleted: set[SubscriptionId]) -> None:
        async with self._write_lock(key):
            await self._broker.store.forget_cursors(key, deleted)
            records = self._records.get(key, {})
            for one in deleted:
                records.pop(one, None)

    async def _changed(self, key: LinkKey, subscription_id: SubscriptionId, change: Change) -> CursorRecord:
        """The cursor as `change` makes it of the one here, on disk first. Nothing else is waited for under this lock."""
        async with self._write_lock(key):
            kept = self.of_link(key).get(subscription_id)
            record = change(self.get(key, subscription_id))
            if record != kept:
                self._broker.check_kept(key)
                await self._broker.store.keep_cursor(key, record)
                self.of_link(key)[subscription_id] = record
            return record

    @uninterrupted
    async def tell(self, runner: LinkRunner, reader: CursorRecord) -> CursorRecord:
        """A coordinator names the reader; the cursor here is the answer. Raises OlderGeneration, Fenced, StaleCursor.

        `reader`: with where it starts, of what both members have; none, or 0, where that isn't known.
        """
        record = await self._told(runner.key, reader)
        runner.wake_readers()
        return record

    @uninterrupted
    async def tell_unread(self, key: LinkKey, reader: CursorRecord, why: DiskFailed) -> NoReturn:
        """As `tell`, of a link that can't be read here: nobody older reads it, should that change (H8). Raises StaleCursor."""
        await self._told(key, replace(reader, index=None))
        raise StaleCursor(f"this member can't read this link: {why.message}", epoch=key[1]) from why

    async def _told(self, key: LinkKey, reader: CursorRecord) -> CursorRecord:
        subscription_id = reader.subscription_id

        def told(before: CursorRecord | None, start: Index = reader.index or Index(0)) -> CursorRecord:
            return cursors.told(before or CursorRecord(subscription_id), reader.generation, reader.token, start)

        store = self._broker.store
        failure = store.failure or (DiskFailed("its disk stands still") if store.stands_still else None)
        try:
            if failure is not None:  # also where nothing is to be written
                raise copied(failure)
            async with self._lock(key):
                return await self._changed(key, subscription_id, told)
        except DiskFailed as failed:
            # It takes nobody older's commit any more, nor does anybody older read here as long as this process lives (H8).
            named = self._named.setdefault(key, {})
            try:
                before = self.get(key, subscription_id)
            except DiskFailed:
                before = named.get(subscription_id)
            named[subscription_id] = told(before, Index(0))
            raise StaleCursor(f"this member gives no cursor: {failed.message}", epoch=key[1]) from failed

    @uninterrupted
    async def commit(self, runner: LinkRunner, request: pb.CommitCursorRequest) -> None:
        """A reader's commit, or one relayed by the peer. Raises Fenced, OlderGeneration, Unreachable."""
        key = runner.key
        subscription_id = SubscriptionId(request.subscription_id)
        if runner.record.lacks_of((subscription_id, Generation(request.generation))) and not request.is_relayed:
            raise StaleCursor("this member hasn't resynced its cursors of this link yet", epoch=key[1])
        change = partial(self._after, runner, request)
        if request.is_relayed:
            record = await self._changed(key, subscription_id, change)
        else:
            async with self._lock(key):
                before = self.get(key, subscription_id)
                record = await self._changed(key, subscription_id, change)
                try:
                    await self._on_both(runner, record, request.cause_id)
                    change(self.get(key, subscription_id))  # `_told` names whom it can't write down without this lock
                except (Fenced, OlderGeneration):
                    await self._changed(
                        key,
                        subscription_id,
                        lambda _: _taken_back(record, before, self.of_link(key).get(subscription_id)),
                    )
                    raise
        if cursors.is_drained(record, runner.record.end):
            self._broker.look_for_drained(key)

    def _after(self, runner: LinkRunner, request: pb.CommitCursorRequest, before: CursorRecord | None) -> CursorRecord:
        """What a commit makes of the cursor here. Raises Fenced, OlderGeneration, InvalidArgument, MemberBehind."""
        subscription_id, generation = SubscriptionId(request.subscription_id), Generation(request.generation)
        token, index = Token(request.token), Index(request.index)
        if request.is_copied:
            # The reader that committed it was this link's when it did, whoever was told of here since.
            end = runner.record.end
            theirs = cursors.from_parts(subscription_id, generation, token, index, Token(request.by), end)
            return cursors.further(before, theirs)
        return cursors.committed(
            before or CursorRecord(subscription_id),
            generation,
            token,
            index,
            is_relayed=request.is_relayed,
            limit=runner.readable_end,
            is_limit_known=runner.is_readable_end_known,
        )

    async def _on_both(self, runner: LinkRunner, record: CursorRecord, cause_id: str) -> None:
        """The other member has the commit, too, or it is noted that it may lack it. Raises Fenced, OlderGeneration, Unreachable.

        Where that is noted already, bringing it up passes on this one, too: one whose disk stands still, asked with each commit,
        would hold up all of them. Nor is a newer reader granted anything without this member meanwhile.
        """
        if record.whose in self._noted.get(runner.key, ()):
            return
        try:
            await self._relay(runner, record, cause_id)
        except (Unreachable, DeadlineOver, WrongIncarnation, UnknownLink, DiskFailed):
            await self._note_stale(runner, record)

    async def _relay(self, runner: LinkRunner, record: CursorRecord, cause_id: str, *, is_copied: bool = False) -> None:
        peer = self._broker.peer
        registered = peer.registered
        if registered is None or peer.connected != registered.incarnation:
            raise Unreachable("the other member can't be reached")
        request = pb.CommitCursorRequest(
            link=self._broker.link_name(runner.key, registered.incarnation),
            subscription_id=record.subscription_id,
            generation=record.generation,
            token=record.token,
            index=record.index or 0,
            is_relayed=True,
            is_copied=is_copied,
            by=record.by,
            cause_id=cause_id,
        )
        await peer.call(registered, lambda stub: stub.CommitCursor, request, RELAY_TIMEOUT_S)

    async def _note_stale(self, runner: LinkRunner, record: CursorRecord) -> None:
        """Note that the peer's cursors are stale, once per outage and generation of a subscription.

        A coordinator drops the note when no subscription is on the link any more. Whoever comes to it after that has
        another generation, and its first commit is noted anew.
        """
        await self._note(runner.key, record.whose, token=record.token)
        self._noted.setdefault(runner.key, set()).add(record.whose)
        self._broker.resync_wanted.set()  # a peer that only stood still for a moment is brought up soon

    async def _note(self, key: LinkKey, whose: Whose | None, *, token: Token = Token(0), version: int = 0) -> None:
        """Let a coordinator note whose cursors of a link are stale on the peer; None: while the chain is at `version`, nobody's.

        `token`: of the reader for whose commit it is; where a newer one was elected, it raises Fenced.
        """
        note = pb.StaleCursorsNote(
            cluster=self._broker.cluster,
            queue_id=key[0],
            epoch=key[1],
            member=self._broker.name.peer.member,
            is_stale=whose is not None,
            subscription_id=0 if whose is None else whose[0],
            generation=0 if whose is None else whose[1],
            chain_version=version,
            token=token,
            cause_id=log.new_cause_id("stale-cursors"),
            **{"from": as_message(self._broker.incarnation)},
        )
        await self._coordinators.call("NoteStaleCursors", note, NOTE_TIMEOUT_S)
        _log.info("peer's cursors noted", queue_id=key[0], epoch=key[1], is_stale=note.is_stale, cause_id=note.cause_id)

    @property
    def has_noted(self) -> bool:
        """Some link's cursors have to be brought up on the peer."""
        return bool(self._noted)

    async def note_lost(self, documents: Mapping[QueueId, ChainDocument]) -> None:
        """Note again what this member had noted, and a chain that was recovered from an earlier copy lacks. Raises as `_note`."""
        for key, noted in list(self._noted.items()):
            document = documents.get(key[0])
            if document is None or self._broker.record(key) is None:
                continue
            note = document.stale_note(key[1], self._broker.name.peer.member)
            for one in document.readers_of(key[1]):
                if one.whose in noted and not (note is not None and note.is_of(one)):
                    await self._note(key, one.whose)

    def found_stale(self, key: LinkKey) -> None:
        """The chain document says that the peer's cursors of this link are stale: this member has to bring them up."""
        self._noted.setdefault(key, set())

    async def bring_up_peer(self, chain_version: Callable[[QueueId], Awaitable[int]]) -> dict[QueueId, SeriatimError]:
        """Pass on every cursor of the links noted, then take the note back. Raises Unreachable, DeadlineOver where nobody answers.

        Returns what was answered instead, by queue: as of one that was set back, and stands still until an operator comes.
        Whether or not a coordinator answers, the note may be taken back now, or any time until the chain changes: a commit that doesn't
        reach the peer from then on is noted anew, which changes the chain.
        """
        refused: dict[QueueId, SeriatimError] = {}
        for key in list(self._noted):
            try:
                await self._bring_up_in(key, chain_version)
            except SeriatimError as error:
                if nobody_answers(error):
                    raise  # and all the others would wait for the same one
                refused.setdefault(key[0], error)
        return refused

    async def _bring_up_in(self, key: LinkKey, chain_version: Callable[[QueueId], Awaitable[int]]) -> None:
        runner = self._broker.find(key)
        if runner is None or not runner.record.has_cursors:
            # A blank disk, which has yet to get them itself: nothing that it could bring anybody up by (H7).
            self._noted.pop(key, None)
            return
        async with self._lock(key):
            for record in list(self.of_link(key).values()):  # a copy: the peer may pass on its own meanwhile
                if record.index is not None:
                    await self._relay(runner, record, "bring-up", is_copied=True)
            version = await chain_version(key[0])
            self._noted[key] = set()
            try:
                await self._note(key, None, version=version)
            except OlderVersion:
                return  # the next time
            self._noted.pop(key, None)

    @uninterrupted
    async def take_from_peer(self, runner: LinkRunner) -> None:
        """Take the further cursors from the peer, and count this link's as whole. Raises what the peer answers."""
        peer = self._broker.peer
        registered = peer.to_call()
        async with self._lock(runner.key):
            request = pb.ListCursorsRequest(link=self._broker.link_name(runner.key, registered.incarnation))
            reply = await peer.call(registered, lambda stub: stub.ListCursors, request, RELAY_TIMEOUT_S)
            for cursor in reply.cursors:
                theirs = cursors.from_parts(
                    SubscriptionId(cursor.subscription_id),
                    Generation(cursor.generation),
                    Token(cursor.token),
                    Index(cursor.index - 1) if cursor.index else None,
                    Token(cursor.by),
                    runner.record.end,
                )
                await self._changed(runner.key, theirs.subscription_id, partial(cursors.further, other=theirs))
        await self.lack(runner, ())

    @uninterrupted
    async def lack(self, runner: LinkRunner, of: tuple[Whose, ...]) -> None:
        """Of those whose commits may be missing here, these are left."""
        async with self._broker.lock(runner.key):
            lacks = tuple(one for one in of if runner.record.lacks_of(one))
            if lacks != runner.record.lacks:
                await self._broker.keep(runner, replace(runner.record, lacks=lacks))
        self._broker.look_for_drained(runner.key)

    def listed(self, key: LinkKey) -> pb.ListCursorsReply:
        """Every cursor of a link for the peer. The index travels one higher, so that 0 says that none was committed."""
        return pb.ListCursorsReply(
            cursors=[
                pb.Cursor(
                    subscription_id=record.subscription_id,
                    generation=record.generation,
                    token=record.token,
                    index=0 if record.index is None else record.index + 1,
                    by=record.by,
                )
                for record in self.of_link(key).values()
            ]
        )

    # ---- drained

    async def report_drained(self) -> None:
        """Report what is drained until a coordinator has noted it; runs as long as the process."""
        wanted = self._broker.drained_wanted
        while True:
            wanted.clear()
            is_done = await self._report_once()
            await asyncio.sleep(TOGETHER_S)
            await is_set_within(wanted, None if is_done else REPEAT_S)

    def report_anew(self, queue_id: QueueId) -> None:
        """ZooKeeper had lost the queue's chain, or had an older one, until it was recovered: what was noted there may be lost for good."""
        for record in self._broker.links_of(queue_id):
            self._reported.pop(record.key, None)
            self._broker.look_for_drained(record.key)

    async def _report_once(self) -> bool:
        """Report each once that may be drained. False: some are to be reported again."""
        waiting = self._broker.maybe_drained
        for key in sorted(waiting):
            waiting.discard(key)
            try:
                is_done = await self._reported_of(key)
            except (Unreachable, DeadlineOver):
                waiting.add(key)  # and the others behind it: nobody is there to be told
                return False
            except DiskFailed as error:  # said by whoever reads this link; the others can still be told
                if key not in self._unreadable:
                    _log.warning("cursors can't be read", queue_id=key[0], epoch=key[1], reason=error)
                self._unreadable.add(key)
                is_done = False
            if not is_done:
                waiting.add(key)
            await asyncio.sleep(0)  # after a start there are as many as links
        return not waiting

    async def _reported_of(self, key: LinkKey) -> bool:
        """Report what is drained of one link. Raises Unreachable, DeadlineOver."""
        record = self._broker.record(key)
        if record is None or record.end is None:
            return True
        reported = self._reported.get(key, set())
        # A member that is still refilling reports nothing.
        of = {
            cursor.whose: cursor.by
            for cursor in self.of_link(key).values()
            if cursor.whose not in reported
            and not record.lacks_of(cursor.whose)
            and cursors.is_drained(cursor, record.end)
        }
        if not of:
            return True
        cause_id = log.new_cause_id("drained")
        try:
            noted = await self._report(key, of, cause_id)
        except SeriatimError as error:
            _log.lasting("drained report failed", queue_id=key[0], epoch=key[1], reason=error, cause_id=cause_id)
            if nobody_answers(error):
                raise
            return False
        known = self._reported.setdefault(key, set())
        known |= noted
        # Who was sought, or deleted, since comes to no end any more.
        known &= {cursor.whose for cursor in self._records.get(key, {}).values()}
        is_done = noted.issuperset(of)
        if noted and not is_done:
            self._broker.look_for_drained(key)  # the others now, not in a second
        return is_done

    async def _report(self, key: LinkKey, of: Mapping[Whose, Token], cause_id: str) -> frozenset[Whose]:
        """Those of whom nothing is left to say: an earlier coordinator hears of the first one only, and doesn't say."""
        first, *also = (
            pb.Drained(subscription_id=one, generation=generation, by=by) for (one, generation), by in of.items()
        )
        report = pb.DrainedReport(
            cluster=self._broker.cluster,
            queue_id=key[0],
            epoch=key[1],
            subscription_id=first.subscription_id,
            generation=first.generation,
            by=first.by,
            also=also,
            member=self._broker.name.member,  # else coordinators of before, which look for notes of it, take an earlier reader's end
            cause_id=cause_id,
            **{"from": as_message(self._broker.incarnation)},
        )
        reply = await self._coordinators.call("ReportDrained", report, NOTE_TIMEOUT_S)
        noted = reply.noted or [first]
        _log.info(
            "drained reported", queue_id=key[0], epoch=key[1], subscriptions=[one.subscription_id for one in noted]
        )
        return frozenset(whose_from((one.subscription_id, one.generation) for one in noted))


def _taken_back(record: CursorRecord, before: CursorRecord | None, now: CursorRecord | None) -> CursorRecord:
    """The cursor without a commit that was refused; as it is where a newer reader was told of meanwhile, whose grant may rest on it."""
    return before if now == record and before is not None else now or record
