"""Several coordinators, a sender and fate, in any order: the chain stays true, and in the end sending goes on."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seriatim.coordinator.core import subscriptions
from seriatim.coordinator.core.events import SendGrant
from seriatim.protocol.chain import ChainDocument, Durability, LinkState
from seriatim.protocol.chain_json import decode, encode
from seriatim.protocol.hashing import hash_after_link
from tests.chains import without_checksum
from tests.property.chain_world import GROUPS, World, close_call, send_call, with_subscription

_member = st.tuples(st.sampled_from(GROUPS), st.sampled_from(("a", "b")))
_go = st.tuples(st.just("go"), st.integers(0, 5), st.integers(0, 3))
_append = st.tuples(st.just("append"), st.sampled_from((0, 1, 2, 2, 2)))
_call = st.tuples(st.just("call"), st.integers(0, 1), st.booleans())
_finish = st.tuples(st.just("finish"), st.integers(0, 5))
_fate = st.one_of(
    st.tuples(st.just("close")),
    st.tuples(st.just("crash"), st.integers(0, 5)),
    st.tuples(st.just("kill"), _member),
    st.tuples(st.just("fail"), _member),
    st.tuples(st.just("expire"), _member),
    st.tuples(st.just("expire"), _member),
    st.tuples(st.just("restart"), _member),
)
_action = st.one_of(_go, _go, _go, _finish, _append, _append, _call, _fate)


def _play(world: World, actions: list[tuple]) -> None:
    _noted(world, send_call(world).finish())
    runs = []
    for action in actions:
        world.now_ms += 1
        kind = action[0]
        last = world.document.last_link
        if kind == "call" and len(runs) < 4:
            failed = last.epoch if action[2] and last is not None else 0
            runs.append(send_call(world, token=min(action[1], world.document.sender_token), failed_epoch=failed))
        elif kind == "close" and last is not None and len(runs) < 4:
            runs.append(close_call(world, last.epoch))
        elif kind == "go" and runs:
            run = runs[action[1] % len(runs)]
            run.go(action[2])
            if run.answer is not None:
                _noted(world, run.answer)
                runs.remove(run)
        elif kind == "finish" and runs:
            _noted(world, runs.pop(action[1] % len(runs)).finish())
        elif kind == "crash" and runs:
            runs.pop(action[1] % len(runs))
        elif kind == "append" and last is not None and last.epoch in world.granted:
            world.append(last.epoch, action[1])
        elif kind in ("kill", "fail", "expire", "restart"):
            getattr(world, kind)(action[1])


def _noted(world: World, answer: object) -> None:
    if isinstance(answer, SendGrant):
        world.granted[answer.link.epoch] = answer.next_index
        assert answer.next_index >= world.acknowledged.get(answer.link.epoch, 0)


def _healed(world: World) -> None:
    for key in world.members:
        world.restart(key)
    for link in world.document.links:
        if link.state in (LinkState.CLOSING, LinkState.LOST):
            close_call(world, link.epoch).finish()


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_action, max_size=120), st.sampled_from((None, 0, 1, 3)))
def test_whatever_happens_the_chain_stays_true_and_sending_goes_on(actions: list[tuple], lag: int | None) -> None:
    world = World()
    world.lag = lag
    with_subscription(world)
    _play(world, actions)
    _healed(world)
    # What is left to read is read, so that any group may come back.
    for epoch in world.document.subscriptions[0].consume_list:
        link = world.document.link(epoch)
        if link is not None and link.state is LinkState.SEALED:
            subscription = world.document.subscriptions[0]
            world.document = subscriptions.drained(
                world.document, subscription.subscription_id, subscription.generation, epoch
            )
    answer = send_call(world).finish()
    assert isinstance(answer, SendGrant), answer
    assert answer.is_resume_known
    for link in world.document.links:
        if link.end is not None:
            assert link.end >= world.acknowledged.get(link.epoch, 0)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_action, max_size=80), st.sampled_from(Durability))
def test_an_exported_chain_can_be_checked_offline(actions: list[tuple], durability: Durability) -> None:
    world = World(durability)
    _play(world, actions)
    _healed(world)
    exported = encode(world.document)
    document = decode(exported)
    assert document == world.document
    _check_offline(world, document)


def _check_offline(world: World, document: ChainDocument) -> None:
    """From the document and one copy of each link alone: hashes, bases and marks follow from one another."""
    chain_hash, offset = document.dropped.chain_hash, document.dropped.offset
    for link in document.links:
        certificate = link.certificate
        if certificate is None:
            break
        if certificate.end:
            copies = [
                one
                for member in world.members.values()
                for one in member.copies.get(link.epoch, world.members["g1", "a"].copy(link.epoch)).positions
                if one.index == certificate.end
            ]
            assert certificate.link_hash in {one.hash for one in copies}
        chain_hash = hash_after_link(chain_hash, link.epoch, certificate.end, certificate.link_hash)
        assert certificate.chain_hash == chain_hash
        assert link.base == offset
        offset += certificate.end


def test_a_false_certificate_is_found_offline() -> None:
    world = World()
    grant = send_call(world).finish()
    assert isinstance(grant, SendGrant)
    world.append(grant.link.epoch, 2)
    send_call(world, token=1, failed_epoch=1).finish()
    text = without_checksum(encode(world.document))
    hash_hex = world.document.links[0].certificate.link_hash.hex().encode()
    forged = decode(text.replace(hash_hex, bytes(reversed(hash_hex))))
    try:
        _check_offline(world, forged)
    except AssertionError:
        return
    raise AssertionError("a forged certificate was not noticed")


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from((0, 1, 2, 2)), max_size=5),
    st.integers(0, 40),
    st.permutations(("a", "b")),
    st.sampled_from(("fail", "kill")),
    st.sampled_from(Durability),
)
def test_disks_of_the_head_that_fail_stop_nobody_and_nothing_acknowledged_is_cut(
    reaches: list[int], cut: int, places: tuple[str, str], other: str, durability: Durability
) -> None:
    """Both members stay registered, or the one that is gone does for a while; the link is lost until one is back."""
    world = World(durability)
    with_subscription(world)
    grant = send_call(world).finish()
    assert isinstance(grant, SendGrant)
    for reach in reaches:
        world.append(grant.link.epoch, reach)
    run = send_call(world, token=1, failed_epoch=1)
    world.fail(("g1", places[0]))
    for _ in range(cut):
        if run.answer is None:
            run.go()
    getattr(world, other)(("g1", places[1]))
    went_on = send_call(world, token=1, failed_epoch=1).finish()
    assert isinstance(went_on, SendGrant), went_on
    assert (went_on.link.epoch, went_on.link.group) == (2, "g2")
    link = world.document.link(grant.link.epoch)
    if link.end is None:
        assert link.state is LinkState.LOST
        assert world.document.subscriptions[0].consume_list == (1, 2)
        assert not went_on.is_resume_known
    world.restart(("g1", places[0]))
    close_call(world, 1).finish()
    sealed = world.document.link(grant.link.epoch)
    assert sealed.state is LinkState.SEALED or not durability.survives_restart
    assert sealed.end is None or sealed.end >= world.acknowledged.get(grant.link.epoch, 0)


@settings(max_examples=60)
@given(st.integers(0, 40), st.booleans(), st.sampled_from((None, 0, 1, 3)))
def test_a_call_cut_off_anywhere_is_finished_by_the_next_one(cut: int, is_master_dead: bool, lag: int | None) -> None:
    world = World()
    world.lag = lag
    with_subscription(world)
    first = send_call(world).finish()
    assert isinstance(first, SendGrant)
    world.append(first.link.epoch, 2)
    if is_master_dead:
        world.kill(("g1", "a"))
    run = send_call(world, token=1, failed_epoch=1)
    for _ in range(cut):
        if run.answer is None:
            run.go()
    again = send_call(world, token=1, failed_epoch=1).finish()
    assert isinstance(again, SendGrant)
    assert (again.link.epoch, again.link.group) == (2, "g2")
    assert world.document.link(first.link.epoch).end == 1
    assert world.document.subscriptions[0].consume_list == (1, 2)
