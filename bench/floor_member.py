"""The floor's server: takes batches from a bare gRPC stream, passes them on, writes and flushes a file. Nothing else.

    python -m bench.floor_member LISTEN FILE [NEXT]

No checksum, no index, no token: what is left is what any system pays that moves each byte to two processes and flushes
both copies before it acknowledges, and leaves the page cache to others. One flush serves all batches that wait. The first
of two passes each batch to the second before it writes; its acknowledgement (a count of batches, eight bytes) says that
both have it on disk.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from seriatim.broker_group.segments import forget_pages
from seriatim.protocol import rpc

METHOD = "/bench.Floor/Append"
COUNT_BYTES = 8
_MOST_PARTS = 256  # of one write


class FlushedFile:
    """Appends on a thread of its own; tells on the loop how many batches are on disk."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, on_flushed: Callable[[int], None]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._loop = loop
        self._on_flushed = on_flushed
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flush", daemon=True)
        self._thread.start()

    def put(self, batch: bytes) -> None:
        self._waiting.put(batch)

    def close(self) -> None:
        self._waiting.put(None)

    def _run(self) -> None:
        flushed = written = 0
        while (first := self._waiting.get()) is not None:
            parts = [first]
            while len(parts) < _MOST_PARTS and not self._waiting.empty() and (more := self._waiting.get()) is not None:
                parts.append(more)
            size_bytes = sum(map(len, parts))
            if os.writev(self._file, parts) != size_bytes:
                raise OSError("the disk took only a part")
            os.fdatasync(self._file)
            forget_pages(self._file, written, written + size_bytes)
            written += size_bytes
            flushed += len(parts)
            self._loop.call_soon_threadsafe(self._on_flushed, flushed)
        os.close(self._file)


class Member:
    """One of the two. A stream begins a file anew."""

    def __init__(self, path: Path, following: str | None) -> None:
        self._path = path
        self._next = rpc.channel(following) if following else None

    async def append(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        """Batches in, counts out."""
        changed = asyncio.Event()
        flushed = {"here": 0} if self._next is None else {"here": 0, "there": 0}

        def note(where: str, count: int) -> None:
            flushed[where] = count
            changed.set()

        file = FlushedFile(self._path, asyncio.get_running_loop(), lambda count: note("here", count))
        call = None if self._next is None else self._next.stream_stream(METHOD)()
        tasks = [asyncio.create_task(self._take(requests, call, file))]
        if call is not None:
            tasks.append(asyncio.create_task(self._listen(call, note)))
        told = 0
        try:
            while True:
                await changed.wait()
                changed.clear()
                if min(flushed.values()) > told:
                    told = min(flushed.values())
                    yield told.to_bytes(COUNT_BYTES)
        finally:
            file.close()
            for task in tasks:
                task.cancel()
            if call is not None:
                call.cancel()

    @staticmethod
    async def _take(requests: AsyncIterator[bytes], call: Any, file: FlushedFile) -> None:
        async for batch in requests:
            if call is not None:
                await call.write(batch)
            file.put(batch)

    @staticmethod
    async def _listen(call: Any, note: Callable[[str, int], None]) -> None:
        async for reply in call:
            note("there", int.from_bytes(reply))


async def serve(listen: str, path: Path, following: str | None) -> None:
    """Until the process is ended."""
    member = Member(path, following)
    service, name = METHOD[1:].split("/")
    handler = grpc.stream_stream_rpc_method_handler(member.append)
    server = rpc.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    rpc.listen(server, listen)
    await server.start()
    print("ready", listen, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
