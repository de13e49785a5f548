"""A broker: one member of a group, holding one of the two copies of every record sent through its group.

Duty: take records for the links it was opened for, keep them on disk as durably as the queue asks, together with its
peer, the other member; stop for good when a link is sealed, and say truthfully what it holds; serve what is
committed; keep cursors; and after a return hold again all that it should.

States of a link here: *unknown*, *open* (taking records, as master or slave), *sealing* (writes begun are being
finished), *sealed* (the seal is on disk), *ended* (the chain's end is on disk too), *dropped*. They only go forward.

Who calls it: coordinators (OpenLink, Seal, RecordEnd, TellReader, DropLinks), the elected sender (Append), the elected
reader (Fetch, CommitCursor), and the peer (Replicate, CopyLink, ListCursors, CommitCursor, Connect).

It promises: what it confirmed is on its disk (protocol.md 8); what it answered to a seal stays so; it never says
*not there* of something that it can't read.

`core` decides and does nothing; `store` is the disk; `link_runner` runs one link's decisions, `broker` holds the links, `opening` begins
them, `sealing` ends them; `replication` and `resyncer` talk to the peer, `membership` to ZooKeeper; `service` answers calls, and with
`append`, `replicate` and `fetch` streams; `process` owns all.
"""
