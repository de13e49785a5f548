"""A way to a server on which what passes is held up, or damaged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Pass = Callable[[bytes], Awaitable[bytes]]
"""Is given what came; says what goes on."""


@contextlib.asynccontextmanager
async def way_to(address: str, there: Pass, back: Pass) -> AsyncIterator[str]:
    """The address at which all goes to `address` by `there`, and comes from it by `back`."""
    ways: list[asyncio.Task[None]] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Pass) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(await passed(data))
                await writer.drain()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        both = carry(reader, far_writer, there), carry(far_reader, writer, back)
        ways.extend(map(asyncio.create_task, both))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def as_it_is(data: bytes) -> bytes:
    """A way that does nothing to it."""
    return data
