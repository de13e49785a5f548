"""Every error that Seriatim raises or sends, in one tree.

    SeriatimError
    ├── CallerError            the request is wrong: sending it again can't help
    │   ├── InvalidArgument
    │   ├── RecordTooLarge
    │   ├── MalformedFrame
    │   ├── UnknownQueue, QueueExists
    │   ├── UnknownGroup
    │   ├── UnknownSubscription, SubscriptionExists
    │   ├── SeqNotRising
    │   ├── TooManySources     of one queue
    │   ├── TooManyElections   of one queue's senders, for records without seqs of the application's own
    │   ├── WrongCluster
    │   └── IncompatibleVersion
    │       └── NoChainDocument    what a queue's node holds is none, of no version
    ├── RefusedError           the request was right once and no longer is
    │   ├── Fenced             somebody was elected after the caller
    │   ├── NotElected         the caller isn't first in line
    │   ├── OlderVersion       the caller read the chain before it changed
    │   ├── Sealed             the link takes no more records
    │   ├── WrongIndex         a batch doesn't continue the link
    │   ├── Resend             every record of the batch was stored before; nothing was stored now
    │   ├── PartlyResend       some records of the batch were stored before
    │   ├── WrongIncarnation   another process or disk answers at this address
    │   ├── OlderGeneration    the subscription was sought meanwhile
    │   └── UnknownLink        this member has no such link (yet)
    ├── WorldError             something else failed: the same request may succeed later
    │   ├── BadChecksum
    │   ├── LeaseOver
    │   ├── Waiting            no group can take records; `reasons` tells why, for each
    │   ├── ChainSetBack       ZooKeeper's chain of a queue is older than what a member's disk knows
    │   ├── ChainTooLong       a queue has more links, or sources, than ZooKeeper holds in a node
    │   ├── DiskFull
    │   ├── DiskFailed
    │   ├── PeerLost           the other member of the group can't be reached
    │   ├── MemberBehind       this member has fewer records than it should
    │   ├── StaleCursor        this member's cursors must not be used before it has resynced
    │   ├── Unreachable        no coordinator or ZooKeeper answers
    │   ├── DeadlineOver
    │   └── OutcomeUnknown     it may have been stored or not, and nobody can tell the caller any more
    └── BugError               Seriatim itself is wrong: the process stops
        └── InvariantBroken

A class holds its stable `code` and whether a repeated request can help (`can_retry`). `to_wire` and `from_wire` carry an error
over gRPC (see `rpc`).
"""

from __future__ import annotations

import json
from typing import ClassVar, TypeVar

from seriatim.protocol.checksums import is_whole, text_with_checksum


class SeriatimError(Exception):
    """Base of all. `message` is for a person; `details` are plain values for a program (queue, epoch, limit_bytes, …)."""

    code: ClassVar[str] = "error"
    can_retry: ClassVar[bool] = False
    grpc_status: ClassVar[str] = "UNKNOWN"
    next_step: ClassVar[str] = ""

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = details

    def __str__(self) -> str:
        return f"{self.message} ({self.next_step})" if self.next_step else self.message


class CallerError(SeriatimError):
    """The request is wrong: sending it again can't help."""

    code = "caller"
    grpc_status = "INVALID_ARGUMENT"


class RefusedError(SeriatimError):
    """The request was right once and no longer is."""

    code = "refused"
    can_retry = True
    grpc_status = "FAILED_PRECONDITION"


class WorldError(SeriatimError):
    """Something else failed: the same request may succeed later."""

    code = "world"
    can_retry = True
    grpc_status = "UNAVAILABLE"


class BugError(SeriatimError):
    """Seriatim itself is wrong; the process stops rather than go on."""

    code = "bug"
    grpc_status = "INTERNAL"


_Error = TypeVar("_Error", bound=SeriatimError)


def copied(error: _Error) -> _Error:
    """An error to raise, in the place of one that is kept: that would collect the frames of all who ever raised it, with what is in them."""
    return type(error)(error.message, **error.details)


def defect(error: Exception, where: str) -> BugError:
    """What nobody foresaw, for who called it."""
    return BugError(f"{type(error).__name__} in {where}: {error}")


class InvalidArgument(CallerError):
    code = "invalid-argument"


class RecordTooLarge(CallerError):
    code = "too-large"
    next_step = "split the record, or raise the queue's limit with `seriatim queue alter NAME --max-record-bytes N`"


class MalformedFrame(CallerError):
    code = "malformed-frame"


class UnknownQueue(CallerError):
    code = "unknown-queue"
    grpc_status = "NOT_FOUND"
    next_step = "`seriatim queue list` shows the queues, `seriatim queue create` makes one"


class QueueExists(CallerError):
    code = "queue-exists"
    grpc_status = "ALREADY_EXISTS"


class UnknownGroup(CallerError):
    code = "unknown-group"
    grpc_status = "NOT_FOUND"
    next_step = "`seriatim group list` shows the groups"


class UnknownSubscription(CallerError):
    code = "unknown-subscription"
    grpc_status = "NOT_FOUND"
    next_step = "`seriatim subscription list` shows them, `seriatim subscription create` makes one"


class SubscriptionExists(CallerError):
    code = "subscription-exists"
    grpc_status = "ALREADY_EXISTS"


class SeqNotRising(CallerError):
    code = "seq-not-rising"
    next_step = "the seqs of one source have to rise; a record that was sent before must come before newer ones"


