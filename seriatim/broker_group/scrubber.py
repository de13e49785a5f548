"""Reads all that is stored, now and then, so that damage is found while the other member still has what was damaged.

Every read checks a batch (its checksums, its place); this one is for the batches that nobody reads. It reads the disk and not
what the system remembers of it. What it finds takes the way of all damage: noted, and mended from the peer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from seriatim.broker_group.broker import Broker
from seriatim.broker_group.core.link_record import LinkKey
from seriatim.protocol import log
from seriatim.protocol.clock import monotonic_s
from seriatim.protocol.errors import BadChecksum, DiskFailed
from seriatim.protocol.names import Index

_log = log.logger("broker.scrub")

READ_BYTES: Final = 256 * 1024
"""Read at once: small, because a read keeps the interpreter to itself."""
PACE_BYTES_S: Final = 4 * 1024 * 1024
"""A hundredth of a processor, and little of a disk: 100 GB take 7 hours, and a day is enough for 360."""
FIRST_S: Final = 60.0
"""After a start others come first."""


class Scrubber:
    """See the module. A pass begins `interval_s` after the last one began; 0: there is none.

    Each life of the process begins with another link, so that those at the end have their turn also where lives are short.
    """

    def __init__(self, broker: Broker, interval_s: float) -> None:
        self._broker = broker
        self._interval_s = interval_s

    async def run(self) -> None:
        """Passes, one after the other, as long as the process lives."""
        if self._interval_s == 0:
            return
        await asyncio.sleep(min(FIRST_S, self._interval_s))
        while True:
            began_s = monotonic_s()
            await self._pass()
            left_s = began_s + self._interval_s - monotonic_s()
            if left_s < 0:
                _log.warning("reading all that is stored takes longer than its interval", interval_s=self._interval_s)
            await asyncio.sleep(max(0.0, left_s))

    async def _pass(self) -> None:
        keys = sorted(record.key for record in self._broker.links())
        first = self._broker.incarnation.start % (len(keys) or 1)
        began_s, size_bytes, damaged = monotonic_s(), 0, 0
        try:
            await asyncio.to_thread(self._broker.store.forget_cached)
        except (OSError, RuntimeError) as error:  # a directory, or no thread can be had: the next pass is another try
            _log.error("what is stored can't be read", reason=str(error))
            return
        for key in keys[first:] + keys[:first]:
            try:
                of_link = await self._link(key)
            except DiskFailed as error:
                _log.error("link can't be read", queue_id=key[0], epoch=key[1], reason=error.message)
            else:
                size_bytes, damaged = size_bytes + of_link[0], damaged + of_link[1]
        took_s = round(monotonic_s() - began_s, 1)
        _log.info("all stored batches read", links=len(keys), bytes=size_bytes, damaged=damaged, took_s=took_s)

    async def _link(self, key: LinkKey) -> tuple[int, int]:
        """Read what readers may have of a link. How many bytes that is, and how many batches were damaged."""
        index, size_bytes, damaged = Index(0), 0, 0
        while (runner := self._broker.find(key)) is not None and index < runner.readable_end:
            began_s = monotonic_s()
            try:
                found = await self._broker.batches(key, index, runner.readable_end, READ_BYTES)
            except BadChecksum:  # of the batch that starts here: what comes before a damaged one is given first
                damaged += 1
                behind = self._broker.store.position_behind(key, index)
                if behind is None:
                    break
                index = behind.index
                continue
            read_bytes = sum(one.size_bytes for one in found)
            index, size_bytes = found[-1].header.end_index, size_bytes + read_bytes
            await asyncio.sleep(max(0.0, read_bytes / PACE_BYTES_S - (monotonic_s() - began_s)))
        return size_bytes, damaged
