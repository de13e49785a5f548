"""How long one may act by one's own clock, in whoever's name."""

from __future__ import annotations

import pytest

from seriatim.protocol.lease import RENEWALS, Lease, renewal_interval_s


@pytest.mark.parametrize("holder", [7, "n-0000000007"])
def test_a_lease_is_two_thirds_of_the_session_from_before_the_write(holder) -> None:
    one = Lease(holder).renewed(holder, 100.0, 6.0)
    assert one.until_s == pytest.approx(104.0)
    assert one.usable_until_s == 0.0
    assert one.admitted().usable_until_s == pytest.approx(104.0)


def test_nobody_elses_write_renews_it_nor_does_an_older_one_and_a_new_holder_starts_without() -> None:
    one = Lease(7).renewed(7, 100.0, 6.0).admitted()
    assert one.renewed(8, 200.0, 6.0) == one
    assert one.renewed(7, 99.0, 6.0) == one
    assert Lease(8).admitted().usable_until_s == 0.0


def test_who_is_dismissed_may_nothing_until_it_is_admitted_again_and_then_what_was_proved_before() -> None:
    one = Lease("n").renewed("n", 100.0, 6.0).admitted().dismissed()
    assert one.usable_until_s == 0.0
    assert one.renewed("n", 101.0, 6.0).usable_until_s == 0.0
    assert one.admitted().usable_until_s == pytest.approx(104.0)


def test_it_is_renewed_several_times_before_it_is_over() -> None:
    assert RENEWALS * renewal_interval_s(6.0) == pytest.approx(4.0)
