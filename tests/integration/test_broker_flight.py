"""How much the links of a member may have taken and not committed, all together, on a real store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from seriatim.broker_group import link_runner
from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core.link_record import LinkRecord, Role
from seriatim.broker_group.core.replica_events import BatchCopied, PeerReady
from seriatim.broker_group.link_runner import LinkRunner
from seriatim.broker_group.peer import Peer
from seriatim.broker_group.store import open_store
from seriatim.protocol.names import ChainVersion, Epoch, Incarnation, MemberName, QueueId
from tests.integration.broker_members import batches


def test_a_member_of_many_links_takes_no_more_than_its_memory_holds_and_each_link_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk stood still under the queues of a thousand senders: each link's own bound is 16 MiB."""
    first, second, third, *_ = batches(5)
    monkeypatch.setattr(link_runner, "MEMBER_FLIGHT_BYTES", first.size_bytes + 1)

    def taken(runner: LinkRunner) -> bool:
        """Whether it takes another one: a link's stream isn't read otherwise."""
        if runner.is_full:
            return False
        one = (first, second, third)[runner.state.tail.index // 10]
        assert runner.apply(BatchCopied(one.header, one.header_bytes), one) is None
        return True

    async def scenario() -> None:
        store = open_store(tmp_path, "c/g1-a")
        broker = Broker("c", MemberName("g1", "a"), store, Peer("c", store.incarnation), 0)
        links = []
        for epoch in (1, 2, 3):
            record = LinkRecord(QueueId(1), Epoch(epoch), role=Role.MASTER, peer=Incarnation("b", 1), opened_start=1)
            links.append(await broker.introduced(record))
        one, other, last = links
        assert [taken(one), taken(one), taken(one)] == [True, True, False]
        assert [taken(other), taken(other)] == [True, False]
        await one.until(lambda: one.is_quiet)
        assert one.apply(PeerReady(one.state.tail.index, one.state.tail.hash)) is None
        assert [taken(last), taken(last)] == [True, False]
        assert not one.is_full
        # What is on its way no longer, and never will be committed, counts no longer.
        assert await other.sealed(ChainVersion(9)) is None
        assert [taken(last), taken(last)] == [True, False]
        await broker.drop(last.key)
        assert [one.flight_bytes for one in links] == [0, 0, 0]
        assert broker._flight.size_bytes == 0
        await store.close()

    asyncio.run(scenario())
