"""Where ZooKeeper is by now, for clients: they are told by coordinators, once, and its servers may be replaced one by one since."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Never

from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.seriatim_pb2 import DescribeClusterRequest
from seriatim.protocol.zookeeper import SessionState, ZooKeeperSession

ASK_S: Final = 1.0
"""So long, and so often, a session looks for ZooKeeper by itself before coordinators are asked."""


async def follow(session: ZooKeeperSession, coordinators: Coordinators) -> Never:
    """While the session is cut off, lead it to where coordinators have theirs. Until cancelled."""
    is_cut_off = asyncio.Event()

    def changed(state: SessionState) -> None:
        (is_cut_off.clear if state is SessionState.CONNECTED else is_cut_off.set)()

    session.on_state(changed)
    changed(session.state)
    while True:
        await is_cut_off.wait()
        await asyncio.sleep(ASK_S)
        if is_cut_off.is_set():
            with contextlib.suppress(SeriatimError):
                cluster = await coordinators.call("DescribeCluster", DescribeClusterRequest())
                session.go_to(cluster.zookeeper)
