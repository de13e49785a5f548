"""`seriatim demo`: the main job on one machine, under faults, with a verdict.

Duty. A whole cluster, two PostgreSQL servers, a load on the one (east), its log captured into a queue and replayed into the
other (west); while that runs, four processes are killed; at the end everything is compared.

Who does what: `stage` owns all processes, `watch` and `databases` look at them without pause, `nemesis` kills, `run` leads
from step to step, `view` shows. What is decided is pure and beside them: `plan` (when to kill what), `outage` (how long
sending stood still, from what was observed), `offsets` (whether the queue's offsets hold), `verdict` (from all figures).

What it promises: exit code 0 only when every check held; nothing left running and nothing left on disk, also after Ctrl-C,
unless it was asked for (`--keep`, `--dir`) or something failed (then the logs stay, and it says where).
"""
