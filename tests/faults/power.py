"""A member's disk whose machine loses power again and again: whatever was said to be kept is there at the next start.

    python -m tests.faults.power --lives 20 --seed 1

Each life is a process that opens the store on an ext4 file system of its own, reads all that it holds, and writes: links of two
durabilities, batches that go to RocksDB and to segment files, with little memory, so that tables are written and logs begun anew;
links are dropped, too. It notes each promise on another disk. Amid that the power goes (`MemberDisk.lose_power`).

What a crash leaves is modelled elsewhere, step by step (tests/integration/test_broker_store_crashes.py); here the system's own cache and
journal decide. `--wrong` plants a store that promises too early, which must be found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from seriatim.broker_group import log_files, segments, store
from seriatim.broker_group.core.link_record import LinkRecord
from seriatim.broker_group.layout import StoredPosition
from seriatim.broker_group.store import Store, open_store
from seriatim.protocol import batch
from seriatim.protocol.batch import RecordColumns
from seriatim.protocol.chain import Durability
from seriatim.protocol.errors import DiskFailed
from seriatim.protocol.names import Epoch, Index, QueueId
from tests.faults import network
from tests.faults.disks import MemberDisk

WRONG: Final = ("log", "segments")
"""What isn't flushed where it is said to be: RocksDB's log, or segment files. Names that aren't can't be told here: ext4 keeps a new file's with its bytes."""
_SEGMENT_BYTES: Final = 4000
_MEMORY_BYTES: Final = 1024 * 1024
_SIZES_BYTES: Final = (50, 2_000, 40_000)
_IN_FLIGHT: Final = 8
_LINKS: Final = 4
_LIFE_S: Final = (0.05, 0.5)
_START_S: Final = 60.0


# ---- a life


