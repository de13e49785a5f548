"""Where ZooKeeper is by now, for clients, and who coordinates: its servers, and coordinators, are replaced one by one, and each knows of the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final, Never

from seriatim.protocol.coordinators import Coordinators
from seriatim.protocol.errors import SeriatimError
from seriatim.protocol.nodes import Paths, read_coordinators
from seriatim.protocol.registration import CoordinatorRegistration
from seriatim.protocol.seriatim_pb2 import DescribeClusterRequest
from seriatim.protocol.zookeeper import SessionState, ZooKeeperSession

ASK_S: Final = 1.0
"""So long, and so often, a session looks for ZooKeeper by itself before coordinators are asked."""


async def follow(session: ZooKeeperSession, coordinators: Coordinators, paths: Paths) -> Never:
    """While the session is cut off, lead it to where coordinators have theirs; from now on none that is known is the last one. Until cancelled."""
    is_cut_off = asyncio.Event()

    async def registered() -> Mapping[str, CoordinatorRegistration]:
        return await read_coordinators(session, paths, await session.children(paths.coordinators))

    coordinators.registered = registered

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
