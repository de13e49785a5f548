"""A forged chain must be rejected, whatever was changed in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seriatim.protocol.batch import RecordColumns, encode
from seriatim.protocol.hashing import EMPTY_HASH, hash_after_batch, hash_after_link
from seriatim.protocol.names import Epoch, Index
from tests.faults.certificates import Claim, StoredBatch, problems

Copies = dict[tuple[Epoch, str], list[StoredBatch]]


def batch(first: int, count: int, value: bytes = b"value") -> StoredBatch:
    encoded = encode(RecordColumns([value] * count, list(range(first, first + count)), "p", [0] * count), Index(first))
    return encoded.header_bytes, encoded.payload


def chain() -> tuple[list[Claim], Copies]:
    """Three links of two batches, none, and one; both members hold all."""
    contents = ([batch(0, 3), batch(3, 2)], [], [batch(0, 4)])
    claims, copies = [], {}
    chain_hash, base = EMPTY_HASH, 0
    for number, (batches, end) in enumerate(zip(contents, (5, 0, 4), strict=True), 1):
        epoch, link_hash = Epoch(number), EMPTY_HASH
        for header, _ in batches:
            link_hash = hash_after_batch(link_hash, header)
        chain_hash = hash_after_link(chain_hash, epoch, Index(end), link_hash)
        claims.append(Claim(epoch, base, Index(end), link_hash, chain_hash))
        base += end
        for member in ("a", "b"):
            copies[epoch, member] = list(batches)
    return claims, copies


def test_accepts_what_was_certified() -> None:
    assert problems(*chain()) == []


@pytest.mark.parametrize(
    ("place", "stored", "what"),
    [
        (0, (batch(0, 3)[0], batch(0, 3, b"other")[1]), "can't be read"),  # a payload under another's header
        (0, batch(0, 3, b"other"), "hash"),
        (1, batch(4, 2), "starts at 4"),
        (1, batch(3, 3), "end at 6"),
    ],
)
def test_rejects_another_batch(place: int, stored: StoredBatch, what: str) -> None:
    claims, copies = chain()
    copies[Epoch(1), "b"][place] = stored
    (problem,) = problems(claims, copies)
    assert "link 1 on b" in problem
    assert what in problem


def test_rejects_a_missing_tail_and_a_link_without_a_certificate() -> None:
    claims, copies = chain()
    copies[Epoch(1), "a"].pop()
    copies[Epoch(4), "a"] = []
    assert [problem.split(":")[0] for problem in problems(claims, copies)] == [
        "link 1 on a",
        "link 4 on a has no certificate",
    ]


@pytest.mark.parametrize(
    "forged",
    [
        {"end": Index(4)},
        {"link_hash": hash_after_batch(EMPTY_HASH, b"")},
        {"chain_hash": EMPTY_HASH},
        {"epoch": Epoch(5)},
        {"base": 1},
    ],
)
def test_rejects_a_forged_certificate(forged: dict[str, object]) -> None:
    claims, copies = chain()
    claims[0] = replace(claims[0], **forged)
    assert problems(claims, copies)


def test_rejects_links_that_changed_places() -> None:
    claims, _ = chain()
    assert problems([claims[0], claims[2], claims[1]], {})
