"""Cursors of one link on one member: who may move them, and which way (protocol.md 6, H7 to H9)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from seriatim.protocol.chain import Whose
from seriatim.protocol.errors import Fenced, InvalidArgument, MemberBehind, OlderGeneration
from seriatim.protocol.names import Generation, Index, SubscriptionId, Token

START = Index(0)


@dataclass(frozen=True, slots=True)
class CursorRecord:
    """A subscription in a link: the newest reader that this member was told of, and its cursor.

    `index`: all before it is done; None: none was committed in this generation.
    """

    subscription_id: SubscriptionId
    generation: Generation = Generation(0)
    token: Token = Token(0)
    index: Index | None = None

    @property
    def whose(self) -> Whose:
        """Whose it is."""
        return self.subscription_id, self.generation


def _check_order(record: CursorRecord, generation: Generation, token: Token) -> None:
    if generation < record.generation:
        raise OlderGeneration("the subscription was sought meanwhile", generation=record.generation)
    if generation == record.generation and token < record.token:
        raise Fenced("a newer reader was elected", token=record.token)


def told(record: CursorRecord, generation: Generation, token: Token, cursor: Index = START) -> CursorRecord:
    """A coordinator named the reader. A new generation starts without a cursor. Raises OlderGeneration, Fenced.

    `cursor`: what the other member has of this generation, where this one has less; the further counts.
    """
    _check_order(record, generation, token)
    index = record.index if generation == record.generation else None
    if cursor > (index or 0):
        index = cursor
    return replace(record, generation=generation, token=token, index=index)


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
    """A reader committed `index`; a cursor never moves back, and a repeated commit changes nothing.

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
    if record.index is not None and index <= record.index:
        return record
    return replace(record, index=index)


def check_reader(record: CursorRecord | None, generation: Generation, token: Token) -> None:
    """Whether this reader may fetch: the told one, a newer one, or one of whom nothing was told. Raises as `told`."""
    if record is not None:
        _check_order(record, generation, token)


def further(one: CursorRecord | None, other: CursorRecord) -> CursorRecord:
    """Of what two members hold of a subscription, the newer reader with the further cursor of the newer generation."""
    if one is None or one.generation < other.generation:
        return other
    if other.generation < one.generation:
        return one
    indexes = [record.index for record in (one, other) if record.index is not None]
    index = max(indexes) if indexes else None
    return replace(one, token=Token(max(one.token, other.token)), index=index)


def is_drained(record: CursorRecord, end: Index | None) -> bool:
    """Whether the subscription has done all of a link. A cursor beyond the end counts as the end (H22)."""
    return end is not None and record.index is not None and record.index >= end


def encode(record: CursorRecord) -> bytes:
    """JSON of a record."""
    return json.dumps([record.subscription_id, record.generation, record.token, record.index]).encode()


def decode(data: bytes) -> CursorRecord:
    """Read what `encode` wrote."""
    return CursorRecord(*json.loads(data))
