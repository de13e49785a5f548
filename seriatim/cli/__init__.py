"""The `seriatim` command: one module a command family; parse, call, print.

`main` holds the group and a table of where each command lives. `embedded` runs real servers as child processes, for
development, for the demo and for tests.

Exit codes of every command: 0 done, 1 the answer is no, 2 wrong use, 3 unreachable or refused.
"""
