"""The reader's decisions, pure: facts and the present time in, orders out.

- `view`: the queue as a coordinator shows it, without protobuf; offsets and places.
- `following`: which of the views that are told is gone by.
- `rows`: which records of a batch are handed out; the rest are re-sends.
- `handed_out`: what of them the application was handed, and is done with.
- `reading`: from link to link, from member to member.
- `cursor`: what is granted, what is committed, and where.
- `tenure`: whether this reader is elected, by which token, and until when it may act.
- `invariants`: what must hold after each step of `reading`, `cursor` and `tenure`.
"""

from __future__ import annotations
