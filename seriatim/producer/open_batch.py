"""The batch that records are put into: columns that grow, until it is closed."""

from __future__ import annotations

from collections.abc import Sequence

from seriatim.producer.core.sequencing import Identities
from seriatim.producer.handle import SharedBatch
from seriatim.producer.record import CheckedRecord
from seriatim.protocol.batch import RecordColumns
from seriatim.protocol.clock import monotonic_s
from seriatim.protocol.record import Headers


class OpenBatch:
    """`seqs` is None while all rows have automatic seqs, which are given when it is closed.

    A row without key, headers and seq may be put into `values` and `timestamps_ms` by whoever sees that `is_plain`.
    """

    __slots__ = (
        "headers",
        "keys",
        "opened_at_s",
        "seqs",
        "shared",
        "source_names",
        "sources",
        "timestamps_ms",
        "values",
    )

    def __init__(self, shared: SharedBatch) -> None:
        self.shared = shared
        self.values: list[bytes] = []
        self.timestamps_ms: list[int] = []
        self.keys: list[bytes | None] | None = None
        self.headers: list[Headers] | None = None
        self.seqs: list[int] | None = None
        self.sources: list[str] = []
        self.source_names: set[str] = set()
        self.opened_at_s = monotonic_s()

    @property
    def is_plain(self) -> bool:
        """Whether it has values and timestamps only."""
        return self.seqs is None and self.keys is None and self.headers is None

    def append(self, record: CheckedRecord, timestamp_ms: int, seq: int | None, source: str) -> int:
        """The row of a record. `seq` and `source` count where rows of this batch have them."""
        row = len(self.values)
        self.values.append(record.value)
        self.timestamps_ms.append(timestamp_ms)
        if self.seqs is not None and seq is not None:
            self.seqs.append(seq)
            self.sources.append(source)
            self.source_names.add(source)
        if record.key is not None and self.keys is None:
            self.keys = [None] * row
        if record.headers and self.headers is None:
            self.headers = [()] * row
        if self.keys is not None:
            self.keys.append(record.key)
        if self.headers is not None:
            self.headers.append(record.headers)
        return row

    def give_seqs(self, identities: Identities) -> None:
        """From here on there is a seq and a source for each row."""
        if self.seqs is None:
            count = len(self.values)
            first = identities.automatic(count)
            self.seqs = list(range(first, first + count))
            self.sources = [identities.name] * count
            self.source_names = {identities.name}

    def closed(self, identities: Identities) -> RecordColumns:
        """Its columns; whoever waits for it knows the identities of its rows from now on."""
        count = len(self.values)
        sources: str | list[str] = identities.name
        seqs: Sequence[int]
        if self.seqs is None:
            first = identities.automatic(count)
            self.shared.seqs, seqs = first, range(first, first + count)
        else:
            self.shared.seqs = seqs = self.seqs
            sources = self.sources[0] if len(self.source_names) == 1 else self.sources
        self.shared.source = sources
        self.shared.count = count
        return RecordColumns(self.values, seqs, sources, self.timestamps_ms, self.keys, self.headers)