class Life:
    """What one start does. `promise` writes down what is said to be kept; to the system at once, for this process dies."""

    def __init__(self, directory: Path, promises: Path, chance: random.Random) -> None:
        self._promises = os.open(promises, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._chance = chance
        self._store: Store = open_store(directory, "c/g1-a", segment_bytes=_SEGMENT_BYTES)
        self._last: dict[Epoch, StoredPosition] = {}
        self._room = asyncio.Semaphore(_IN_FLIGHT)

    def promise(self, what: str, epoch: int = 0, index: int = 0) -> None:
        os.write(self._promises, f"{what} {epoch} {index}\n".encode())

    async def run(self) -> None:
        """Say what there is, having read it; then write, until the power goes."""
        for record in self._store.links():
            self._last[record.epoch] = self._store.last_position(record.key)
            self.promise("has", record.epoch, self._read(record))
        self.promise("serves")
        while True:
            if len(self._last) < _LINKS or self._chance.random() < 0.02:
                await self._begin_link()
            elif len(self._last) > _LINKS:
                await self._drop(min(self._last))
            await self._append(self._chance.choice(list(self._last)))

    def _read(self, record: LinkRecord) -> int:
        """Up to where all can be read. Raises SeriatimError where that isn't to the end."""
        at, end = Index(0), self._store.last_position(record.key).position.index
        while at < end:
            at = self._store.batches(record.key, at, end, 1 << 20)[-1].header.end_index
        return end

    async def _begin_link(self) -> None:
        epoch = Epoch(max(self._last, default=0) + 1)
        record = _record(epoch)
        await self._store.keep_link(record)
        self._last[epoch] = self._store.last_position(record.key)
        self.promise("kept", epoch)

    async def _drop(self, epoch: Epoch) -> None:
        del self._last[epoch]
        self.promise("dropping", epoch)
        await self._store.drop(_record(epoch).key)
        self.promise("dropped", epoch)

    async def _append(self, epoch: Epoch) -> None:
        await self._room.acquire()
        before = self._last[epoch]
        index = before.position.index
        values = [self._chance.randbytes(self._chance.choice(_SIZES_BYTES)) for _ in range(self._chance.randint(1, 3))]
        columns = RecordColumns(values, list(range(index, index + len(values))), "source", [0] * len(values))
        encoded = batch.encode(columns, index)
        position = before.position.after(encoded.header, encoded.header_bytes)
        self._last[epoch] = StoredPosition(position, index, before.size_bytes + encoded.size_bytes)

        def done(kept: int, error: DiskFailed | None) -> None:
            if error is None:
                self.promise("kept", epoch, kept)

        self._store.append(_record(epoch), encoded, self._last[epoch], done)
        if self._chance.random() < 0.2:
            await self._store.flushed()
        # Of several that are complete at once only the last is told: room is given by the disk's pace, not by each.
        asyncio.get_running_loop().call_later(0.001, self._room.release)


def _record(epoch: Epoch) -> LinkRecord:
    durability = Durability.SYNC if epoch % 2 else Durability.INTERVAL
    return replace(LinkRecord(QueueId(1), epoch), durability=durability, flush_ms=10)


def _plant(wrong: str) -> None:
    if wrong == "log":
        log_files.LogFiles.sync = lambda _: None  # type: ignore[method-assign]
        log_files.LogFiles.wrote = lambda _: None  # type: ignore[method-assign]
    elif wrong == "segments":
        segments.SegmentFiles.sync = lambda _: None  # type: ignore[method-assign]


# ---- the lives, one after the other


class Lives:
    """`wrong`: what isn't as it was promised."""

    def __init__(self, folder: Path, seed: int, planted: str) -> None:
        self._folder = folder
        self._seed = seed
        self._planted = planted
        self._disk = MemberDisk(folder, "disk", Path(os.devnull))
        self._kept: dict[int, int] = {}
        self._may_be_gone: set[int] = set()
        self._gone: set[int] = set()
        self.promises = 0
        self.wrong: list[str] = []

    def close(self) -> None:
        self._disk.close()

    def live(self, number: int) -> None:
        """One life, to the end of its power; what it finds is held against what those before it promised."""
        promises, errors = self._folder / f"promises-{number}", self._folder / f"errors-{number}"
        seed = f"{self._seed}.{number}"
        command = (
            sys.executable,
            "-m",
            "tests.faults.power",
            "--live",
            str(self._disk.path),
            str(promises),
            seed,
            self._planted,
        )
        with errors.open("wb") as output, subprocess.Popen(command, stderr=output) as process:
            try:
                self._wait_until_it_serves(process, promises)
                time.sleep(random.Random(seed).uniform(*_LIFE_S))
            finally:
                if process.poll() is None:
                    self._disk.lose_power(process.pid)
                process.kill()
        self._disk.come_back()
        lines = promises.read_text().splitlines() if promises.exists() else []
        if "serves 0 0" not in lines:
            self.wrong.append(f"life {number} didn't start: {_last_line(errors)}")
            return
        start = lines.index("serves 0 0")
        self._compare(number, {int(epoch): int(index) for _, epoch, index in map(str.split, lines[:start])})
        for what, epoch, index in map(str.split, lines[start + 1 :]):
            self._take(what, int(epoch), int(index))

    @staticmethod
    def _wait_until_it_serves(process: subprocess.Popen[bytes], promises: Path) -> None:
        until_s = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < until_s:
            if promises.exists() and "serves" in promises.read_text():
                return
            time.sleep(0.005)

    def _compare(self, number: int, found: dict[int, int]) -> None:
        for epoch, index in self._kept.items():
            if found.get(epoch, -1) < index and epoch not in self._may_be_gone:
                self.wrong.append(
                    f"life {number}: link {epoch} was kept up to {index}, and is up to {found.get(epoch)}"
                )
        self.wrong += [f"life {number}: link {epoch} was dropped, and is there" for epoch in self._gone & found.keys()]
        self._kept = found
        self._may_be_gone.clear()

    def _take(self, what: str, epoch: int, index: int) -> None:
        self.promises += 1
        if what == "kept":
            self._kept[epoch] = max(index, self._kept.get(epoch, 0))
        elif what == "dropping":
            self._may_be_gone.add(epoch)
        elif what == "dropped":
            self._gone.add(epoch)
            self._kept.pop(epoch, None)


def _last_line(path: Path) -> str:
    return next(reversed(path.read_text().splitlines()), "it said nothing")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="seriatim-power-"))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def main() -> int:
    """0: all was there; 1: something was lost; 3: it can't be run here."""
    if sys.argv[1:2] == ["--live"]:
        _, _, directory, promises, seed, planted = sys.argv
        store.MEMORY_BYTES = _MEMORY_BYTES  # type: ignore[misc]
        _plant(planted)

        async def life() -> None:
            await Life(Path(directory) / "member", Path(promises), random.Random(seed)).run()

        asyncio.run(life())
    parser = argparse.ArgumentParser(prog="python -m tests.faults.power", description=__doc__.splitlines()[0])
    parser.add_argument("--lives", type=int, default=20, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--wrong", choices=WRONG, default="", help="plant a store that promises too early")
    arguments = parser.parse_args()
    return network.run_inside("tests.faults.power", lambda: _lived(arguments))


def _lived(arguments: argparse.Namespace) -> int:
    with _folder() as folder:
        lives = Lives(folder, arguments.seed, arguments.wrong)
        try:
            for number in range(1, arguments.lives + 1):
                lives.live(number)
                if lives.wrong:
                    break
        finally:
            lives.close()
        found = f"seed {arguments.seed}: {number} lives, {lives.promises} promises, {len(lives.wrong)} broken"
        sys.stdout.write("\n".join((found, *lives.wrong, "")))
    return 1 if lives.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
