"""Incarnations on the wire."""

from __future__ import annotations

from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.names import Incarnation


def as_message(incarnation: Incarnation) -> pb.Incarnation:
    """An incarnation as a message."""
    return pb.Incarnation(disk_id=incarnation.disk_id, start=incarnation.start)


def from_message(message: pb.Incarnation) -> Incarnation:
    """An incarnation from its message."""
    return Incarnation(message.disk_id, message.start)
