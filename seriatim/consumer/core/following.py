"""The queue as the reader of one subscription goes by it: the newest view that it was told, by whomever.

Coordinators that lag behind tell older ones; and a queue, or a subscription, that is deleted and made again under its name is another one (H16).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from seriatim.consumer.core.view import ChainView
from seriatim.protocol.errors import SeriatimError, UnknownQueue, UnknownSubscription
from seriatim.protocol.names import QueueId, SubscriptionId


@dataclass(frozen=True, slots=True)
class Following:
    """`view`: None before any that has the subscription; from then on its version never falls, and one that lacks it says that it was deleted."""

    queue_id: QueueId
    subscription_id: SubscriptionId
    view: ChainView | None = None

    def told(self, view: ChainView) -> Following:
        """Somebody tells how the queue is. Of one version the last word counts: who is registered changes within it."""
        if view.queue_id != self.queue_id:
            return self
        if self.view is None:
            is_of_before = view.subscription(self.subscription_id) is None
            return self if is_of_before else replace(self, view=view)
        return self if view.version < self.view.version else replace(self, view=view)

    def granted(self, view: ChainView) -> Following:
        """A grant tells how the queue was when its coordinator began to look. What was told since counts."""
        is_news = self.view is None or self.view.version < view.version
        return replace(self, view=view) if is_news else self

    def what_is_gone(self, view: ChainView, queue: str, subscription: str) -> SeriatimError | None:
        """What `view`, just told, of the queue that has this name now, says of these two that was deleted; None: nothing."""
        if view.queue_id != self.queue_id or view.is_deleted:
            return UnknownQueue(f"queue {queue!r} was deleted", queue=queue)
        if view is self.view and view.subscription(self.subscription_id) is None:
            return UnknownSubscription(f"subscription {subscription!r} of queue {queue!r} was deleted", queue=queue)
        return None
