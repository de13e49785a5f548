"""`seriatim bench`: load through the public libraries, and figures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from seriatim.cli import coordinators, exits
from seriatim.cli.foreground import interruptible
from seriatim.cli.options import Finite, coordinator_option, json_option, session_timeout_option

if TYPE_CHECKING:
    from seriatim.consumer import Consumer
    from seriatim.producer import Handle

_CHUNK_BYTES = 64 * 1024
_CHUNK_RECORDS = 1000
_IDLE_S = 5.0
_ELECTION_TIMEOUT_S = 60.0
_FAULTS = ("master-kill", "slave-kill", "master-pause", "slave-pause", "rotate", "sender-kill", "sender-stop")

_queue = click.option("--queue", required=True, metavar="NAME", help="Queue to use; made where it isn't there.")
_durability = click.option(
    "--durability",
    type=click.Choice(["sync", "interval", "async", "memory"]),
    default="sync",
    show_default=True,
    help="Of a queue that is made; one that is there keeps its own.",
)


def _size(default: int) -> Callable[[Any], Any]:
    return click.option(
        "--size",
        type=click.IntRange(1, 32 * 1024 * 1024),
        default=default,
        show_default=True,
        metavar="BYTES",
        help="Of a record's value.",
    )


def _count(default: int, what: str) -> Callable[[Any], Any]:
    return click.option("--count", type=click.IntRange(1), default=default, show_default=True, metavar="N", help=what)


_batch_bytes = click.option(
    "--batch-bytes", type=click.IntRange(1, 16 * 1024 * 1024), default=512 * 1024, show_default=True, help="Of a batch."
)


@click.group(short_help="Measure throughput, latency and failover.")
def bench() -> None:
    r"""Measure a queue through the same libraries that applications use.

    A megabyte is a million bytes of values. With --json: records_per_s, mb_per_s, latency_p50_ms, latency_p99_ms, and
    more.

    \b
    Example:
      seriatim bench produce --queue load --size 100 --count 1000000
    """
    # A subscription that nobody reads, or a broker that stays paused, would harm the cluster for good.
    click.get_current_context().with_resource(interruptible())


@bench.command(short_help="How fast records are taken.")
@_queue
@_size(100)
@_count(1_000_000, "Records to send.")
@_batch_bytes
@_durability
@coordinator_option
@json_option
def produce(
    *, queue: str, size: int, count: int, batch_bytes: int, durability: str, coordinator: str, is_json: bool
) -> None:
    r"""Send COUNT records as fast as they are taken. Latency: from handing over to acknowledgement, under this load.

    \b
    Example:
      seriatim bench produce --queue load --size 1024 --count 200000 --json
    """
    from seriatim.cli.measurement import throughput
    from seriatim.producer import Producer

    _ensure(coordinator, queue, durability)
    chunk = [os.urandom(size)] * max(1, min(_CHUNK_RECORDS, _CHUNK_BYTES // size))
    latencies_s: list[float] = []

    def note(sent_at_s: float) -> Callable[[Handle], None]:
        return lambda _handle: latencies_s.append(time.perf_counter() - sent_at_s)

    with Producer(coordinator, queue, batch_bytes=batch_bytes) as producer, _progress("sent", count) as advance:
        producer.wait_until_elected(_ELECTION_TIMEOUT_S)
        started_s = time.perf_counter()
        left = count
        while left:
            values = chunk if left >= len(chunk) else chunk[:left]
            sent_at_s = time.perf_counter()
            producer.send_many(values)[-1].add_done_callback(note(sent_at_s))
            left -= len(values)
            advance(len(values))
        producer.flush()
        seconds = time.perf_counter() - started_s
    _show(
        {"bench": "produce", "queue": queue, "size": size, **throughput(count, size, seconds, latencies_s)},
        is_json=is_json,
    )


@bench.command(short_help="How fast records are handed out.")
@click.option("--queue", required=True, metavar="NAME", help="Queue to read.")
@_size(100)
@_count(1_000_000, "Records to read, from the earliest kept one.")
@click.option(
    "--subscription", metavar="NAME", help="Read this one on, and keep it. [default: one of its own, deleted after]"
)
@coordinator_option
@json_option
def consume(*, queue: str, size: int, count: int, subscription: str | None, coordinator: str, is_json: bool) -> int:
    r"""Read COUNT records. Ends with 1 where the queue holds fewer.

    Megabytes are of the values read, --size is not looked at. Latency: how long the application waits for more records.

    \b
    Example:
      seriatim bench consume --queue load --count 1000000 --json
    """
    from seriatim.cli.measurement import throughput
    from seriatim.consumer import Consumer
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import DeadlineOver, UnknownSubscription, Unreachable

    def is_at_end(consumer: Consumer) -> bool:
        """A path so slow that nobody can be asked isn't the end."""
        with suppress(DeadlineOver, Unreachable):
            return consumer.is_at_end()
        return False

    del size
    name = subscription or f"bench-{os.urandom(4).hex()}"
    waits_s: list[float] = []
    done = size_bytes = 0
    try:
        with Consumer(coordinator, queue, name, start="earliest") as consumer, _progress("read", count) as advance:
            _wait_until_elected(consumer)
            started_s = last_s = time.perf_counter()
            while done < count:
                asked_s = time.perf_counter()
                records = consumer.poll(min(10_000, count - done), _IDLE_S)
                if not records:
                    if is_at_end(consumer):
                        break
                    continue
                last_s = time.perf_counter()
                waits_s.append(last_s - asked_s)
                done += len(records)
                size_bytes += sum(len(record.value) for record in records)
                advance(len(records))
    finally:
        if subscription is None:
            with suppress(UnknownSubscription):  # what failed before it was made is what is to be told
                coordinators.call(
                    coordinator, "DeleteSubscription", pb.SubscriptionRequest(queue=queue, subscription=name)
                )
    figures = throughput(done, 0, last_s - started_s, waits_s)
    figures["mb_per_s"] = round(size_bytes / max(last_s - started_s, 1e-9) / 1e6, 3)
    _show({"bench": "consume", "queue": queue, "size": round(size_bytes / max(done, 1)), **figures}, is_json=is_json)
    if done < count:
        click.echo(f"the queue holds only {done:,} of {count:,} records", err=True)
        return exits.ANSWER_IS_NO
    return exits.DONE


