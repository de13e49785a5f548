"""Which of the views that coordinators tell a reader goes by, and what they say was deleted."""

from __future__ import annotations

import pytest

from seriatim.consumer.core.following import Following
from seriatim.consumer.core.view import ChainView, SubscriptionView
from seriatim.protocol.errors import UnknownQueue, UnknownSubscription
from seriatim.protocol.names import ChainVersion, Generation, QueueId, SubscriptionId

MINE = SubscriptionView(SubscriptionId(7), "s", Generation(1), ())
BEGINNING = Following(QueueId(1), SubscriptionId(7))


def view(version: int, *subscriptions: SubscriptionView, queue_id: int = 1, is_deleted: bool = False) -> ChainView:
    return ChainView("c", queue_id, "q", ChainVersion(version), (), subscriptions, is_deleted)


def test_the_newest_view_is_gone_by_and_of_one_version_the_last_word() -> None:
    two, again, three = view(2, MINE), view(2, MINE), view(3, MINE)
    following = BEGINNING.told(two)
    assert following.view is two
    assert following.told(again).view is again  # who is registered may have changed
    assert following.told(three).told(again).view is three


def test_no_view_counts_that_is_of_before_the_subscription_was_made_or_of_another_queue() -> None:
    """A coordinator that lags behind had the reader end, by a subscription that it didn't know yet."""
    early = view(1)
    assert BEGINNING.told(early) == BEGINNING
    assert BEGINNING.what_is_gone(early, "q", "s") is None
    following = BEGINNING.told(view(2, MINE))
    assert following.told(early) == following
    assert following.what_is_gone(early, "q", "s") is None
    assert following.told(view(9, MINE, queue_id=2)) == following


def test_a_grant_counts_where_nothing_newer_was_told() -> None:
    two, again, three = view(2, MINE), view(2, MINE), view(3, MINE)
    assert BEGINNING.granted(two).view is two
    assert BEGINNING.told(two).granted(again).view is two  # which was told later
    assert BEGINNING.told(two).granted(three).view is three
    assert BEGINNING.told(three).granted(two).view is three


@pytest.mark.parametrize("gone", [view(2, MINE, queue_id=2), view(3, MINE, is_deleted=True)])
def test_a_queue_that_was_deleted_or_made_again_is_gone(gone: ChainView) -> None:
    following = BEGINNING.told(view(2, MINE)).told(gone)
    error = following.what_is_gone(gone, "q", "s")
    assert isinstance(error, UnknownQueue)
    assert error.message == "queue 'q' was deleted"
    assert error.details == {"queue": "q"}


def test_a_subscription_that_was_there_and_isn_t_any_more_is_gone_also_where_one_has_its_name() -> None:
    gone = view(3, SubscriptionView(SubscriptionId(8), "s", Generation(1), ()))
    following = BEGINNING.told(view(2, MINE)).told(gone)
    error = following.what_is_gone(gone, "q", "s")
    assert isinstance(error, UnknownSubscription)
    assert error.message == "subscription 's' of queue 'q' was deleted"
    assert error.details == {"queue": "q"}
    there = view(4, MINE)
    assert following.told(there).what_is_gone(there, "q", "s") is None