class TooManySources(CallerError):
    """A queue remembers the mark of each source for good, at each switch and with each batch: there is a bound on them."""

    code = "too-many-sources"
    next_step = "give all instances of an application one name; sources that come and go need queues of their own"


class TooManyElections(CallerError):
    """A queue has had more elected senders than the seq of a record can tell apart to which the application gives none."""

    code = "too-many-elections"
    next_step = "send to another queue, or give the records seqs of the application's own; and keep senders open, each that is opened is an election"


class WrongCluster(CallerError):
    code = "wrong-cluster"
    grpc_status = "FAILED_PRECONDITION"


class IncompatibleVersion(CallerError):
    code = "incompatible-version"
    grpc_status = "FAILED_PRECONDITION"


class NoChainDocument(IncompatibleVersion):
    """Somebody else than Seriatim wrote the node. It costs its queue, and no other."""

    code = "no-chain-document"
    next_step = "if Seriatim didn't write it, delete that node, then `seriatim queue recover NAME`"


class Fenced(RefusedError):
    """An instance with a newer token was elected. The caller stops."""

    code = "fenced"
    can_retry = False
    grpc_status = "ABORTED"


class NotElected(RefusedError):
    """The caller isn't first in line of its election."""

    code = "not-elected"
    can_retry = False
    grpc_status = "ABORTED"


class OlderVersion(RefusedError):
    """The caller acted on a chain document that has changed; no failure of a member (H12)."""

    code = "older-version"


class Sealed(RefusedError):
    code = "sealed"


class WrongIndex(RefusedError):
    """`details["next_index"]` is the index that the link takes next."""

    code = "wrong-index"


class Resend(RefusedError):
    """Every record of the batch lies at or below its source's mark: acknowledged, but not stored."""

    code = "resend"
    grpc_status = "ALREADY_EXISTS"


class PartlyResend(RefusedError):
    """Some records of the batch lie at or below their source's mark; `details["marks"]` has the marks."""

    code = "partly-resend"


class WrongIncarnation(RefusedError):
    code = "wrong-incarnation"


class OlderGeneration(RefusedError):
    code = "older-generation"


class UnknownLink(RefusedError):
    code = "unknown-link"


class BadChecksum(WorldError):
    code = "bad-checksum"
    grpc_status = "DATA_LOSS"


class LeaseOver(WorldError):
    code = "lease-over"


class Waiting(WorldError):
    """No group can take records, or nothing can be read; `details["reasons"]` tells why, for each group."""

    code = "waiting"


class ChainSetBack(WorldError):
    """ZooKeeper was set back: a member's disk knows of more than the chain. Nothing is sent, nor cut, by such a chain."""

    code = "chain-set-back"
    next_step = 'give ZooKeeper its newest data back: docs/operations.md, "ZooKeeper was set back"'


class ChainTooLong(WorldError):
    """The chain document of a queue has no room for another link, so that sending waits; or is more than ZooKeeper takes."""

    code = "chain-too-long"
    grpc_status = "RESOURCE_EXHAUSTED"
    next_step = (
        "links go when every subscription has read them, none before them is lost, "
        "and `seriatim queue alter NAME --retention` is over"
    )


class DiskFull(WorldError):
    code = "disk-full"
    grpc_status = "RESOURCE_EXHAUSTED"
    next_step = "free space on the member's disk"


class DiskFailed(WorldError):
    code = "disk-failed"
    grpc_status = "DATA_LOSS"
    next_step = (
        "start the member whose disk it is again, on one that works; where files are damaged, with an empty directory, but only while its peer "
        "is in sync, which fills it: never both"
    )


class PeerLost(WorldError):
    code = "peer-lost"


class MemberBehind(WorldError):
    code = "member-behind"


class StaleCursor(WorldError):
    code = "stale-cursor"


class Unreachable(WorldError):
    code = "unreachable"
    next_step = "is it running, and is the address right?"


class DeadlineOver(WorldError):
    code = "deadline-over"
    grpc_status = "DEADLINE_EXCEEDED"


class OutcomeUnknown(WorldError):
    """It may have been stored or not, and nobody can tell the caller any more (H4)."""

    code = "outcome-unknown"
    can_retry = False


class InvariantBroken(BugError):
    code = "invariant-broken"


def _leaves(root: type[SeriatimError]) -> dict[str, type[SeriatimError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _leaves(child)
    return found


_BY_CODE = _leaves(SeriatimError)


def to_wire(error: SeriatimError) -> str:
    """An error as one line of JSON: code, message, details, and a checksum, which an earlier version passes over."""
    content = {"code": error.code, "message": error.message, "details": error.details}
    return text_with_checksum(json.dumps(content, default=str))


def from_wire(text: str) -> SeriatimError:
    """The error that `to_wire` wrote. An unknown code gives the base class, so that newer servers don't break older clients.

    Raises MalformedFrame for what it didn't write.
    """
    if not is_whole(text):
        raise MalformedFrame("an error that was damaged on its way")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame("an error that can't be read") from error
    if not isinstance(content, dict):
        raise MalformedFrame("an error that can't be read")
    found = _BY_CODE.get(str(content.get("code")), SeriatimError)(str(content.get("message", "")))
    details = content.get("details")
    found.details = details if isinstance(details, dict) else {}
    return found
