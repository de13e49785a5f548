"""A command's calls to the coordinators of a cluster, for commands that have no loop of their own.

gRPC is loaded by the first call: a mere --help needn't wait for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

CALL_TIMEOUT_S = 10.0


def call(addresses: str, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    """One call, `timeout_s` for each coordinator asked. Raises as `Coordinators.call`."""
    from seriatim.protocol.coordinators import Coordinators

    async def ask() -> Any:
        async with Coordinators(addresses) as coordinators:
            return await coordinators.call(method, request, timeout_s)

    return asyncio.run(ask())
