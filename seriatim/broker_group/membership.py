"""This member in ZooKeeper: session, registration, lease; the peer's registration; the chains of links not ended here.

A new session gives no lease, and no registration, before every open link is sealed (protocol.md 5.5); nor does one in which the
disk stood still. A lease is renewed by writes of this session to its own node, and by nothing else (H10). Links that are closing
while no coordinator comes are sealed by the member itself, and the answer is written beside the chain document (5.4).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from seriatim.broker_group import sealing
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core import disk
from seriatim.broker_group.core.link_record import LinkKey, LinkRecord
from seriatim.broker_group.core.setback import SeenChain
from seriatim.broker_group.peer import Registered
from seriatim.protocol import chain_json, log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, ChainMember, Link, LinkState
from seriatim.protocol.checksums import with_checksum
from seriatim.protocol.clock import boottime_s
from seriatim.protocol.errors import (
    ChainSetBack,
    IncompatibleVersion,
    OlderVersion,
    UnknownLink,
    Unreachable,
    WorldError,
)
from seriatim.protocol.flag import is_set_within
from seriatim.protocol.incarnations import as_message
from seriatim.protocol.lease import Lease, renewal_interval_s
from seriatim.protocol.names import ChainVersion, QueueId
from seriatim.protocol.nodes import NotUnderstood, Paths, read_as, read_chain_node
from seriatim.protocol.patience import backoff_s
from seriatim.protocol.registration import Registration
from seriatim.protocol.zookeeper import NodeExists, NoNode, SessionState, TellsOf, ZooKeeperSession, check_path

_log = log.logger("broker.membership")

RETRY_S = 0.1
TAKEN_S, TAKEN_MAX_S = 0.5, 2.0
TAKEN_TOLD_EVERY = 30
"""How long this place is waited for where another process has it, at first and later; and every how many times that is told."""
OPENED_S = 0.05
"""How long after a link was opened here its chain is looked at for the first time."""
GRACE_S = 0.5
"""How long a link may be closing without a coordinator's Seal before the member seals it by itself."""
STANDS_ASIDE = "its disk stands still: it is not registered until that goes on"
"""What the node of its lease says to operators meanwhile; its registration said it until then, and has to go."""


