"""Seriatim's nodes in ZooKeeper: where they are, and how what they hold is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from seriatim.protocol import chain_json
from seriatim.protocol.errors import WorldError
from seriatim.protocol.names import Epoch, QueueId, SubscriptionId
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.zookeeper import NoNode, Watch, ZooKeeperSession

_Result = TypeVar("_Result")
_NOT_READ = AttributeError, KeyError, TypeError, ValueError


class NotUnderstood(WorldError):
    """A node holds what this version can't read: somebody else wrote it, or a newer one did. It costs what the node is about, and nothing else."""

    code = "not-understood"
    next_step = "if Seriatim didn't write it, delete that node"


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a cluster's nodes are. Everything of a queue hangs on its id, not on its name (H16)."""

    cluster: str

    @property
    def root(self) -> str:
        return f"/seriatim/{self.cluster}"

    @property
    def groups(self) -> str:
        return f"{self.root}/groups"

    def group(self, group: str) -> str:
        return f"{self.groups}/{group}"

    def members(self, group: str) -> str:
        return f"{self.groups}/{group}/members"

    def member(self, group: str, member: str) -> str:
        return f"{self.members(group)}/{member}"

    def leases(self, group: str) -> str:
        return f"{self.groups}/{group}/leases"

    def lease(self, group: str, member: str) -> str:
        return f"{self.leases(group)}/{member}"

    @property
    def coordinators(self) -> str:
        return f"{self.root}/coordinators"

    @property
    def coordinator_election(self) -> str:
        return f"{self.root}/coordinator_election"

    @property
    def names(self) -> str:
        return f"{self.root}/names"

    def name(self, queue: str) -> str:
        return f"{self.names}/{queue}"

    @property
    def ids(self) -> str:
        return f"{self.root}/ids"

    @property
    def queues(self) -> str:
        return f"{self.root}/queues"

    def queue(self, queue_id: QueueId) -> str:
        return f"{self.queues}/{queue_id}"

    def chain(self, queue_id: QueueId) -> str:
        return f"{self.queues}/{queue_id}/chain"

    def senders(self, queue_id: QueueId) -> str:
        return f"{self.queues}/{queue_id}/senders"

    def all_readers(self, queue_id: QueueId) -> str:
        return f"{self.queues}/{queue_id}/readers"

    def readers(self, queue_id: QueueId, subscription_id: SubscriptionId) -> str:
        return f"{self.all_readers(queue_id)}/{subscription_id}"

    def seals(self, queue_id: QueueId) -> str:
        return f"{self.queues}/{queue_id}/seals"

    def seal(self, queue_id: QueueId, epoch: Epoch, member: str) -> str:
        return f"{self.queues}/{queue_id}/seals/{epoch}-{member}"


def queue_ids(names: Iterable[str]) -> list[QueueId]:
    """The queues whose nodes have these names; what is no number was put there by somebody else."""
    return [QueueId(int(name)) for name in names if name.isdecimal()]


async def read_as(
    decode: Callable[[bytes], _Result], session: ZooKeeperSession, path: str, watch: Watch | None = None
) -> tuple[_Result, int]:
    """What a node holds, and its version. Raises NotUnderstood, and as `ZooKeeperSession.get`."""
    with contextlib.suppress(*_NOT_READ):  # it may have been damaged on its way
        data, version = await session.get(path, watch)
        return decode(data), version
    data, version = await session.get(path, watch)
    try:
        return decode(data), version
    except _NOT_READ as error:
        raise NotUnderstood(f"{path} in ZooKeeper holds what can't be read here: {error!r}", path=path) from error


@dataclass(frozen=True, slots=True)
class ChainNode:
    """What a chain's node holds. `is_whole`: as it was written, as far as can be told."""

    data: bytes
    version: int
    is_whole: bool


async def read_chain_node(
    session: ZooKeeperSession, path: str, watch: Watch | None = None, known: int = -1
) -> ChainNode:
    """What a chain's node holds, read again where it was damaged on its way. Raises as `ZooKeeperSession.get`.

    `known`: the version that was seen last. Another one is asked for once more, for no checksum has it: one that was damaged, and is higher
    than there is any, would make an older chain of each that follows.
    """
    data, version = await session.get(path, watch)
    is_whole = chain_json.is_whole(data)
    if not is_whole or (version != known and version != await session.version(path)):
        data, version = await session.get(path, watch)
        is_whole = chain_json.is_whole(data)
    return ChainNode(data, version, is_whole)


def queue_id_from(data: bytes) -> QueueId:
    """What a name's node holds."""
    return QueueId(int(data))


async def read_coordinators(
    session: ZooKeeperSession, paths: Paths, names: Iterable[str]
) -> dict[str, CoordinatorRegistration]:
    """What those of them say of themselves that are still there. Raises as `ZooKeeperSession.get`, but NoNode."""
    found: dict[str, CoordinatorRegistration] = {}
    for name in names:
        with contextlib.suppress(NoNode, NotUnderstood):
            found[name], _ = await read_as(CoordinatorRegistration.decode, session, f"{paths.coordinators}/{name}")
    return found
