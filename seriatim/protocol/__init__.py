"""What crosses a process boundary, and the words for it.

Every other package of Seriatim imports this one and nothing beside it: the record and the batch (`record`, `batch`),
identities and positions (`names`, `marks`), the chain document that decides a queue's order (`chain`), errors
(`errors`), the gRPC messages (`seriatim.proto`), elections, nodes and sessions in ZooKeeper (`election`, `nodes`,
`zookeeper`), settings, logs, and the standard streams that they go to (`log`, `standard_streams`).

Glossary (one meaning each; the full text is in docs/protocol.md):

queue         one named stream in absolute order; its `QueueId` is never used again.
record        what a user sends: value, key, headers, timestamp, and an identity (source, seq).
batch         a run of records, encoded once by the producer, opaque to brokers.
group         two brokers, the members.
incarnation   a member's disk identity and the number of its process's start on that disk.
link          one term of service of one group for one queue: epoch, master, slave, base, end, state.
chain         the links of a queue in order of their epochs, with all that is decided about them.
send list     the groups that may take records for the queue; only its head does.
consume list  per subscription, the links it has not consumed; only its head is read.
epoch         the number of a link in its queue.
token         fencing token of an elected sender or reader.
index         position in a link, from 0.
offset        position in the queue: base of the link + index.
end           exclusive index at which a sealed link ends.
committed     held by both members as durably as the queue's durability asks.
marks         the highest seq of each source at a position.
certificate   what is recorded when a link is sealed.
drained       a subscription's cursor is at the end of a sealed link.
backlog       a group has backlog for a queue while a consume list of it names a link on that group.
"""
