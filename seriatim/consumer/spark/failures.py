"""What a replay's query fails with, and what is told of the traces with which Spark says so."""

from __future__ import annotations

from seriatim.protocol.errors import DeadlineOver, SeriatimError, Unreachable, WorldError


class QueryFailed(WorldError):
    """Spark's query ended by itself: a task failed too often, or Spark itself did."""

    code = "query-failed"


class QueueSilent(QueryFailed):
    """Its tasks waited for records in vain, as while both members of their link are away: no fault of Spark's, and as long as that lasts."""

    code = "queue-silent"


class SparkGone(SeriatimError):
    """The JVM died under the replay, or Spark ended in it."""

    code = "spark-gone"
    next_step = "start the replay again: it goes on where the target stands"


def query_failed(what: str, error: object) -> QueryFailed:
    """All that comes of a task's error through Spark is its text."""
    line = last_line(error)
    is_silent = line.startswith(tuple(f"{kind.__module__}.{kind.__name__}:" for kind in (DeadlineOver, Unreachable)))
    return (QueueSilent if is_silent else QueryFailed)(f"{what}: {line}")


def last_line(error: object) -> str:
    """The line of a traceback that says what happened; Spark wraps it in many others, and puts what the query was at behind them."""
    said = str(error).partition("=== Streaming Query ===")[0]
    lines = [line for each in said.splitlines() if (line := each.strip()) and not line.startswith("at ")]
    telling = [
        line
        for line in lines
        if "Traceback" not in line
        and (line.startswith(("seriatim.", "Caused by: ")) or "Error" in line or "Exception" in line)
    ]
    return (telling or lines or ["no reason given"])[-1].removeprefix("Caused by: ")[:500]
