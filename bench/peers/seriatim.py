"""Seriatim: ZooKeeper, two coordinators and two groups of two members, the least in which any one process may fail."""

from __future__ import annotations

from pathlib import Path

from bench.cases import Kind
from bench.peers.base import Peer
from seriatim.cli import coordinators
from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from seriatim.cli.views import open_link
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import WorldError

_GROUPS = 2


class Seriatim(Peer):
    """As it comes; durability sync."""

    name = "seriatim"
    title = "Seriatim, 2 copies, both flushed"
    client = "seriatim"
    kinds = frozenset(Kind)

    def __init__(self, directory: Path, groups: int = _GROUPS, start_timeout_s: float = 60.0) -> None:
        super().__init__(directory)
        self.groups = groups
        self._cluster = DevelopmentCluster(
            ClusterSettings(directory, groups=groups, is_restarted=True, start_timeout_s=start_timeout_s)
        )
        self.supervisor = self._cluster.supervisor

    def start(self) -> None:
        self._cluster.start()

    def make_queue(self, name: str) -> dict[str, str]:
        settings = pb.QueueSettings(durability="sync")
        coordinators.call(
            self._cluster.coordinators, "CreateQueue", pb.CreateQueueRequest(queue=name, settings=settings)
        )
        return {"coordinators": self._cluster.coordinators, "queue": name}

    def close(self) -> None:
        self._cluster.close()

    def leader(self, queue: str) -> str:
        link = open_link(self._view(queue))
        if link is None:
            raise LookupError(f"queue {queue} has no open link")
        return f"{link.group}-{link.master.member}"

    def is_whole(self, queue: str) -> bool:
        try:
            view = self._view(queue)
        except WorldError:
            return False
        link = open_link(view)
        return link is not None and link.state == "open" and len(view.send_list) == self.groups

    def _view(self, queue: str) -> pb.QueueView:
        return coordinators.call(self._cluster.coordinators, "DescribeQueue", pb.QueueRequest(queue=queue))  # type: ignore[no-any-return]
