"""What members and coordinators say of themselves, each in an ephemeral node of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from seriatim.protocol.checksums import is_whole, text_with_checksum
from seriatim.protocol.names import Incarnation, QueueId

_PROBLEM_CHARACTERS = 100_000
"""ZooKeeper breaks the connection of who sends it a node of 1 MiB; the names of queues that it lost may be that long."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a member says of itself in its ephemeral node.

    `peer`: the incarnation of the other member that it is connected to. `is_in_sync`: it holds everything it should
    (protocol.md 7). `is_accepting`: its disk has room for records (H17). `problem`: for a person; empty where there is none.
    `outside`: the address that reaches it from outside of the cluster's network; empty where `address` does. `has_compared`: its
    disk with the chains, since it came to ZooKeeper. `set_back`: queues of which its disk knows more than ZooKeeper. `direct`:
    where it takes batches without gRPC; empty: nowhere. `unread`: queues whose chains it doesn't understand, or of which the other
    member knows more than ZooKeeper. In sync is said of none of these. `lacking`: where it isn't in sync, the queues of which it lacks
    something, and of no others; none: that isn't known.
    """

    incarnation: Incarnation
    address: str
    peer: Incarnation | None = None
    is_in_sync: bool = False
    is_accepting: bool = True
    problem: str = ""
    outside: str = ""
    has_compared: bool = True
    set_back: tuple[QueueId, ...] = ()
    direct: str = ""
    unread: tuple[QueueId, ...] = ()
    lacking: tuple[QueueId, ...] = ()

    def is_in_sync_with(self, queue_id: QueueId) -> bool:
        """Whether it holds everything it should of a queue."""
        is_told = self.is_in_sync or bool(self.lacking)
        return is_told and queue_id not in (*self.lacking, *self.unread, *self.set_back)

    def encode(self) -> bytes:
        content = {
            "disk_id": self.incarnation.disk_id,
            "start": self.incarnation.start,
            "address": self.address,
            "peer": None if self.peer is None else [self.peer.disk_id, self.peer.start],
            "is_in_sync": self.is_in_sync,
            "is_accepting": self.is_accepting,
            "problem": self.problem
            if len(self.problem) <= _PROBLEM_CHARACTERS
            else f"{self.problem[:_PROBLEM_CHARACTERS]}…",
            "outside": self.outside,
            "has_compared": self.has_compared,
            "set_back": self.set_back,
            "direct": self.direct,
            "unread": self.unread,
            "lacking": self.lacking,
        }
        return text_with_checksum(json.dumps(content)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Registration:
        content = _content(data)
        peer = content["peer"]
        return cls(
            Incarnation(content["disk_id"], content["start"]),
            content["address"],
            None if peer is None else Incarnation(*peer),
            content["is_in_sync"],
            content["is_accepting"],
            content["problem"],
            content.get("outside", ""),
            content.get("has_compared", True),
            tuple(map(QueueId, content.get("set_back", ()))),
            content.get("direct", ""),
            tuple(map(QueueId, content.get("unread", ()))),
            tuple(map(QueueId, content.get("lacking", ()))),
        )


@dataclass(frozen=True, slots=True)
class CoordinatorRegistration:
    """What a coordinator says of itself in its ephemeral node. `outside`: as in `Registration`."""

    address: str
    outside: str = ""

    def encode(self) -> bytes:
        return text_with_checksum(json.dumps({"address": self.address, "outside": self.outside})).encode()

    @classmethod
    def decode(cls, data: bytes) -> CoordinatorRegistration:
        content = _content(data)
        return cls(content["address"], content.get("outside", ""))


def _content(data: bytes) -> Any:
    """Raises ValueError where it isn't what was written."""
    text = data.decode()
    if not is_whole(text):
        raise ValueError("bits have changed")
    return json.loads(text)
