"""The peers: how each is set up, started, harmed and ended. `PEERS` is the table.

Every server runs under a supervisor of `seriatim.cli.embedded`, which ends it when the bench ends, however that happens.
"""

from __future__ import annotations

from bench.peers.base import Peer
from bench.peers.floor import Floor
from bench.peers.kafka import Kafka, KafkaFlush, KafkaThree
from bench.peers.nats import Nats, NatsAlways
from bench.peers.rocketmq import RocketMq
from bench.peers.seriatim import Seriatim

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Seriatim, Floor, Kafka, KafkaFlush, KafkaThree, Nats, NatsAlways, RocketMq)
}
