"""The demo from its first step to its figures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from seriatim.cli.demo import plan, verdict
from seriatim.cli.demo.databases import Databases
from seriatim.cli.demo.errors import DemoFailed
from seriatim.cli.demo.nemesis import Nemesis, Strike
from seriatim.cli.demo.offsets import OffsetCheck
from seriatim.cli.demo.outage import outages_s
from seriatim.cli.demo.plan import PlannedFault
from seriatim.cli.demo.stage import CAPTURES, PGBENCH, QUEUE, ROWS_PER_SCALE, Load, Stage
from seriatim.cli.demo.verdict import FaultFigures, Figures
from seriatim.cli.demo.view import Sight, View
from seriatim.cli.demo.watch import Watch
from seriatim.protocol import seriatim_pb2 as pb

_TICK_S = 0.1
_RATE_OVER_S = 3.0
_SNAPSHOT_TIMEOUT_S = 90.0
_LOAD_GRACE_S = 20.0
_SETTLE_TIMEOUT_S = 180.0
"""A replay that was killed last starts Spark anew, which took 50 s with its first micro-batch on two cores at a load of 20."""
_READ_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known when west has everything. Moments are of `time.monotonic`. end: of the queue, exclusive."""

    transactions: int
    strikes: tuple[Strike, ...]
    lag_s: float
    catch_up_s: float
    end: int


