"""A command's calls to the coordinators of a cluster, for commands that have no loop of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from seriatim.protocol.coordinators import Coordinators

CALL_TIMEOUT_S = 10.0


def call(addresses: str, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """One call, `timeout_s` for each coordinator asked. Raises as `Coordinators.call`."""

    async def ask() -> Any:
        async with Coordinators(addresses) as coordinators:
            return await coordinators.call(method, request, timeout_s)

    return asyncio.run(ask())
