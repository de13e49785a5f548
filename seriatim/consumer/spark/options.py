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


NAMES = (
    "coordinators",
    "queue",
    "startingOffsets",
    "endingOffsets",
    "maxRecordsPerTrigger",
    "recordsPerPartition",
    "failOnDataLoss",
    "subscriptionId",
    "generation",
    "token",
    "maxBytesPerTask",
)
"""In Spark's spelling."""


def read_options(given: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Check what was given; case doesn't count. Raises InvalidArgument, which names the option."""
    options = {name.lower(): str(value).strip() for name, value in given.items()}
    unknown = options.keys() - {name.lower() for name in NAMES}
    if unknown:
        raise InvalidArgument(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if is_stream and "endingoffsets" in options:
        raise InvalidArgument("endingOffsets is for a batch read: a stream has no end")
    for needed in ("coordinators", "queue"):
        if not options.get(needed):
            raise InvalidArgument(f"option {needed} is missing")

    def place(name: str, default: str) -> Place:
        value = options.get(name.lower(), default)
        if value == "earliest":
            return "earliest"
        return "latest" if value == "latest" else _number(name, value, also="earliest, latest or ")

    def number(name: str, default: int = 0, *, least: int = 0) -> int:
        return _number(name, options.get(name.lower(), str(default)), least=least)

    found = SourceOptions(
        coordinators=options["coordinators"],
        queue=options["queue"],
        starting_offsets=place("startingOffsets", "latest" if is_stream else "earliest"),
        ending_offsets=place("endingOffsets", "latest"),
        max_records=number("maxRecordsPerTrigger"),
        records_per_partition=number("recordsPerPartition", _RECORDS_PER_PARTITION, least=1),
        fails_on_data_loss=_yes_or_no("failOnDataLoss", options.get("failondataloss", "true")),
        subscription_id=number("subscriptionId"),
        generation=number("generation"),
        token=number("token"),
        max_task_bytes=number("maxBytesPerTask"),
    )
    if found.ending_offsets == "earliest":
        raise InvalidArgument("endingOffsets is latest or an offset, not earliest")
    return found


def _number(name: str, value: str, *, least: int = 0, also: str = "") -> int:
    if not (value.isascii() and value.isdigit()) or not least <= int(value) <= _NUMBER_MAX:
        raise InvalidArgument(f"option {name} is {also}a number from {least} on, not {value!r}")
    return int(value)


def _yes_or_no(name: str, value: str) -> bool:
    if value.lower() not in {"true", "false"}:
        raise InvalidArgument(f"option {name} is true or false, not {value!r}")
    return value.lower() == "true"
