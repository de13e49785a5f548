"""What an exploration is limited to."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = (
    "crash", "blank", "expiry", "append stream", "replication stream", "deadline", "slow call", "coordinator",
    "slow open", "slow seal",
)  # fmt: skip
"""What may fail.

    crash               a member's process dies; its disk forgets any suffix of what wasn't flushed; it starts again
    blank               the same, and it comes back with a blank disk
    expiry              a living member's ZooKeeper session expires: first its lease ends
    append stream       the stream of a sender to a master breaks; what is on its way may still arrive
    replication stream  the stream of a master to its slave breaks; the same
    deadline            a sender's deadline passes although nothing broke
    slow call           a sender gives its AcquireSend up, which goes on
    coordinator         a coordinator dies at any step of a call, also between a write and its answer
    slow open, seal     the deadline of OpenLink, or Seal, passes; the request arrives later, or only its answer is lost
"""


@dataclass(frozen=True)
class Bounds:
    """`own` 0: the source's seqs 1 to `records`, sent by whoever is elected, from its resume point (as of a database log).

    Otherwise: each instance sends `own` records of its own in each term, with the seqs that it gives by itself.
    `groups`: 1 or 2. `kinds`: the failures that may happen, together at most `failures`.
    `starts_reported`: A was granted a link, and has just reported that it failed; otherwise nothing was ever sent.
    `is_thrifty`: steps that can be taken at once are (see `world`).
    """

    groups: int = 2
    records: int = 2
    own: int = 0
    failures: int = 1
    takeovers: int = 1
    kinds: tuple[str, ...] = KINDS
    starts_reported: bool = False
    is_thrifty: bool = True

    def __str__(self) -> str:
        what = f"{self.own} of each instance" if self.own else str(self.records)
        kinds = "any kind" if self.kinds == KINDS else " or ".join(self.kinds) or "none"
        return f"groups={self.groups} records={what} failures={self.failures} ({kinds}) take-overs={self.takeovers}"


QUICK = (
    Bounds(failures=0, takeovers=1),
    Bounds(failures=0, takeovers=2),
    Bounds(own=1, failures=0, takeovers=2),
    Bounds(records=1, failures=1, takeovers=0),
    Bounds(records=2, failures=1, takeovers=0),
    Bounds(kinds=("deadline",)),
)
"""What `make test` explores."""
