"""What a user of the data source may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from seriatim.protocol.errors import InvalidArgument

Place = Literal["earliest", "latest"] | int

_RECORDS_PER_PARTITION = 100_000
_NUMBER_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of ``spark.read.format("seriatim")`` and ``spark.readStream.format("seriatim")``, in Spark's spelling.

    Attributes:
        coordinators: ``HOST:PORT[,HOST:PORT…]``.
        queue: name of the queue.
        starting_offsets: ``startingOffsets``: earliest, latest or an offset (the first to read). A batch read starts at
            earliest unless told otherwise, a stream at latest, as with other sources; a stream with a checkpoint goes
            on where that says.
        ending_offsets: ``endingOffsets``: latest or an offset (exclusive), for a batch read.
        max_records: ``maxRecordsPerTrigger``: upper limit of a micro-batch; 0: none. There is no limit in bytes, because
            nobody knows the size of records before they are read.
        records_per_partition: ``recordsPerPartition``: a longer range is read by several tasks.
        fails_on_data_loss: ``failOnDataLoss``: whether records that retention dropped before they were read end the query,
            or are passed over.
        subscription_id, generation, token: ``subscriptionId``, ``generation``, ``token``: in whose name to read. Members
            refuse a reader once they know of a newer token. 0: in nobody's.
        max_task_bytes: ``maxBytesPerTask``: a task that reads more fails, for who collects all of it in one place; 0: no limit. A driver
            of an earlier version doesn't tell it: neither does its pickle hold it, nor may what is made of that be compared by it.
    """

    coordinators: str
    queue: str
    starting_offsets: Place
    ending_offsets: Place
    max_records: int
    records_per_partition: int
    fails_on_data_loss: bool
    subscription_id: int
    generation: int
    token: int
    max_task_bytes: int = field(compare=False)


NAMES = {
    "coordinators": "coordinators",
    "queue": "queue",
    "starting_offsets": "startingOffsets",
    "ending_offsets": "endingOffsets",
    "max_records": "maxRecordsPerTrigger",
    "records_per_partition": "recordsPerPartition",
    "fails_on_data_loss": "failOnDataLoss",
    "subscription_id": "subscriptionId",
    "generation": "generation",
    "token": "token",
    "max_task_bytes": "maxBytesPerTask",
}
"""Spark's spelling of each option."""


def read_options(given: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Check what was given; case doesn't count. Raises InvalidArgument, which names the option."""
    options = {name.lower(): str(value) for name, value in given.items()}
    unknown = options.keys() - {name.lower() for name in NAMES.values()}
    if unknown:
        raise InvalidArgument(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(NAMES.values())}")
    if is_stream and "endingoffsets" in options:
        raise InvalidArgument("endingOffsets is for a batch read: a stream has no end")

    def text(field: str, default: str = "") -> str:
        return options.get(NAMES[field].lower(), default).strip()

    for needed in ("coordinators", "queue"):
        if not text(needed):
            raise InvalidArgument(f"option {NAMES[needed]} is missing")
    found = SourceOptions(
        coordinators=text("coordinators"),
        queue=text("queue"),
        starting_offsets=_place("startingOffsets", text("starting_offsets", "latest" if is_stream else "earliest")),
        ending_offsets=_place("endingOffsets", text("ending_offsets", "latest")),
        max_records=_number("maxRecordsPerTrigger", text("max_records", "0")),
        records_per_partition=_number(
            "recordsPerPartition", text("records_per_partition", str(_RECORDS_PER_PARTITION)), least=1
        ),
        fails_on_data_loss=_yes_or_no("failOnDataLoss", text("fails_on_data_loss", "true")),
        subscription_id=_number("subscriptionId", text("subscription_id", "0")),
        generation=_number("generation", text("generation", "0")),
        token=_number("token", text("token", "0")),
        max_task_bytes=_number("maxBytesPerTask", text("max_task_bytes", "0")),
    )
    if found.ending_offsets == "earliest":
        raise InvalidArgument("endingOffsets is latest or an offset, not earliest")
    return found


def _place(name: str, value: str) -> Place:
    if value == "earliest":
        return "earliest"
    if value == "latest":
        return "latest"
    return _number(name, value, also="earliest, latest or ")


def _number(name: str, value: str, *, least: int = 0, also: str = "") -> int:
    if not (value.isascii() and value.isdigit()) or not least <= int(value) <= _NUMBER_MAX:
        raise InvalidArgument(f"option {name} is {also}a number from {least} on, not {value!r}")
    return int(value)


def _yes_or_no(name: str, value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise InvalidArgument(f"option {name} is true or false, not {value!r}")
    return value.lower() == "true"
