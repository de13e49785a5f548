"""The chain document as text: whole, for and from other versions, whatever its size; and each link read and written once."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random

import pytest

from seriatim.protocol import chain, chain_json
from seriatim.protocol.errors import ChainTooLong, IncompatibleVersion, NoChainDocument
from seriatim.protocol.marks import MARK_BYTES, SOURCES_ROOM_BYTES
from seriatim.protocol.names import (
    Epoch,
    Generation,
    Incarnation,
    Index,
    MemberName,
    Offset,
    QueueId,
    SubscriptionId,
    Token,
)
from seriatim.protocol.nodes import ChainNode, read_chain_node
from tests.chains import without_checksum

TRICKY = 'a "b"\n],"links":[\n]}\\'


def link(epoch: int, sources: int = 1, answered: str = "d") -> chain.Link:
    chance = random.Random(f"{epoch} {answered}")
    one = chain.ChainMember(MemberName("g1", "a"), Incarnation(answered, 1))
    marks = {f"{TRICKY}{number}": 2**64 - 1 - number for number in range(sources)}
    certificate = chain.Certificate(
        Index(5), (one.incarnation,), chain.Durability.ASYNC, False, marks, {}, chance.randbytes(32), None, 7
    )
    return chain.Link(
        Epoch(epoch), "g1", one, one, chain.LinkState.SEALED, chain.Durability.ASYNC, 5, Offset(0), {}, 1, certificate
    )


def document(*links: chain.Link) -> chain.ChainDocument:
    subscription = chain.Subscription(
        SubscriptionId(1), "s", Generation(1), Token(0), TRICKY, (Epoch(1),), Epoch(1), Index(0), 1
    )
    return chain.ChainDocument(
        "c",
        QueueId(1),
        "q",
        chain.QueueSettings(groups=("g1",)),
        1,
        chain.Dropped(Epoch(0), Offset(0), bytes(32), {}, {}),
        send_list=("g1",),
        links=links,
        subscriptions=(subscription,),
        stale_cursors=(chain.StaleCursors(Epoch(1), "a", ((SubscriptionId(1), Generation(1)),)),),
        abandoned=(chain.Abandoned(Epoch(1), TRICKY, 3, {"s": 7}),),
    )


OPEN = dataclasses.replace(link(3), certificate=None)
KNOWN = dataclasses.replace(link(1), certificate=dataclasses.replace(link(1).certificate, chain_hash=b"h" * 32))


@pytest.mark.parametrize("links", [(), (OPEN,), (KNOWN, link(2), OPEN)], ids=len)
def test_what_is_written_is_read_again_and_is_json_for_who_knows_nothing_of_lines(links):
    whole = document(*links)
    data = chain_json.encode(whole)
    assert chain_json.decode(data) == whole
    in_one_line = json.dumps(json.loads(data)).encode()  # as earlier versions wrote it
    assert b"\n" not in in_one_line
    assert chain_json.decode(in_one_line) == whole


def test_what_versions_before_cant_read_is_only_written_where_somebody_chose_it():
    """Else none of them could be gone back to."""
    plain = document(link(1))
    data = chain_json.encode(plain)
    assert b"rotate_ms" not in data
    assert b"cause_id" not in data
    chosen = dataclasses.replace(
        plain,
        settings=dataclasses.replace(plain.settings, rotate_ms=0),
        subscriptions=(dataclasses.replace(plain.subscriptions[0], cause_id="seek-1"),),
    )
    assert chain_json.decode(chain_json.encode(chosen)) == chosen


def test_an_earlier_versions_note_counts_for_everybody_who_reads_the_link_and_a_newer_format_is_refused():
    data = without_checksum(chain_json.encode(document(link(1))))
    note = json.loads(data)["stale_cursors"]
    older = data.replace(json.dumps(note, separators=(",", ":")).encode(), b'[[1,"a"]]')
    assert b'"stale_cursors":[[1,"a"]]' in older
    assert chain_json.decode(older) == document(link(1))
    unread = chain_json.decode(older.replace(b'[[1,"a"]]', b'[[9,"a"]]'))
    assert unread.stale_cursors == (chain.StaleCursors(Epoch(9), "a", ()),)
    with pytest.raises(
        IncompatibleVersion, match="has format 2, this version reads 1: start the version that wrote it"
    ):
        chain_json.decode(data.replace(b'"format":1', b'"format":2'))


@pytest.mark.parametrize(
    ("known", "newer"),
    [
        (b'"settings":{', b'"settings":{"tier":"s3",'),
        (b'"state":"sealed"', b'"state":"moved"'),
        (b'{"epoch":1,', b'{"tier":1,"epoch":1,'),
        (b'"send_list":', b'"sends":'),
        (b"{", b"\xff{"),
    ],
)
def test_what_a_newer_version_added_is_told_as_that(known, newer):
    """A version that adds something, and gives that no format of its own, ended older coordinators and brokers with a traceback."""
    data = without_checksum(chain_json.encode(document(link(1))))
    assert known in data
    with pytest.raises(IncompatibleVersion, match="start the version that wrote it"):
        chain_json.decode(data.replace(known, newer, 1))


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"5", b'"chain"', b"{}", b"\x28\xb5\x2f\xfd"])
def test_what_somebody_wrote_in_a_chain_s_place_is_told_as_no_chain(data):
    """Both members of each group that served the queue ended, and at each start again; as did coordinators, with a traceback."""
    with pytest.raises(NoChainDocument):
        chain_json.decode(data)


def test_thousands_of_links_or_sources_are_compressed_and_what_no_node_holds_is_refused():
    many = document(*(link(epoch) for epoch in range(1, 3000)))
    data = chain_json.encode(many)
    assert len(data) < chain_json.MAX_BYTES / 2
    assert chain_json.decode(data) == many
    wide = document(link(1, sources=10_000), link(2, sources=10_000), link(3, sources=10_000))
    data = chain_json.encode(wide)
    assert len(data) < chain_json.MAX_BYTES / 2
    assert chain_json.decode(data) == wide
    incarnations = (random.Random(epoch).randbytes(16).hex() for epoch in range(1, 20_000))
    with pytest.raises(ChainTooLong) as refused:
        chain_json.encode(document(*(link(epoch, answered=one) for epoch, one in enumerate(incarnations))))
    assert refused.value.details == {"queue": "q", "links": 19_999, "limit_bytes": chain_json.MAX_BYTES}


def test_a_link_that_is_known_is_neither_read_nor_written_again(monkeypatch):
    known = chain_json._Links(10_000)
    monkeypatch.setattr(chain_json, "_links", known)
    read = chain_json.decode(chain_json.encode(document(link(1), link(2))))
    after = dataclasses.replace(read, links=(*read.links, OPEN))
    encoded = []
    right = chain_json._ENCODER.encode
    monkeypatch.setattr(
        chain_json, "_ENCODER", type("Counting", (), {"encode": lambda _, one: encoded.append(one) or right(one)})()
    )
    again = chain_json.decode(chain_json.encode(after))
    assert again == after
    assert all(one is other for one, other in zip(again.links, after.links, strict=True))
    assert [one.epoch for one in encoded if isinstance(one, chain.Link)] == [3]


def test_what_is_known_of_links_is_bounded_and_the_oldest_goes(monkeypatch):
    size = len(chain_json._ENCODER.encode(link(1)))
    known = chain_json._Links(size * 10)
    monkeypatch.setattr(chain_json, "_links", known)
    for epoch in range(1, 100):
        one = document(link(1), link(epoch), link(epoch, answered="e"))
        assert chain_json.decode(chain_json.encode(one)) == one
    assert len(known._by_text) == len(known._text_of) <= 11
    assert {known._text_of[id(one)] for one in known._by_text.values()} == set(known._by_text)
    assert known.text(link(1)) in known._by_text  # in use all the time
    wide = document(link(1, sources=1000))
    assert chain_json.decode(chain_json.encode(wide)) == wide
    assert not known._by_text or sum(map(len, known._by_text)) <= size * 10


@pytest.mark.parametrize("name_bytes", [5, 44, 200])
def test_a_switch_fits_into_a_node_with_all_sources_that_a_queue_may_have(name_bytes):
    chance = random.Random(name_bytes)
    count = SOURCES_ROOM_BYTES // (name_bytes + MARK_BYTES)
    seqs = {chance.randbytes(name_bytes).hex()[:name_bytes]: chance.getrandbits(64) for _ in range(count)}
    before = {name: seq - chance.getrandbits(60) % (seq + 1) for name, seq in seqs.items()}
    one = link(1)
    ended = dataclasses.replace(one.certificate, marks=seqs, marks_on_two=seqs)
    whole = dataclasses.replace(
        document(
            dataclasses.replace(one, marks_on_two=before, certificate=ended),
            dataclasses.replace(OPEN, marks_on_two=seqs),
        ),
        dropped=chain.Dropped(Epoch(1), Offset(0), bytes(32), before, before),
    )
    data = chain_json.encode(whole)
    assert chain_json.decode(data) == whole
    assert len(data) < chain_json.MAX_BYTES * 0.8


@pytest.mark.parametrize("plain_bytes", [chain_json.PLAIN_BYTES, 0], ids=["plain", "compressed"])
def test_one_bit_that_has_changed_never_makes_another_chain(plain_bytes, monkeypatch):
    """An end, a token or a cursor of another value, which the next switch wrote back for good. In its beginning it was one of a newer version, and
    ended each coordinator that read it."""
    monkeypatch.setattr(chain_json, "PLAIN_BYTES", plain_bytes)
    whole = document(link(1), OPEN)
    data = chain_json.encode(whole)
    assert chain_json.is_whole(data)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        if chain_json.is_whole(bytes(changed)):
            assert chain_json.decode(bytes(changed)) == whole
        else:  # it is read, or written, again
            with pytest.raises(NoChainDocument):
                chain_json.decode(bytes(changed))
    with pytest.raises(NoChainDocument, match="bits have changed"):
        chain_json.decode(data.replace(b'"disk_id":"d"', b'"disk_id":"e"') if plain_bytes else data[:-1] + b"?")


def test_a_chain_that_was_damaged_on_its_way_is_read_again():
    data = chain_json.encode(document(link(1)))
    damaged = data.replace(b'"end":5', b'"end":4')

    class Session:
        def __init__(self, *held):
            self.held = list(held)

        async def get(self, path, watch):
            del path, watch
            return self.held.pop(0)

        async def version(self, path):
            del path
            return self.held.pop(0)

    def read(*held, known=-1):
        session = Session(*held)
        found = asyncio.run(read_chain_node(session, "/chain", known=known))
        assert not session.held
        return found

    assert read((damaged, 7), (data, 8)) == ChainNode(data, 8, is_whole=True)
    assert read((data, 7), 7) == ChainNode(data, 7, is_whole=True)
    assert read((data, 7), known=7) == ChainNode(data, 7, is_whole=True)
    assert not read((damaged, 7), (damaged, 7)).is_whole  # so it stands there
    # Its version is in no checksum: whoever took one for the newest that is higher than any took each chain that followed for an older one.
    for higher, told in ((7 | 1 << 20, 7), (7, 7 | 1 << 20)):
        assert read((data, higher), told, (data, 7), known=6) == ChainNode(data, 7, is_whole=True)
