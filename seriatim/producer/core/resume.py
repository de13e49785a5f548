"""Taking off what a resume point, or a refusal as re-send, says is stored (H2)."""

from __future__ import annotations

from dataclasses import replace

from seriatim.producer.core.events import Effect, Marks, Resume
from seriatim.producer.core.sender_state import Pending, SenderState
from seriatim.protocol import batch as batches
from seriatim.protocol.batch import EncodedBatch
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.marks import is_resend, overlaps


def marks_of(error: SeriatimError) -> dict[str, int]:
    """The marks in a refusal as re-send, as far as they can be read."""
    marks = error.details.get("marks")
    if not isinstance(marks, dict):
        return {}
    return {str(source): seq for source, seq in marks.items() if isinstance(seq, int)}


def cut(state: SenderState, marks: Marks, effects: list[Effect]) -> SenderState:
    """Take off what these marks cover; only called with nothing in flight."""
    left: list[Pending] = []
    for pending in state.pending:
        spans = pending.batch.header.spans
        if is_resend(marks, spans):
            effects.append(Resume(pending.number, marks, is_whole=True))
        elif overlaps(marks, spans):
            effects.append(Resume(pending.number, marks, is_whole=False))
            left.append(Pending(pending.number, without(pending.batch, marks)))
        else:
            left.append(pending)
    return replace(state, pending=tuple(left))


def without(batch: EncodedBatch, marks: Marks) -> EncodedBatch:
    """The batch without the records at or below their source's mark, of which it has others."""
    columns = batches.decode(batch).without_resends(marks)
    return batches.encode(columns, batch.header.first_index, compress=batch.header.is_compressed)
