"""How long sending stands still when the current leader is killed or paused.

A load sends at a steady rate. Again and again: wait until all is whole, harm the leader, wait until records are
acknowledged again, heal. A killed server is started again at once, as a service manager would; a paused one goes on when
sending has recovered, or after `PAUSE_MAX_S` where it never does.
The outage is the longest time between two acknowledgements around the harm, less the ordinary gap.
"""

from __future__ import annotations

import signal
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.cases import Case
from bench.load import Order
from bench.measuring import LoadFailed, LoadProcess, wait_until
from bench.peers.base import Peer
from seriatim.cli.measurement import milliseconds, percentile

PAUSE_MAX_S = 30.0
_WHOLE_TIMEOUT_S = 120.0
_SETTLE_S = 2.0
"""Of ordinary sending before each harm."""
_STEADY_S = 0.5
"""So long records have to flow again before an outage counts as over."""
_LOOK_EVERY_S = 0.02


def measure_outages(
    peer: Peer, case: Case, target: dict[str, str], count: int, packages: Sequence[Path]
) -> dict[str, Any]:
    """Harm the leader `count` times; the outages. Raises LoadFailed where sending doesn't recover or not all is whole again."""
    order = Order(peer.client, target, "steady", case.size_bytes, rate=case.rate)
    with LoadProcess(order, packages, peer.directory / "load.log") as load:
        load.wait_for("begin", _WHOLE_TIMEOUT_S)
        harms = [_harm_once(peer, case, target["queue"], load) for _ in range(count)]
        load.stop()
        found = load.wait_for("end", _WHOLE_TIMEOUT_S)
    acknowledged_at_s = found["acknowledged_at_s"]
    outages_s = [outage_s(acknowledged_at_s, harmed_s, until_s) for harmed_s, until_s in harms]
    known_s = [one for one in outages_s if one is not None]
    if len(known_s) < count:
        raise LoadFailed("nothing was acknowledged any more after a harm")
    return {
        "outages_ms": [milliseconds(one) for one in known_s],
        "outage_p50_ms": milliseconds(percentile(known_s, 50)),
        "outage_max_ms": milliseconds(max(known_s)),
        "count": found["count"],
        "unacknowledged": found["count"] - len(acknowledged_at_s),
    }


def outage_s(acknowledged_at_s: Sequence[float], harmed_at_s: float, until_s: float) -> float | None:
    """How long sending stood still because of a harm.

    The longest time between two acknowledgements, of which the second came after the harm and the first before
    `until_s`, less the ordinary gap (the median of those before the harm). None where no acknowledgement came after.

    acknowledged_at_s: rising.
    """
    harmed = bisect_right(acknowledged_at_s, harmed_at_s)
    if harmed in {0, len(acknowledged_at_s)}:
        return None
    before = acknowledged_at_s[:harmed]
    ordinary_s = median(later - earlier for earlier, later in pairwise(before)) if harmed > 1 else 0.0
    around = acknowledged_at_s[harmed - 1 : max(harmed + 1, bisect_left(acknowledged_at_s, until_s) + 1)]
    return max(0.0, max(later - earlier for earlier, later in pairwise(around)) - ordinary_s)


def _harm_once(peer: Peer, case: Case, queue: str, load: LoadProcess) -> tuple[float, float]:
    """When the leader was harmed, and up to when the longest gap is looked for (perf_counter)."""
    wait_until(lambda: peer.is_whole(queue), "not all copies were whole before the harm", every_s=0.2)
    _wait_for_flow(load, case.rate, _SETTLE_S, _WHOLE_TIMEOUT_S)
    leader = peer.leader(queue)
    is_pause = case.signal == "SIGSTOP"
    harmed_s = time.perf_counter()
    peer.harm(leader, signal.Signals[case.signal])
    try:
        wait_until(lambda: load.latest.get("last_at_s", 0) > harmed_s + _LOOK_EVERY_S, "sending didn't recover",
                   PAUSE_MAX_S if is_pause else _WHOLE_TIMEOUT_S, every_s=_LOOK_EVERY_S)  # fmt: skip
        _wait_for_flow(load, case.rate, _STEADY_S, _WHOLE_TIMEOUT_S)
    except TimeoutError:
        if not is_pause:
            raise LoadFailed(f"{peer.name}: nothing was acknowledged after {leader} was killed") from None
    recovered_s = time.perf_counter()
    if is_pause:
        peer.heal(leader)
    wait_until(lambda: peer.is_whole(queue), "not all copies came back", every_s=0.2)
    _wait_for_flow(load, case.rate, _STEADY_S, _WHOLE_TIMEOUT_S)
    is_over = is_pause and recovered_s - harmed_s < PAUSE_MAX_S
    return harmed_s, recovered_s if is_over else time.perf_counter()


def _wait_for_flow(load: LoadProcess, rate: float, steady_s: float, timeout_s: float) -> None:
    """Until, for so long, records are acknowledged at least nearly as quickly as they are sent."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        before = load.latest.get("acknowledged", 0)
        time.sleep(steady_s)
        if load.latest.get("acknowledged", 0) - before >= rate * steady_s * 0.8:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"fewer than {rate:g} records a second are acknowledged")
        if load.process.poll() is not None:
            raise LoadFailed("the load ended")