@dataclass(slots=True)
class Demo:
    """One run on a stage that nothing was started on yet; `run` once. Raises `DemoFailed` and what the steps raise."""

    stage: Stage
    view: View
    load: Load
    faults: tuple[PlannedFault, ...]
    began_s: float
    _watch: Watch = field(init=False)
    _databases: Databases = field(init=False)
    _phase: str = field(init=False, default="")
    _strikes: list[Strike] = field(init=False, default_factory=list)
    _rates: deque[tuple[float, int, int]] = field(init=False, default_factory=deque)
    _load_ended_s: float = field(init=False, default=float("inf"))

    def run(self) -> Figures:
        """Every step of it."""
        self._set_up()
        with ExitStack() as stack:
            self._watch = stack.enter_context(Watch(self.stage.cluster.coordinators, QUEUE))
            self._databases = stack.enter_context(Databases(self.stage.east.dsn(), self.stage.west.dsn()))
            self._take_snapshot()
            measured = self._under_load()
            return self._judged(measured)

    # ------------------------------------------------------------------------------------------------------- steps

    def _set_up(self) -> None:
        stage, say = self.stage, self.view.say
        say(
            f"starting ZooKeeper, two coordinators and {len(stage.cluster.groups)} groups of two brokers in {stage.directory}"
        )
        stage.start_cluster()
        say("starting two PostgreSQL servers, east and west")
        stage.start_databases()
        say(f"making pgbench's tables: {ROWS_PER_SCALE * self.load.scale:,} rows in east, none in west")
        stage.make_tables(self.load.scale)
        say(f"creating queue {QUEUE}")
        stage.create_queue()

    def _take_snapshot(self) -> None:
        stage = self.stage
        self._phase = "snapshot"
        self.view.say("starting two captures of east's log, one to be elected, and the replay into west on Spark")
        for name in CAPTURES:
            stage.start_capture(name)
        stage.start_replay()
        wanted = ROWS_PER_SCALE * self.load.scale
        self._wait(
            lambda: self._databases.snapshot_rows() >= wanted,
            _SNAPSHOT_TIMEOUT_S + 30.0 * self.load.scale,
            "the snapshot isn't in west",
        )
        self.view.say(f"the snapshot, {wanted:,} rows, is in west")

    def _under_load(self) -> Measured:
        stage, load = self.stage, self.load
        self._phase = "load"
        rate = f"at most {load.rate:,} transactions a second" if load.rate else "as fast as it can"
        self.view.say(f"running pgbench's TPC-B on east for {load.seconds} s: {load.clients} clients, {rate}")
        with Nemesis(stage, self._watch, self.faults) as nemesis:
            self._strikes = nemesis.strikes
            deadline_s = time.monotonic() + load.seconds + _LOAD_GRACE_S
            stage.start_load(load)
            while stage.supervisor.pid(PGBENCH) is not None:
                if time.monotonic() > deadline_s:
                    raise DemoFailed(f"pgbench didn't end {_LOAD_GRACE_S:g} s after its time")
                strike = nemesis.tick()
                if strike is not None:
                    self.view.say(f"killed {strike.target}, the {_described(strike)}")
                self._look(nemesis.down)
                time.sleep(_TICK_S)
            east_s, west_s = self._databases.newest_s()
            self._load_ended_s = ended_s = time.monotonic()
            log_end = self._databases.log_end()
            transactions = stage.load_result()
            self._phase = "catching up"
            lag_s = max(0.0, east_s - west_s)
            self.view.say(f"pgbench ended after {transactions:,} transactions; west is {lag_s:.2f} s behind east")
            nemesis.finish()
        self._wait(
            lambda: self._databases.is_captured(log_end), _SETTLE_TIMEOUT_S, "east's log isn't wholly in the queue"
        )
        end = self._end()
        self._wait(lambda: self._databases.applied >= end, _SETTLE_TIMEOUT_S, f"west isn't at offset {end:,}")
        caught_up_s = next((at_s for at_s, offset in self._databases.advances if offset >= end), time.monotonic())
        self.view.say("west has everything")
        return Measured(transactions, tuple(nemesis.strikes), lag_s, max(0.0, caught_up_s - ended_s), end)

    def _judged(self, measured: Measured) -> Figures:
        from seriatim.consumer.verification.comparison import compare

        self.view.say("reading the whole queue, and comparing all tables of east and west row by row")
        check = self._read_all(measured.end)
        comparison = compare(self.stage.east.dsn(), self.stage.west.dsn())
        differences = tuple(
            f"{table.table}: {table.missing} rows missing, {table.extra} too many, {table.different} different"
            + "".join(f", {sentence}" for sentence in table.schema)
            for table in comparison.tables
            if not table.is_identical
        )
        return Figures(
            records_sent=check.handed,
            records_applied=check.handed if self._databases.applied >= measured.end else 0,
            duplicates_dropped=check.dropped,
            transactions=measured.transactions,
            end=measured.end,
            tables=len(comparison.tables),
            rows=comparison.rows,
            table_differences=differences,
            offset_problems=check.problems(measured.end),
            planned=tuple(fault.kind for fault in self.faults),
            faults=self._fault_figures(measured.strikes),
            lag_s=measured.lag_s,
            catch_up_s=measured.catch_up_s,
            duration_s=time.monotonic() - self.began_s,
        )

    # ------------------------------------------------------------------------------------------------------- parts

    def _end(self) -> int:
        from seriatim.consumer import RangeReader

        with RangeReader(self.stage.cluster.coordinators, QUEUE, timeout_s=_READ_TIMEOUT_S) as reader:
            return reader.positions(needs_end=True).end

    def _read_all(self, end: int) -> OffsetCheck:
        from seriatim.consumer import RangeReader

        check = OffsetCheck(0)
        with RangeReader(self.stage.cluster.coordinators, QUEUE, timeout_s=_READ_TIMEOUT_S) as reader:
            for rows in reader.read_columns(0, end):
                check.batch(rows.offsets, rows.dropped, rows.columns.sources, rows.columns.seqs)
        return check

    def _fault_figures(self, strikes: tuple[Strike, ...]) -> tuple[FaultFigures, ...]:
        moments = [strike.at_s for strike in strikes]
        both = (
            verdict.milliseconds(outages_s([at_s for at_s, _ in advances], moments, self._load_ended_s))
            for advances in (self._watch.advances, self._databases.advances)
        )
        return tuple(
            FaultFigures(strike.kind, strike.target, sending, applying)
            for strike, sending, applying in zip(strikes, *both, strict=True)
        )

    def _wait(self, is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline_s:
                reasons = [self._watch.problem, self._databases.problem, *self._waits()]
                raise DemoFailed(
                    f"{what} after {timeout_s:g} s" + "".join(f"; {reason}" for reason in reasons if reason)
                )
            self._look(set())
            time.sleep(_TICK_S)

    def _look(self, down: set[str]) -> None:
        """Show how it looks; raise `DemoFailed` when a process ended that nobody killed."""
        for name in self.stage.ended():
            if name not in down:
                raise DemoFailed(f"{name} ended by itself. {self.stage.supervisor.log_end(name)}")
        self.view.show(self._sight())

    def _waits(self) -> tuple[str, ...]:
        return tuple(f"{wait.what}: {wait.reason}" for wait in self._watch.view.waits)

    def _sight(self) -> Sight:
        now_s, sent, applied = time.monotonic(), self._watch.end, self._databases.applied
        self._rates.append((now_s, sent, applied))
        while now_s - self._rates[0][0] > _RATE_OVER_S:
            self._rates.popleft()
        then_s, sent_then, applied_then = self._rates[0]
        passed_s = max(now_s - then_s, _TICK_S)
        view = self._watch.view
        reader = view.subscriptions[0] if view.subscriptions else pb.SubscriptionView()
        return Sight(
            since_s=now_s - self.began_s,
            phase=self._phase,
            links=tuple((link.epoch, link.group, link.state, link.committed_index) for link in view.links),
            send_list=tuple(view.send_list),
            consume_list=tuple(reader.consume_list),
            sender=view.sender,
            reader=reader.reader,
            sent=sent,
            applied=applied,
            sent_rate=(sent - sent_then) / passed_s,
            applied_rate=(applied - applied_then) / passed_s,
            lag_s=self._databases.lag_s,
            waits=self._waits(),
            faults=self._fault_lines(),
        )

    def _fault_lines(self) -> tuple[str, ...]:
        figures = self._fault_figures(tuple(self._strikes)) if self._strikes else ()
        return tuple(
            f"{figure.kind} {figure.target} killed; sending stood still "
            + ("until now" if figure.outage_ms is None else f"{figure.outage_ms:,} ms")
            for figure in figures
        )


def _described(strike: Strike) -> str:
    return {
        plan.FaultKind.MASTER: "master of the group in use",
        plan.FaultKind.CAPTURE: "elected capture",
        plan.FaultKind.REPLAY: "Spark job",
        plan.FaultKind.COORDINATOR: "elected coordinator",
    }[strike.kind]
