"""The command `seriatim replay`, with the process group killed after a given step.

    replay_process.py STEP COUNT ARGUMENT…

What Spark keeps waiting is told after 2 s, and of an unfinished transaction 2,500 rows at most are kept in memory.
STEP is a step of the target's (`PostgresTarget.on_step`), "cursor wanted", or "never"; COUNT says at the how-manieth time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter

from seriatim.cli.main import run
from seriatim.consumer.spark import application, query, replay, work
from seriatim.consumer.spark.cursor import CursorKeeper
from seriatim.consumer.spark.targets.postgres import PostgresTarget

STEP, COUNT = sys.argv[1], int(sys.argv[2])
_seen: Counter[str] = Counter()


def step(name: str) -> None:
    _seen[name] += 1
    if name == STEP and _seen[name] == COUNT:
        os.killpg(0, signal.SIGKILL)


make_target = PostgresTarget.__init__
want = CursorKeeper.want


def make_watched_target(self, dsn, job):
    make_target(self, dsn, job, on_step=step)


def want_watched(self, offset):
    want(self, offset)
    step("cursor wanted")


replay.SLOW_S = query.SLOW_S = work.SLOW_S = 2.0
application.HELD_ROWS = 2_500
PostgresTarget.__init__ = make_watched_target
CursorKeeper.want = want_watched

if __name__ == "__main__":
    sys.exit(run(["replay", *sys.argv[3:]]))