class Membership:
    """See the module.

    `direct`: where batches come without gRPC, if anywhere; set before the session is run.
    """

    def __init__(self, broker: Broker, session: ZooKeeperSession, address: str, outside: str = "") -> None:
        self._broker = broker
        self._session = session
        self._paths = Paths(broker.cluster)
        self._place = self._paths.member(broker.name.group, broker.name.member)
        self._lease = self._paths.lease(broker.name.group, broker.name.member)
        self._address = address
        self._outside = outside
        self.direct = ""
        self._registered_in = 0  # the session that the registration was written in last
        self._told_room = True
        self._peer_changed = asyncio.Event()
        self._chains: set[QueueId] = {record.queue_id for record in broker.links() if record.end is None}
        self._chains_changed = asyncio.Event()
        self._late: set[LinkKey] = set()
        self._seals_written: set[LinkKey] = set()
        self.is_registered = asyncio.Event()
        session.on_state(self._session_changed)
        broker.opened = self._link_opened
        broker.peer.changed = self._peer_reached

    def _peer_reached(self) -> None:
        """Or it isn't any more."""
        self._broker.is_registration_old.set()
        self._broker.resync_wanted.set()

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._broker.lease = Lease(0)
            self.is_registered.clear()
        if state is SessionState.CONNECTED:
            self._broker.is_registration_old.set()  # what happened to the registration meanwhile wasn't seen
            self._broker.resync_wanted.set()
        else:
            # ZooKeeper may be set back meanwhile, also within a session. Whatever stands there then, its next leader is told anew.
            self._broker.has_compared, self._registered_in = False, 0
            self._broker.disconnections += 1
        self._peer_changed.set()
        self._chains_changed.set()

    def _link_opened(self, key: LinkKey) -> None:
        # Not at once: whoever opens a link waits for this member, and nobody closes it within that time.
        asyncio.get_running_loop().call_later(OPENED_S, self._watch, key[0])

    # ---- session and lease

    async def run_session(self) -> None:
        """Seal, register, renew; again for each session."""
        told, tries = "", 0
        while True:
            try:
                await self._serve_session()
            except WorldError as error:
                if error.message != told or self.is_registered.is_set():
                    _log.info("session interrupted", reason=error.message)
                told = error.message
            except NodeExists:
                await self._wait_for_place(tries)
                tries += 1
            except NoNode:
                _log.info("a node went between two looks at it: another session's end, or the group was removed")
            if self.is_registered.is_set():
                tries = 0
            self.is_registered.clear()
            await asyncio.sleep(RETRY_S)

    async def _wait_for_place(self, tries: int) -> None:
        """Another process is registered as this member: one on an earlier disk, whose session soon ends, or two were set up as one."""
        if tries % TAKEN_TOLD_EVERY == 0:
            other = None
            with contextlib.suppress(NoNode, WorldError):
                other, _ = await read_as(Registration.decode, self._session, self._place)
            _log.warning(
                "not registered: another broker is, as this member; if both are to run, give one another group or member",
                member=self._broker.name,
                incarnation=self._broker.incarnation,
                other=None if other is None else other.incarnation,
                other_address=None if other is None else other.address,
            )
        await asyncio.sleep(backoff_s(TAKEN_S, TAKEN_MAX_S, tries))

    async def _serve_session(self) -> None:
        if self._session.state is not SessionState.CONNECTED:
            raise Unreachable("ZooKeeper isn't connected")
        session_id, broker = self._session.session_id, self._broker
        if broker.store.stands_still:
            await self._stand_aside(session_id)
            return
        if broker.lease.holder != session_id:
            broker.lease = Lease(session_id)
            await sealing.seal_open_links(broker)
        self._check_lease(session_id)
        group = broker.name.group
        try:
            with contextlib.suppress(NodeExists):
                await self._session.create(self._paths.group(group), b'{"is_draining": false}', parents=True)
        except NoNode as error:
            check_path(self._session.hosts, error)
            raise
        await self._session.ensure(self._paths.members(group))
        await self._session.ensure(self._paths.leases(group))
        await self._register(session_id)
        await self._renew(session_id, is_first=True)
        self._check_lease(session_id)
        broker.lease = broker.lease.admitted()
        self.is_registered.set()
        self._peer_changed.set()
        self._chains_changed.set()
        _log.info("registered", member=broker.name, incarnation=broker.incarnation, address=self._address)
        while self._session.session_id == session_id and not self._broker.store.stands_still:
            await self._renew(session_id, is_first=False)
            self._check_lease(session_id)
            interval_s = renewal_interval_s(self._session.session_timeout_s)
            until_s = boottime_s() + interval_s
            while (left_s := until_s - boottime_s()) > 0:
                if not await is_set_within(self._broker.is_registration_old, left_s):
                    break
                await self._register(session_id)
            self._look_at_disk()

    async def _stand_aside(self, session_id: int) -> None:
        """Neither lease nor registration until the disk goes on: where both members' disks hang, nobody is there to be waited for (5.4).

        The lease goes first, for who isn't registered takes no records; what is written to its node renews none. As behind a lost session,
        what is open is sealed before both come back (5.5).
        """
        self._broker.lease = Lease(0)
        _log.warning("not registered until the disk goes on: it stands still", member=self._broker.name)
        with contextlib.suppress(NoNode, NodeExists):
            await self._own(self._lease, STANDS_ASIDE.encode(), session_id)
        with contextlib.suppress(NoNode):
            if await self._session.owner(self._place) == session_id:
                await self._session.delete(self._place)
        while self._broker.store.stands_still:  # noqa: ASYNC110 - nobody tells of that
            await asyncio.sleep(RETRY_S)
        _log.info("the disk goes on")

    def _check_lease(self, session_id: int) -> None:
        """Raises Unreachable where the loss of an earlier session was told only when this one had begun here: it has to begin again."""
        if self._broker.lease.holder != session_id:
            raise Unreachable("the session was lost meanwhile")

    def _look_at_disk(self) -> None:
        """How much room there is. It is told where that changes whether records are taken; what was taken may have done so, too."""
        broker = self._broker
        broker.room = room = disk.seen(broker.room, broker.store.free_bytes())
        if room.has_room != self._told_room:
            self._broker.is_registration_old.set()
            _log.warning("room on disk changed", has_room=room.has_room, free_bytes=room.free_bytes)
        broker.store.make_room(is_short=not room.has_room, is_enough_to_copy=disk.has_room_to_copy(room))

    async def _renew(self, session_id: int, *, is_first: bool) -> None:
        sent_at_s = boottime_s()
        if is_first:
            await self._own(self._lease, b"", session_id)
        else:
            await self._session.set(self._lease, b"")
        if self._session.session_id == session_id:
            timeout_s = self._session.session_timeout_s
            self._broker.lease = self._broker.lease.renewed(session_id, sent_at_s, timeout_s)

    async def _own(self, path: str, data: bytes, session_id: int) -> None:
        """Make an ephemeral node of this session. Raises NodeExists where another session has it, Unreachable where this one is over."""
        try:
            await self._make(path, data, session_id)
        except NodeExists:
            if await self._session.owner(path) == session_id:
                await self._session.set(path, data)
            elif await self._is_of_this_disk():
                await self._session.delete(path)
                await self._make(path, data, session_id)
            else:
                raise

    async def _make(self, path: str, data: bytes, session_id: int) -> None:
        if self._session.session_id != session_id:
            # A later session would have the node before the open links are sealed (5.5).
            raise Unreachable("the ZooKeeper session is over")
        await self._session.create(path, data, ephemeral=True)

    async def _is_of_this_disk(self) -> bool:
        """Whether who is registered in this place is an earlier session of this disk: of this process, or of a start before.

        Such a process is dead, for this one has its lock on the directory; its node needn't wait for its session's end.
        The same start elsewhere is a copy of the disk: two such would take the place from each other without end.
        """
        try:
            there, _ = await read_as(Registration.decode, self._session, self._place)
        except NoNode:
            return True  # only the lease's node is left of a session that is ending
        mine = self._broker.incarnation
        if there.incarnation == mine:
            return there.address == self._address
        return there.incarnation.disk_id == mine.disk_id and there.incarnation.start < mine.start

    async def _register(self, session_id: int) -> None:
        """Say what there is to say of this member, until that is what is read, under a watch.

        What an earlier process of this place wrote, or deleted, just before it ended may come later than all that this one does:
        a write names no version, and a node that is made anew begins with the same ones.
        """
        while True:
            self._broker.is_registration_old.clear()
            said = self._registration().encode()
            with contextlib.suppress(NoNode):
                found, _ = await self._session.get(self._place, self._said_otherwise)
                if found == said and self._registered_in == session_id:
                    return
            await self._own(self._place, said, session_id)
            self._registered_in = session_id

    def _said_otherwise(self) -> None:
        """A watch. It is called without a connection, too: then there is nothing to be seen until that is back."""
        if self._session.state is SessionState.CONNECTED:
            self._broker.is_registration_old.set()

    def _registration(self) -> Registration:
        broker = self._broker
        problem, lacking = broker.problem, () if broker.doubt else tuple(sorted(broker.lacking))
        is_in_sync = not problem
        if broker.store.failure is not None:  # also where nobody met it yet: another member is to be found now
            problem, is_in_sync, lacking = broker.store.failure.message, False, ()
        if not broker.room.has_room:
            reserve_mb = broker.room.reserve_bytes // 1024**2
            full = f"no room on the disk for more records: --reserve-mb keeps {reserve_mb:,} MB free"
            problem = problem or broker.store.why_no_room or full
        if broker.unknown_chains:
            names = ", ".join(sorted(broker.unknown_chains.values()))
            problem = problem or f"it keeps a chain of which ZooKeeper knows nothing: queue {names}"
        if broker.unread_chains:
            names = self._names(broker.unread_chains)
            problem = (
                problem or f"it doesn't understand the chain, nor what it lacks, of queue {names}: its log says why"
            )
        if broker.known_to_peer:
            known = f"{broker.name.peer} knows more of queue {self._names(broker.known_to_peer)} than ZooKeeper"
            problem = problem or f"{known}: what it lacks here nobody can tell"
        self._told_room = broker.room.has_room
        return Registration(
            broker.incarnation, self._address, broker.peer.connected, is_in_sync, broker.room.has_room, problem,
            self._outside, broker.has_compared, tuple(sorted({*broker.set_back, *broker.unknown_chains})),
            self.direct, self._untold(), lacking,
        )  # fmt: skip

    def _untold(self) -> tuple[QueueId, ...]:
        """Queues of which nobody can tell what is lacking here; of those that ZooKeeper knows again, the pass behind that tells."""
        broker = self._broker
        known_again = broker.unknown_before - broker.unknown_chains.keys()
        return tuple(sorted(broker.unread_chains.keys() | broker.known_to_peer | known_again))

    def _names(self, queue_ids: Iterable[QueueId]) -> str:
        """Of these queues, as far as a copy of their chains is here."""
        copies = self._broker.kept_chains
        return ", ".join(copies[one].queue if one in copies else f"with id {one}" for one in sorted(queue_ids))

    # ---- the peer

    async def watch_peer(self) -> None:
        """Follow the other member's registration."""
        name = self._broker.name
        path = self._paths.member(name.group, name.peer.member)
        while True:
            self._peer_changed.clear()
            try:
                try:
                    registration, _ = await read_as(Registration.decode, self._session, path, self._peer_changed.set)
                    self._broker.peer.register(
                        Registered(registration.incarnation, registration.address, registration.direct)
                    )
                    self._peer_compared(registration)
                except NoNode:
                    self._broker.peer.register(None)
                    if await self._session.exists(path, self._peer_changed.set):
                        continue
            except NotUnderstood as error:  # it stays who it was until it says something else
                _log.error("the other member's registration can't be read", reason=error)
            except WorldError:
                await asyncio.sleep(RETRY_S)
                continue
            await self._peer_changed.wait()

    def _peer_compared(self, registration: Registration) -> None:
        """What it knows more than ZooKeeper stays known while it is away, or hasn't compared its disk yet."""
        peer = self._broker.peer
        if registration.has_compared and registration.set_back != peer.set_back:
            peer.set_back = registration.set_back
            self._broker.resync_wanted.set()

    # ---- chains

    def _watch(self, queue_id: QueueId) -> None:
        self._chains.add(queue_id)
        self._chains_changed.set()

    async def watch_chains(self) -> None:
        """Follow the chains of the queues of which a link hasn't ended here."""
        await self.is_registered.wait()
        while True:
            await self._chains_changed.wait()
            self._chains_changed.clear()
            for queue_id in list(self._chains):
                self._chains.discard(queue_id)
                try:
                    await self._look_at(queue_id)
                except NoNode:
                    continue
                except IncompatibleVersion:  # of a newer version: records are taken and served all the same
                    self._broker.resync_wanted.set()  # which says so
                except WorldError:
                    self._chains.add(queue_id)
                    await asyncio.sleep(RETRY_S)
                    self._chains_changed.set()

    async def _look_at(self, queue_id: QueueId) -> None:
        mine = [record for record in self._broker.links_of(queue_id) if record.end is None]
        self._forget_ended(queue_id, {record.key for record in mine})
        if not mine:
            return
        path, known = self._paths.chain(queue_id), self._broker.kept_version(queue_id)
        node = await read_chain_node(self._session, path, TellsOf(self._watch, queue_id), known)
        document, version = chain_json.decode(node.data), ChainVersion(node.version)
        await self._broker.saw_chain(SeenChain(document, version, node.data))
        for record in mine:
            link = document.link(record.epoch)
            if link is not None and link.group == self._broker.name.group:
                # On a slow disk it may be let go before it could be sealed; a chain that is recovered has low versions at first.
                with contextlib.suppress(UnknownLink, ChainSetBack, OlderVersion):
                    await self._look_at_link(document, version, link, record)

    def _forget_ended(self, queue_id: QueueId, mine: set[LinkKey]) -> None:
        for known in (self._late, self._seals_written):
            known -= {key for key in known if key[0] == queue_id and key not in mine}

    async def _look_at_link(
        self, document: ChainDocument, version: ChainVersion, link: Link, record: LinkRecord
    ) -> None:
        certificate = link.certificate
        if certificate is not None:
            await sealing.record_end(
                self._broker,
                LinkRecord(
                    *record.key,
                    durability=link.durability,
                    chain_version=version,
                    end=certificate.end,
                    end_hash=certificate.link_hash,
                    is_abandoned=certificate.is_abandoned,
                ),
            )
        elif link.state in (LinkState.CLOSING, LinkState.LOST) and record.key not in self._seals_written:
            asyncio.get_running_loop().call_later(GRACE_S, self._watch, document.queue_id)
            if record.key in self._late:
                await self._seal_by_itself(document, link, version)
            self._late.add(record.key)

    async def _seal_by_itself(self, document: ChainDocument, link: Link, version: ChainVersion) -> None:
        """No coordinator got the answer so far: seal, and write the answer beside the chain document."""
        request = pb.SealRequest(
            link=pb.LinkName(cluster=self._broker.cluster, queue_id=document.queue_id, epoch=link.epoch),
            chain_version=version,
            master=_message(link.master),
            slave=_message(link.slave),
            durability=link.durability.value,
            cause_id=log.new_cause_id("self-seal"),
        )
        data = with_checksum((await sealing.seal(self._broker, request)).SerializeToString())
        keys = {"queue": document.name, "epoch": link.epoch, "cause_id": request.cause_id}
        if len(data) > chain_json.MAX_BYTES:  # of hundreds of sources, whose marks are told behind each batch in flight
            _log.warning("seal is too long to be written beside the chain", size_bytes=len(data), **keys)
        else:
            path = self._paths.seal(document.queue_id, link.epoch, self._broker.name.member)
            try:  # without what it lies in: a queue that was cleared away meanwhile isn't to be cleared away for ever
                await self._session.create(path, data)
            except NodeExists:
                await self._session.set(path, data)
            if (await self._session.get(path))[0] != data:  # damaged on its way: it is written again at the next look
                return
            _log.info("seal written beside the chain", **keys)
        self._seals_written.add((document.queue_id, link.epoch))

    async def is_first_disk(self, key: LinkKey) -> bool:
        """Whether the chain names this disk for a link, so that every cursor commit of it came here, or was noted. Raises Unreachable."""
        try:
            node = await read_chain_node(self._session, self._paths.chain(key[0]))
        except NoNode:
            return False
        link = chain_json.decode(node.data).link(key[1])
        side = None if link is None or link.group != self._broker.name.group else link.side(self._broker.name.member)
        return side is not None and side.incarnation.disk_id == self._broker.incarnation.disk_id


def _message(member: ChainMember) -> pb.LinkMember:
    return pb.LinkMember(group=member.name.group, member=member.name.member, incarnation=as_message(member.incarnation))
