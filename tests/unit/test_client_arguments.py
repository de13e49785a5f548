"""What an application gives its clients: what can't be is refused when it is given, whoever is asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from seriatim.consumer import Consumer, RangeReader, Subscriber
from seriatim.producer import Producer
from seriatim.protocol.coordinators import VARIABLE, addresses_of
from seriatim.protocol.errors import InvalidArgument

Reader = Callable[..., Any]


@pytest.mark.parametrize(
    "settings",
    [
        {"session_timeout_s": 0},
        {"session_timeout_s": float("nan")},
        {"session_timeout_s": 3_000_000},
        {"session_timeout_s": "5"},
        {"connect_timeout_s": "5"},
        {"connect_timeout_s": -1},
    ],
)
@pytest.mark.parametrize("reader", [Consumer, Subscriber])
def test_a_reader_refuses_times_that_nobody_can_wait(reader: Reader, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
        reader("h:1", "q", **settings)


@pytest.mark.parametrize("setting", ["batch_bytes", "max_buffer_bytes"])
@pytest.mark.parametrize("size", ["5", 1.5, None, 0])
def test_a_producer_refuses_sizes_that_cannot_be(setting: str, size: Any) -> None:
    with pytest.raises(InvalidArgument, match=setting):
        Producer("h:1", "q", **{setting: size})


@pytest.mark.parametrize("idle_timeout_s", [-1, "5"])
def test_a_consumer_refuses_an_idle_time_that_cannot_be(idle_timeout_s: Any) -> None:
    with pytest.raises(InvalidArgument, match="idle_timeout_s"):
        Consumer("h:1", "q", idle_timeout_s=idle_timeout_s)


def test_who_sends_by_a_producer_that_is_closed_is_told_so() -> None:
    """Not that another instance is elected: nothing would come of waiting for the next election."""
    producer = Producer("127.0.0.1:1", "q")
    producer.abort()
    for use in (
        lambda: producer.send(b"1"),
        lambda: producer.send_many([b"1"]),
        lambda: asyncio.run(producer.send_async(b"1")),
        producer.wait_until_elected,
    ):
        with pytest.raises(InvalidArgument, match="the producer was closed"):
            use()


@pytest.mark.parametrize("timeout", ["5", b"5", float("nan")])
def test_a_time_out_that_is_no_number_is_refused_where_it_is_given(timeout: Any) -> None:
    """It was a TypeError from within, and a coroutine that nobody awaited. (`Handle.result` is compiled, and says so itself.)"""
    producer, consumer, subscriber = Producer("h:1", "q"), Consumer("h:1", "q"), Subscriber("h:1", "q")
    calls: list[Callable[[], object]] = [
        lambda: producer.flush(timeout),
        lambda: producer.close(timeout),
        lambda: producer.wait_until_elected(timeout),
        lambda: consumer.poll(timeout_s=timeout),
        lambda: consumer.seek(0, timeout_s=timeout),
        lambda: consumer.is_at_end(timeout_s=timeout),
        lambda: consumer.run(print, backoff_s=timeout),
        lambda: consumer.run(print, backoff_max_s=timeout),
        lambda: subscriber.wait_elected(timeout),
        lambda: subscriber.seek(0, timeout_s=timeout),
        lambda: RangeReader("h:1", "q", timeout_s=timeout),
        lambda: Consumer("h:1", "q", auto_commit_ms=timeout),
    ]
    try:
        for call in calls:
            with pytest.raises(InvalidArgument, match="is a number"):
                call()
    finally:
        producer.abort()


def test_coordinators_are_those_given_or_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses_of(" a:1, b:2,") == addresses_of(["a:1", "b:2"]) == addresses_of(["a:1,b:2"]) == ["a:1", "b:2"]
    monkeypatch.setenv(VARIABLE, "c:3,d:4")
    assert addresses_of(None) == ["c:3", "d:4"]
    monkeypatch.delenv(VARIABLE)
    for nobody in (None, "", []):
        with pytest.raises(InvalidArgument, match=VARIABLE):
            addresses_of(nobody)


def test_the_package_shows_its_names_before_they_are_imported() -> None:
    """In a process of its own: elsewhere they were used before."""
    asks = "import seriatim; print(*dir(seriatim)); from seriatim import *; print(Producer.__name__, Record.__name__)"
    said = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True, timeout=60).stdout
    names, imported = said.splitlines()
    assert {"Consumer", "Producer", "RangeReader", "Record", "Subscriber"} <= set(names.split())
    assert imported == "Producer Record"
