"""Plans that are read while a transaction of the target is open.

Reading one may take minutes, as where Spark reads a micro-batch of a large transaction again on a slow path, and the server ends a session
that says nothing within its transaction for one (`TARGET_SETTINGS`): it would be begun anew for ever. So meanwhile a thread says
something. A process that is stopped says nothing either, and is ended as before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

from seriatim.consumer.spark.apply.plan import Plan

AWAKE_S = 20.0


def read_awake(connection: psycopg.Connection[Any], parts: Iterator[Plan]) -> Iterator[Plan]:
    """The parts; none is read on the connection, which is free again when one is given. Raises what they do, and psycopg."""
    while True:
        with _kept_awake(connection):
            part = next(parts, None)
        if part is None:
            return
        yield part


@contextlib.contextmanager
def _kept_awake(connection: psycopg.Connection[Any]) -> Iterator[None]:
    is_done = threading.Event()

    def speak() -> None:
        while not is_done.wait(AWAKE_S):
            connection.execute("SELECT")

    with ThreadPoolExecutor(1) as beside:
        speaking = beside.submit(speak)
        try:
            yield
        finally:
            is_done.set()
        speaking.result()
