"""Capture of PostgreSQL's log: each committed change becomes a record, in commit order, once.

Duty. Several capture processes run, one is elected. It reads the log through a logical replication slot (plugin
pgoutput), and sends change envelopes (`seriatim.protocol.change`) with identities of the log's own, so that whoever is
elected next goes on with the same sequence and repeats nothing.

Way of one term: stand by → elected, with the resume point → look at slot and resume point together (`core.resume`) →
make the slot and send the snapshot taken at its point, unless that was done before → stream → deposed or stopped.

Promises.

- *Consistent start.* The slot is made first, the snapshot is read at the slot's consistent point, the stream starts
  there: no gap and no overlap.
- *Identity.* Source ``pg/<system identifier>.<timeline>/<slot>/<consistent point>``, seq from the commit position and the
  number inside the transaction (`core.identity`). The same log gives the same records with the same seqs, whoever reads it.
- *Nothing is confirmed early.* The slot is confirmed only up to what the queue acknowledged (`core.assembler`).
- *No silent gap.* A slot that is gone, lost, made again, or further than the queue ends the capture with `CaptureGap`, and so
  does a log of another timeline or one that was set back; whoever starts later finds the same.

Who uses what: `capture.PostgresCapture` is the loop; `sender.OrderedSender` is what it sends through,
`producing.CaptureSender` that over the producer library; `core` decides
and encodes, `replication` speaks the streaming protocol, `catalog` asks about tables, slots and publications,
`snapshot` reads tables, `attendant` looks after what has to wait in the database.
"""
