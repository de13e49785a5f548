"""The sending side: elected senders, batches in flight, acknowledgements, what to do after a failure.

    with Producer("127.0.0.1:7000", "orders") as producer:
        handle = producer.send(b"value", key=b"key")
        print(handle.result(timeout=5))          # Acknowledged(epoch=1, index=0, offset=0, source=…, seq=…)

What it promises (docs/protocol.md 4):

- Records are stored in the order in which they were sent, also across failures; a record is acknowledged only when two
  members hold it as durably as the queue asks.
- Only the elected instance sends. `send` waits while this one stands by. An instance that is deposed, or can't tell
  any more whether it is elected, stops at once; what isn't acknowledged by then ends as `OutcomeUnknown` and is never
  sent again under its identity (H4). A new election gives a new token.
- After any failure of a link the next one is asked for, and what two members don't hold is sent again: same
  identities, same order (H2). Readers get each record once.
- Seqs of the application's own belong to the source: whoever is elected goes on from the resume point
  (`wait_until_elected().resume_point`).

Parts: `core` decides (batching, identities, failover: pure); `buffer` stands between the application's threads and the
producer's; `handle` is what a record's sender keeps; `loop` runs the core's effects; `route` speaks to masters;
`client` is the public class; `sources` feed a queue from elsewhere.
"""

from __future__ import annotations

from seriatim.producer.acknowledged import Acknowledged
from seriatim.producer.client import Producer
from seriatim.producer.handle import Handle, Handles
from seriatim.producer.terms import Elected

__all__ = ["Acknowledged", "Elected", "Handle", "Handles", "Producer"]