@bench.command(short_help="How long one record takes.")
@_queue
@_size(100)
@_count(1000, "Records to send, one after the other.")
@_durability
@coordinator_option
@json_option
def latency(*, queue: str, size: int, count: int, durability: str, coordinator: str, is_json: bool) -> None:
    r"""Send COUNT records, each when the one before is acknowledged. Latency: from handing over to acknowledgement.

    \b
    Example:
      seriatim bench latency --queue load --count 2000
    """
    from seriatim.cli.measurement import throughput
    from seriatim.producer import Producer

    _ensure(coordinator, queue, durability)
    value = os.urandom(size)
    latencies_s: list[float] = []
    with Producer(coordinator, queue) as producer, _progress("acknowledged", count) as advance:
        producer.wait_until_elected(_ELECTION_TIMEOUT_S)
        producer.send(value).result(_ELECTION_TIMEOUT_S)  # the first one opens the link; it isn't counted
        started_s = time.perf_counter()
        for _ in range(count):
            sent_at_s = time.perf_counter()
            producer.send(value).result(_ELECTION_TIMEOUT_S)
            latencies_s.append(time.perf_counter() - sent_at_s)
            advance(1)
        seconds = time.perf_counter() - started_s
    _show(
        {"bench": "latency", "queue": queue, "size": size, **throughput(count, size, seconds, latencies_s)},
        is_json=is_json,
    )


