"""Cursors of one link on one member: who may move them, and which way (protocol.md 6, H7 to H9)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from seriatim.protocol.chain import Whose
from seriatim.protocol.errors import Fenced, InvalidArgument, MemberBehind, OlderGeneration
from seriatim.protocol.names import Generation, Index, SubscriptionId, Token


@dataclass(frozen=True, slots=True)
class CursorRecord:
    """A subscription in a link: the newest reader that this member was told of, and its cursor.

    `index`: all before it is done; None: none was committed in this generation. `by`: the token of the reader that committed
    it, or was to start there; 0: nobody did, or the other member, of an earlier version, doesn't say.
    """

    subscription_id: SubscriptionId
    generation: Generation = Generation(0)
    token: Token = Token(0)
    index: Index | None = None
    by: Token = Token(0)

    @property
    def whose(self) -> Whose:
        """Whose it is."""
        return self.subscription_id, self.generation


def from_parts(
    subscription_id: SubscriptionId,
    generation: Generation,
    token: Token,
    index: Index | None,
    by: Token,
    end: Index | None = None,
) -> CursorRecord:
    """A record as it was kept or told. Who was told of, and committed nothing, counts no more than who did (H7).

    At the link's end it makes no difference who came there. Where that isn't told, it is the newest reader's, so that an earlier version can
    read it: nobody would write it anew, and that version wouldn't start until retention lets the link go.
    """
    record = CursorRecord(subscription_id, generation, token, index, Token(0) if index is None else by)
    return replace(record, by=token) if record.by == 0 and is_drained(record, end) else record


def _check_order(record: CursorRecord, generation: Generation, token: Token) -> None:
    if generation < record.generation:
        raise OlderGeneration("the subscription was sought meanwhile", generation=record.generation)
    if generation == record.generation and token < record.token:
        raise Fenced("a newer reader was elected", token=record.token)


def told(record: CursorRecord, generation: Generation, token: Token, cursor: Index = Index(0)) -> CursorRecord:
    """A coordinator named the reader. A new generation starts without a cursor. Raises OlderGeneration, Fenced.

    `cursor`: where it starts, of what both members have of this generation, 0 where that isn't known: it is this reader's then, as
    if it had committed it.
    """
    _check_order(record, generation, token)
    index, by = (record.index, record.by) if generation == record.generation else (None, Token(0))
    if cursor >= (index or 0) and cursor > 0:
        index, by = cursor, token
    return replace(record, generation=generation, token=token, index=index, by=by)


def committed(
    record: CursorRecord,
    generation: Generation,
    token: Token,
    index: Index,
    *,
    is_relayed: bool,
    limit: Index,
    is_limit_known: bool,
) -> CursorRecord:
    """A reader committed `index`; its cursor never moves back, and a repeated commit changes nothing.

    An earlier reader's that is further was answered to nobody: this one was granted a place before it (invariant 7).

    `limit`: what is committed of the link, or its end; a relayed commit may be ahead of what this member knows, so it is
    not held against it. Beyond it raises InvalidArgument, or MemberBehind where more may be committed than this member
    will ever be told (`is_limit_known` is false). Raises OlderGeneration or Fenced for anybody but the reader that was
    told; a relayed commit comes from a member that was told, so a newer reader is taken over from it.
    """
    _check_order(record, generation, token)
    if is_relayed:
        record = told(record, generation, token)
    elif (generation, token) != (record.generation, record.token):
        raise Fenced("this member wasn't told of this reader", token=record.token, generation=record.generation)
    elif index > limit and not is_limit_known:
        raise MemberBehind(f"this member knows records up to {limit} to be committed, not to {index}")
    elif index > limit:
        raise InvalidArgument(f"a cursor can't be at {index}: the link is committed up to {limit}")
    if record.index is not None and index <= record.index and record.by >= token:
        return record
    return replace(record, index=index, by=token)


def check_reader(record: CursorRecord | None, generation: Generation, token: Token) -> None:
    """Whether this reader may fetch: the told one, a newer one, or one of whom nothing was told. Raises as `told`."""
    if record is not None:
        _check_order(record, generation, token)


def further(one: CursorRecord | None, other: CursorRecord) -> CursorRecord:
    """Of what two members hold of a subscription, the newer generation, the newer reader, and of who committed last the further cursor.

    A reader starts where all that was answered to earlier ones lies before it: what one member alone holds of those counts no
    more once that reader committed (invariant 7). Where it isn't known of both who committed, the further counts.
    """
    if one is None or one.generation < other.generation:
        return other
    if other.generation < one.generation:
        return one
    by_whom = one.by > 0 and other.by > 0
    last = max(
        one, other, key=lambda record: (record.by if by_whom else 0, -1 if record.index is None else record.index)
    )
    return replace(last, token=Token(max(one.token, other.token)))


def is_drained(record: CursorRecord, end: Index | None) -> bool:
    """Whether the subscription has done all of a link. A cursor beyond the end counts as the end (H22)."""
    return end is not None and record.index is not None and record.index >= end


def encode(record: CursorRecord) -> bytes:
    """JSON of a record. `by` is written where it says more than `token`: earlier versions can't start where it is."""
    parts: list[int | None] = [record.subscription_id, record.generation, record.token, record.index]
    if record.index is not None and record.by != record.token:
        parts.append(record.by)
    return json.dumps(parts).encode()


def decode(data: bytes) -> CursorRecord:
    """Read what `encode` wrote, also an earlier version, which kept only who was told last: nobody newer committed."""
    subscription_id, generation, token, index, *by = json.loads(data)
    return from_parts(subscription_id, generation, token, index, by[0] if by else token)
