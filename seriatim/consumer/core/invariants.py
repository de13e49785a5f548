"""What must hold after every step of `reading`, `cursor` and `tenure`. Tests call these; each raises InvariantBroken."""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.consumer.core.cursor import CursorState
from seriatim.consumer.core.reading import Reading
from seriatim.consumer.core.reading_events import Deliver, Effect
from seriatim.consumer.core.tenure import ActUntil, Ask, EndTerm, TakeUp, Tenure
from seriatim.consumer.core.tenure import Effect as TenureEffect
from seriatim.consumer.core.view import Place
from seriatim.protocol.errors import InvariantBroken


def _check(holds: bool, claim: str, **details: object) -> None:
    if not holds:
        raise InvariantBroken(claim, **details)


def check_reading(before: Reading, after: Reading, effects: Sequence[Effect]) -> None:
    """Strict consumption and the bound on memory; `before` and `after` a step that isn't ReadFrom or Stopped.

    Raises InvariantBroken.
    """
    _check(after.buffered_bytes >= 0, "buffered bytes fell below zero")
    _check(after.fetch is None or after.at is not None, "a fetch is open and nothing is to be read")
    if before.at is not None and after.at is not None:
        _check(after.at.epoch >= before.at.epoch, "the reader went back a link", before=before.at, after=after.at)
    if before.at is not None and after.at is not None and after.view is not None:
        for link in after.view.links:
            if before.at.epoch <= link.epoch < after.at.epoch:
                _check(link.end is not None, "the reader left a link that isn't sealed (invariant 5)", epoch=link.epoch)
    at = before.at
    for effect in effects:
        if isinstance(effect, Deliver) and at is not None:
            header = effect.delivery.batch.header
            place = Place(effect.delivery.epoch, header.first_index)
            is_passed = at < place <= Place(at.epoch, before.skip_below)  # over batches that weren't asked for
            _check(
                place == at or is_passed,
                "a batch was delivered that doesn't start where the reader is",
                at=at,
                place=place,
            )
            at = Place(at.epoch, header.end_index)


def check_cursor(before: CursorState, after: CursorState) -> None:
    """A cursor moves back only by seek, or where more was asked for than there is.

    Only the head link is committed, and not beyond what was asked for.

    Raises InvariantBroken.
    """
    if after.grant is None:
        _check(after.in_flight is None, "a commit is under way without a grant")
        return
    _check(after.committed <= after.wanted, "more is committed than the application is done with")
    if after.in_flight is not None:
        order = after.in_flight
        _check(order.epoch == after.head, "a commit goes to another link than the head", epoch=order.epoch)
        _check(order.grant == after.grant, "a commit carries an older grant")
        _check(Place(order.epoch, order.index) <= after.wanted, "a commit is beyond what the application is done with")
        _check(Place(order.epoch, order.index) > after.committed, "a commit goes back")
    if before.grant is not None and before.grant.generation == after.grant.generation:
        is_refused = before.beyond is not None and after.wanted == after.committed
        _check(after.wanted >= before.wanted or is_refused, "the cursor moved back without a seek")


def check_tenure(before: Tenure, after: Tenure, effects: Sequence[TenureEffect]) -> None:
    """One reader (invariant 7): it acts in the name of its present node alone, by the token that was given for it, while its lease runs.

    Raises InvariantBroken.
    """
    _check(after.token > 0 or not after.lease.is_admitted, "a term goes on without a token")
    _check(after.is_asking or not after.is_asked_again, "a coordinator is asked again, and isn't asked")
    if before.lease.holder == after.lease.holder:
        _check(after.lease.until_s >= before.lease.until_s, "what was proved of a node isn't any more")
    else:
        _check(not after.lease.is_admitted and not after.token, "what an earlier node was given counts for the next")
    has_ended = any(isinstance(effect, EndTerm) for effect in effects)
    _check(has_ended or after.lease.is_admitted or not before.lease.is_admitted, "a term ended, and nobody was told")
    for effect in effects:
        match effect:
            case ActUntil(until_s):
                may_act = after.is_elected and until_s == after.lease.usable_until_s
                _check(may_act or not until_s, "it may act longer than was proved of its node", until_s=until_s)
            case TakeUp(granted):
                token = granted.grant.token
                is_same = has_ended or token == before.token or not before.lease.is_admitted
                _check(
                    is_same and token == after.token, "a token changed amid a term", before=before.token, after=token
                )
            case Ask(node, token):
                _check(after.is_asking and node == after.lease.holder, "it asks for another node", node=node)
                _check(token == after.token, "it asks with another token", token=token)
