"""The coordinator's decisions, free of any I/O.

`chain`, `subscriptions` and `retention` hold every change of a chain document, as functions from a document to the next.
`seal` decides where a link ends. `acquire_send`, `acquire_read` and `close_link` are the procedures: state machines that
take facts and give orders (both in `events`); each write is a compare-and-set of the chain, so a procedure may be cut off
between any two effects and whoever comes next goes on from what is recorded. `background` says what the elected
coordinator has to do unasked, `readmission` which groups may come back, `status` what waits for what, `invariants` what
must hold after every change (protocol.md 2).
"""