@bench.command(short_help="How long sending and reading stand still when something fails.")
@_queue
@_size(100)
@_count(10, "How often the fault is made.")
@click.option("--rate", type=Finite(min=1), default=1000.0, show_default=True, help="Records a second.")
@click.option(
    "--fault",
    type=click.Choice(list(_FAULTS)),
    help="What is done, to the present master or slave or the elected sender. [default: master-kill with --pids, else rotate]",
)
@click.option(
    "--pids",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="DIR/pids.json of `seriatim up`, which starts again what is killed. Faults of members need it.",
)
@session_timeout_option
@_durability
@coordinator_option
@json_option
def failover(
    *,
    queue: str,
    size: int,
    count: int,
    rate: float,
    fault: str | None,
    pids: Path | None,
    session_timeout_ms: int,
    durability: str,
    coordinator: str,
    is_json: bool,
) -> int:
    r"""Send at a steady rate and read, make one kind of fault COUNT times, each time wait until all is as before.

    \b
    master-kill, slave-kill    SIGKILL to a member of the open link's group
    master-pause, slave-pause  SIGSTOP, and SIGCONT once records flow again
    rotate                     a planned switch to the next group
    sender-kill, sender-stop   SIGKILL to the elected sender, or SIGTERM, upon which it closes; another stands by

    An outage is the longest time between two acknowledgements around the fault, less the ordinary gap; reading_outage the
    same for deliveries to a reader. Sender and reader are processes of their own. Ends with 1 where a record has no end:
    neither acknowledged, nor unknown to a sender that stopped (of a killed one nobody can tell).

    \b
    Example:
      seriatim bench failover --queue load --fault master-pause --count 50 --pids DIR/pids.json
    """
    from seriatim.cli.failover import FailoverRun, Fault
    from seriatim.cli.workload import Workload

    _ensure(coordinator, queue, durability)
    kind = Fault(fault or ("master-kill" if pids else "rotate"))
    subscription = f"bench-{os.urandom(4).hex()}"
    workload = Workload(coordinator, queue, size, rate, session_timeout_ms / 1000, subscription)
    with _progress(kind.value, count) as advance:
        figures = FailoverRun(kind, workload, count, pids, lambda: advance(1)).measure()
    _show(figures, is_json=is_json)
    ended = (figures["records_acknowledged"], figures["records_unknown"])
    is_whole = kind is Fault.SENDER_KILL or (figures["records_sent"], 0) == ended
    return exits.DONE if is_whole else exits.ANSWER_IS_NO


def _wait_until_elected(consumer: Consumer) -> None:
    deadline_s = time.monotonic() + _ELECTION_TIMEOUT_S
    while not consumer.is_elected:
        if time.monotonic() > deadline_s:
            from seriatim.protocol.errors import Waiting

            raise Waiting(f"not elected to read within {_ELECTION_TIMEOUT_S:g} s: waiting for {consumer.waiting_for}")
        time.sleep(0.005)


def _ensure(coordinator: str, queue: str, durability: str) -> None:
    """Make the queue where it isn't there, and say so."""
    from seriatim.protocol import seriatim_pb2 as pb
    from seriatim.protocol.errors import UnknownQueue

    try:
        coordinators.call(coordinator, "DescribeQueue", pb.QueueRequest(queue=queue))
    except UnknownQueue:
        settings = pb.QueueSettings(durability=durability)
        coordinators.call(coordinator, "CreateQueue", pb.CreateQueueRequest(queue=queue, settings=settings))
        click.echo(f"queue {queue} wasn't there: made it, durability {durability}", err=True)


@contextmanager
def _progress(what: str, count: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done: None
        return
    shown = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(what, total=count)
        yield lambda done: progress.advance(task, done)


def _show(figures: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        exits.answer(json.dumps(figures))
        return
    text = (
        f"{figures['bench']}: {figures['count']:,} records of {figures['size']:,} bytes in {figures['seconds']:.2f} s: "
        f"{figures['records_per_s']:,} records/s, {figures['mb_per_s']:,.1f} MB/s, "
        f"latency p50 {_text(figures['latency_p50_ms'])}, p99 {_text(figures['latency_p99_ms'])}"
    )
    exits.answer(text)
    if "outages_ms" in figures:
        exits.answer(
            f"{figures['fault']}, {figures['harms']} times: sending stood still p50 {_text(figures['outage_p50_ms'])}, "
            f"p99 {_text(figures['outage_p99_ms'])}, longest {_text(figures['outage_max_ms'])}; "
            f"reading p50 {_text(figures['reading_outage_p50_ms'])}, p99 {_text(figures['reading_outage_p99_ms'])}; "
            f"{figures['records_acknowledged']:,} of {figures['records_sent']:,} records acknowledged"
        )


def _text(value_ms: float | None) -> str:
    return "unknown" if value_ms is None else f"{value_ms:,.2f} ms"
