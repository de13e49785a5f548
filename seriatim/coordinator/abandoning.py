"""An operator gives up what is gone for good: a lost link, or the tail of a sealed one (protocol.md 5.7)."""

from __future__ import annotations

import asyncio

from seriatim.coordinator.core import chain, seal
from seriatim.coordinator.core.chain_point import point_before
from seriatim.coordinator.core.events import SendSeal
from seriatim.coordinator.core.seal import SealAnswer, Wholeness
from seriatim.coordinator.members import Members
from seriatim.coordinator.store import Store
from seriatim.protocol import log
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.chain import ChainDocument, Link, LinkState
from seriatim.protocol.clock import now_ms
from seriatim.protocol.errors import InvalidArgument, SeriatimError, Waiting
from seriatim.protocol.names import ChainVersion, Epoch, QueueId

_log = log.logger("coordinator")


class Abandoning:
    """See the module. A call that was cut off may be made again, at any coordinator."""

    def __init__(self, store: Store, members: Members) -> None:
        self._store = store
        self._members = members

    async def abandon_link(self, request: pb.AbandonLinkRequest) -> pb.AbandonLinkReply:
        """Show what giving up a link means; do it where the queue's name was said again (protocol.md 5.7).

        Raises Waiting where it isn't what was shown any more: who had a copy then may be away now.
        """
        queue_id = await self._store.queue_id(request.queue)
        document, version = await self._store.read_chain(queue_id)
        epoch = Epoch(request.epoch)
        link = document.link(epoch)
        if link is None:
            raise InvalidArgument(f"queue {request.queue} has no link {epoch}", queue=request.queue, epoch=epoch)
        shown = request.confirmed_what
        if any((one.epoch, one.what) == (epoch, shown) for one in document.abandoned):
            return pb.AbandonLinkReply(what=shown, is_done=True)  # by an earlier try of this call
        if link.state not in (LinkState.LOST, LinkState.SEALED):
            raise InvalidArgument(f"link {epoch} is {link.state}: only what is lost, or sealed, can be abandoned")
        answers = await self._seal_answers(queue_id, link, version, request.cause_id)
        await self._check_nothing_better(document, version, link, answers)
        certificate = seal.given_up(link, point_before(document, epoch), list(answers.values()), now_ms=now_ms())
        what = _what_is_given_up(document, link, certificate.end, answers)
        if not request.confirmed_queue:
            return pb.AbandonLinkReply(what=what)
        if request.confirmed_queue != document.name:
            raise InvalidArgument(f"{request.confirmed_queue!r} is not the queue's name: nothing was given up")
        if shown not in ("", what):
            raise Waiting(f"nothing was given up, look again: it would be {what}", reasons={f"link {epoch}": what})
        changed = chain.abandoned(document, epoch, certificate, what, now_ms())
        written = await self._store.write_chain(changed, version)
        if written is None:
            raise Waiting("the chain changed meanwhile: look again", reasons={"chain": "it changed"})
        _log.warning("link abandoned", queue=document.name, epoch=epoch, what=what, cause_id=request.cause_id)
        return pb.AbandonLinkReply(what=what, is_done=True)

    async def _seal_answers(
        self, queue_id: QueueId, link: Link, version: ChainVersion, cause_id: str
    ) -> dict[str, SealAnswer]:
        """What is still to be had of the link: from its members and, where its end isn't known, from what they wrote beside the chain.

        What a member wrote says where a link ends, also where its disk is gone; who has its records, only members do.
        """
        answers = await self._store.kept_seals(queue_id, link.epoch) if link.end is None else {}
        asked = [self._members.seal(SendSeal(side, link, version), queue_id, cause_id) for side in link.sides]
        for side, reply in zip(link.sides, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(reply, SealAnswer):
                answers[side.name.member] = reply
            elif not isinstance(reply, SeriatimError):
                raise reply
        by_place = {side.name.member: side for side in link.sides}
        return {place: seal.judged(link, by_place[place], answer) for place, answer in answers.items()}

    async def _check_nothing_better(
        self, document: ChainDocument, version: ChainVersion, link: Link, answers: dict[str, SealAnswer]
    ) -> None:
        """Raises InvalidArgument where the link need not be given up; an end that can be told is written, as a switch would."""
        if link.end is None:
            decision = seal.decide(link, point_before(document, link.epoch), answers, now_ms=now_ms())
            if isinstance(decision, seal.Undecided):
                return
            await self._store.write_chain(chain.sealed(document, link.epoch, decision), version)
            raise InvalidArgument(f"link {link.epoch} need not be abandoned: its end can be told, {decision.end}")
        if not link.end:
            raise InvalidArgument(f"link {link.epoch} need not be abandoned: it has no records to give up")
        for place, answer in answers.items():
            if answer.wholeness is not Wholeness.UNKNOWN and answer.next.index >= link.end:
                raise InvalidArgument(
                    f"link {link.epoch} need not be abandoned: {link.group}-{place} has all its {link.end} records"
                )


def _what_is_given_up(document: ChainDocument, link: Link, end: int, answers: dict[str, SealAnswer]) -> str:
    known = "an unknown number of records" if link.end is None else f"{link.end - end} records"
    where = "" if link.base is None else f" (offset {link.base + end})"
    what = f"{known} of link {link.epoch} of queue {document.name} on {link.group}, from index {end}{where} on"
    asked = {str(side.name): answers.get(side.name.member) for side in link.sides}
    missing = [member for member, answer in asked.items() if answer is None]
    copies = [f"no answer from {', '.join(missing)}"] if missing else []
    for member, answer in asked.items():
        if answer is not None and answer.wholeness is Wholeness.UNKNOWN:
            copies.append(f"nothing from {member}: {answer.reason}")
    return "; ".join((what, *copies))
