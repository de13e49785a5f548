"""Switch time with more and more links that retention keeps: a switch writes the whole chain of the queue, three times."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.growth.cluster import GrownCluster, running
from bench.growth.findings import Finding
from bench.growth.switching import measure_switches
from bench.measuring import settle
from seriatim.producer import Producer
from seriatim.protocol import seriatim_pb2 as pb
from seriatim.protocol.errors import Waiting

GROWN = "links kept"
_GROUPS = 3
_TIMEOUT_S = 60.0
_WAIT_S = 0.1


def measure_links(sizes: Sequence[int], faults: Sequence[str], count: int, found: Finding) -> None:
    """One queue, rotated until it keeps as many links, each with a record. Points are added to `found`."""
    with running(_GROUPS) as cluster:
        cluster.make("load")
        for size in sorted(sizes):
            began_s = time.monotonic()
            _grow(cluster, "load", size)
            found.say(f"{size} links after {time.monotonic() - began_s:.0f} s")
            settle()
            measure_switches(cluster, (GROWN, size), faults, count, found)


def _grow(cluster: GrownCluster, queue: str, size: int) -> None:
    with Producer(cluster.addresses, queue, max_block_s=_TIMEOUT_S) as producer:
        for _ in range(size - len(cluster.view(queue).links)):
            producer.send(b"one").result(_TIMEOUT_S)
            _rotate(cluster, queue)


def _rotate(cluster: GrownCluster, queue: str) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            cluster.call("RotateQueue", pb.QueueRequest(queue=queue))
        except Waiting:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_WAIT_S)
        else:
            return
