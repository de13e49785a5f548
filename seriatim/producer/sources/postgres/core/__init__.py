"""The decisions and the coding of a capture: pure, no I/O, no clock.

`identity` (positions and seqs), `pgoutput` (messages of the log), `rows` (tuples to JSON), `assembler` (messages to
records, and what may be confirmed), `resume` (what to do with the slot when elected), `naming` (a slot's name where none is given).
"""
