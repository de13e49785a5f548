"""The fault campaign: real processes, harmed in every way, under a workload whose history is judged.

    python -m tests.faults.campaign --faults 500 --seed 1 --report DIR

Needs root, or the rights to make network namespaces; it says so and ends with 3 where they can't be made. Ctrl-C ends it
after the fault that is going on, with the round judged and the report written; a second one ends it at once. Whatever
happens, hosts, mounts and processes end with it (`network`). Ends with 1 when anything was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from seriatim.cli.embedded.errors import EmbeddedError
from seriatim.protocol.errors import SeriatimError
from tests.faults import checker, network, picture, report
from tests.faults.catalogue import KINDS, Kind, plan
from tests.faults.cluster import FaultCluster, hosts
from tests.faults.history import Delivered
from tests.faults.logs import logged_between, logged_defects
from tests.faults.nemesis import Fault, Nemesis
from tests.faults.outages import longest_gap_s, longest_of_s, longest_within_s
from tests.faults.probe import DiskProbe
from tests.faults.report import Findings, Judged
from tests.faults.round import Round, Stuck

SCRATCH = "seriatim-faults-"
QUIET_S = (0.4, 0.8)
_MOST_CLUSTERS = 10
SESSION_MS = 1500.0
TARGETS_MS = {
    "master killed": (40, 150),
    "slave killed": (40, 150),
    "master paused": (350, 350),
    "planned rotation": (10, 40),
    "elected sender killed": (SESSION_MS + 100, SESSION_MS + 100),
    "sender stopped on purpose": (60, 60),
}
"""Median and 99th percentile of the outage of sending that have to be reached."""
_SLOW_MS = 500
"""Of what stands still for longer than this, and than has to be reached, the logs are kept, to be looked into."""


class Campaign:
    """One run. `findings` is what was found so far."""

    def __init__(self, arguments: argparse.Namespace, kinds: Sequence[Kind], scratch: Path) -> None:
        self._arguments = arguments
        self._probe = DiskProbe(scratch / "probe")
        self._chance = random.Random(arguments.seed)
        self._scratch = scratch
        self._network = hosts()
        self._began_s = time.monotonic()
        if lacks := self._network.why_not_impaired():
            kinds = [kind for kind in kinds if kind.family != "impaired network"]
            if not kinds:
                raise network.NoNamespaces(lacks)
            self._say(f"without lossy and narrow paths: {lacks}")
        self._plan = plan(arguments.faults, self._chance, kinds, with_pairs=not arguments.only)
        self._is_stopping = False
        self._clusters = 0
        self._struck = 0
        command = f"python -m tests.faults.campaign {shlex.join(sys.argv[1:])}"
        self.findings = Findings(command, arguments.seed, arguments.rate)

    def stop(self, *_: object) -> None:
        """Asked by Ctrl-C: after this fault. Asked again: now."""
        if self._is_stopping:
            raise KeyboardInterrupt
        self._is_stopping = True
        self._say("ends after this fault; Ctrl-C again: at once")

    def run(self) -> None:
        """All rounds, on one cluster as long as it gets along."""
        with self._probe:
            self._run()

    def _run(self) -> None:
        left = list(self._plan)
        while left and not self._is_over():
            self._clusters += 1
            cluster = FaultCluster(self._scratch / f"cluster-{self._clusters}", self._network)
            nemesis = Nemesis(cluster, self._chance)
            try:
                cluster.start()
                self._say(f"cluster {self._clusters} serves")
                while left and not self._is_over() and self._round(cluster, nemesis, left):
                    report.write(self.findings, self._arguments.report, TARGETS_MS)
            except EmbeddedError as error:
                self.findings.stuck.append(f"cluster {self._clusters}: {error}")
                self._say(self.findings.stuck[-1])
                if self._clusters >= _MOST_CLUSTERS:
                    return
            finally:
                cluster.close()
                self.findings.deaths += nemesis.deaths
                self._look_into_logs(cluster)
                self.findings.seconds = time.monotonic() - self._began_s

    def _is_over(self) -> bool:
        seconds = self._arguments.seconds
        is_late = seconds is not None and time.monotonic() - self._began_s > seconds
        return self._is_stopping or (is_late and self._struck >= self._arguments.at_least)

    def _round(self, cluster: FaultCluster, nemesis: Nemesis, left: list[Kind]) -> bool:
        """One queue and its faults; False where the cluster can't be used any more."""
        self.findings.rounds += 1
        name = f"round-{self.findings.rounds}"
        directory = self._scratch / "histories" / name
        scene = Round(cluster, name, directory, self._arguments.rate)
        faults: list[Fault] = []
        verdict: checker.Verdict | None = None
        forgeries: list[str] = []
        try:
            scene.start()
            nemesis.wait_until_whole(scene, Fault(0, "nothing yet", ""))
            for _ in range(self._arguments.per_round):
                if not left or self._is_over():
                    break
                time.sleep(self._chance.uniform(*QUIET_S))
                self._fault(nemesis, left.pop(0), scene, faults)
            nemesis.bring_back_what_left(scene)
            verdict, forgeries = scene.judge()
            nemesis.end_round(scene)
        except (
            Exception
        ) as error:  # the outermost loop: whatever it is, it is told, and the next round has a new cluster
            if not isinstance(error, Stuck | SeriatimError | EmbeddedError):
                traceback.print_exc()
            what = f"round {self.findings.rounds}, after {faults[-1].kind if faults else 'nothing'}: {error!r}"
            self.findings.stuck.append(what)
            self._say(what)
            scene.follow()
            events = sorted([*scene.events, *scene.positioned()], key=lambda event: event.at_s)
            self._note(scene, faults, verdict or checker.check(events, read_to_end=False), forgeries)
            self._keep_evidence(name, logs=cluster.supervisor.logs, histories=directory)
            scene.close()
            return False
        self._note(scene, faults, verdict, forgeries)
        if not verdict.is_clean or forgeries:
            self._keep_evidence(name, logs=cluster.supervisor.logs, histories=directory)
        scene.close()
        shutil.rmtree(directory)
        return True

    def _fault(self, nemesis: Nemesis, kind: Kind, scene: Round, faults: list[Fault]) -> None:
        number = len(self.findings.faults) + len(faults) + 1
        began_s = time.monotonic()
        fault = Fault(number, kind.name, kind.family)
        faults.append(fault)
        faults[-1] = nemesis.strike(number, kind, scene)
        self._struck += 1
        fault = faults[-1]
        scene.follow()
        sending_s = longest_gap_s(sorted(scene.acknowledged_at_s[-200_000:]), fault.harmed_s, fault.healed_s)
        self._say(
            f"{number}/{len(self._plan)} {fault.kind} [{' '.join(fault.targets)}] sending {sending_s * 1000:.0f} ms, "
            f"took {time.monotonic() - began_s:.1f} s {fault.note}"
        )

    # ------------------------------------------------------------------------------------------------------ judging

    def _note(self, scene: Round, faults: list[Fault], verdict: checker.Verdict, forgeries: list[str]) -> None:
        findings, number = self.findings, self.findings.rounds
        acknowledged = sorted(scene.acknowledged_at_s)
        delivered = {name: sorted(times) for name, times in scene.delivered_at_s.items()}
        quiet_since_s = None
        for fault in faults:
            if not fault.whole_s:
                continue
            if quiet_since_s is not None:
                findings.quiet_gaps_s.append(longest_within_s(acknowledged, quiet_since_s, fault.harmed_s))
            quiet_since_s = fault.whole_s
            sending_s = longest_gap_s(acknowledged, fault.harmed_s, fault.healed_s)
            harmful_until_s = max(fault.healed_s, fault.harmed_s + sending_s)
            judged = Judged(
                fault.number, number, fault.kind, fault.family, fault.targets,
                at_s=fault.harmed_s - self._began_s,
                healed_at_s=fault.healed_s - self._began_s,
                whole_at_s=fault.whole_s - self._began_s,
                sending_s=sending_s,
                reading_s=max(longest_gap_s(one, fault.harmed_s, fault.healed_s) for one in delivered.values()),
                healing_s=longest_gap_s(acknowledged, fault.healed_s, fault.whole_s),
                note=fault.note.strip("; "),
                disk_s=longest_of_s(self._probe.standstills, fault.harmed_s, harmful_until_s),
            )  # fmt: skip
            findings.faults.append(judged)
            self._keep_slow(judged, scene.cluster.supervisor.logs)
        findings.violations += [f"round {number}: {one.kind}: {one.what}" for one in verdict.anomalies]
        findings.violations += [f"round {number}: {one}" for one in forgeries]
        findings.records.update({key: verdict.counts[key] for key in ("sent", "acknowledged")})
        findings.records["handed out"] += sum(isinstance(event, Delivered) for event in scene.events)
        for times, counts in ((acknowledged, findings.acknowledged), (delivered["other"], findings.delivered)):
            counts.update(int((at_s - self._began_s) / picture.BUCKET_S) for at_s in times)
        findings.seconds = time.monotonic() - self._began_s
        clean = "clean" if verdict.is_clean and not forgeries else f"VIOLATED {dict(verdict.kinds())} {forgeries[:3]}"
        self._say(f"round {number}: {verdict.counts} {clean}")

    def _keep_slow(self, fault: Judged, logs: Path) -> None:
        """What all processes logged around a fault that stopped sending for long."""
        _, reached_ms = TARGETS_MS.get(fault.kind, (0, 0))
        if fault.sending_s * 1000 < max(_SLOW_MS, reached_ms):
            return
        harmed_s = time.time() - time.monotonic() + self._began_s + fault.at_s
        lasted_s = fault.sending_s if math.isfinite(fault.sending_s) else fault.healed_at_s - fault.at_s
        lines = logged_between(logs.iterdir(), harmed_s - 0.5, harmed_s + lasted_s + 0.5)
        folder = self._arguments.report / "evidence" / "slow"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{fault.number}.log").write_text("\n".join([str(fault), *lines, ""]))

    def _look_into_logs(self, cluster: FaultCluster) -> None:
        found = logged_defects(cluster.supervisor.logs.iterdir())
        self.findings.defects += found
        if found:
            self._say(f"{len(found)} tracebacks, such as {found[0]}")
            self._keep_evidence(cluster.supervisor.directory.name, logs=cluster.supervisor.logs)

    def _keep_evidence(self, name: str, **folders: Path) -> None:
        """Beside the report, each folder under its keyword."""
        kept = self._arguments.report / "evidence" / name
        shutil.rmtree(kept, ignore_errors=True)
        for what, folder in folders.items():
            shutil.copytree(folder, kept / what)
        self._say(f"evidence: {kept}")

    def _say(self, text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - self._began_s:7.1f} {text}\n")
        sys.stdout.flush()


def main() -> int:
    """Run it; the exit status."""
    arguments = _arguments()
    return network.run_inside("tests.faults.campaign", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    only = arguments.only
    kinds = [kind for kind in KINDS if not only or any(word in (kind.name, kind.family) for word in only)]
    if not kinds:
        sys.stderr.write(f"no kind and no family of faults is named {' or '.join(only)}\n")
        return 2
    scratch, lock = _scratch()
    try:
        campaign = Campaign(arguments, kinds, scratch)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, campaign.stop)
        with contextlib.suppress(KeyboardInterrupt):
            campaign.run()
        report.write(campaign.findings, arguments.report, TARGETS_MS)
        picture.draw(campaign.findings, arguments.report / "faults.png")
    finally:
        lock.close()
        shutil.rmtree(scratch, ignore_errors=True)
    findings = campaign.findings
    sys.stdout.write(
        f"{len(findings.faults)} faults, {findings.records['acknowledged']} records, {len(findings.violations)} "
        f"violations, {len(findings.stuck)} stuck, {len(findings.deaths)} deaths, {len(findings.defects)} tracebacks: "
        f"{arguments.report / 'faults.md'}\n"
    )
    return 0 if findings.is_clean else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.faults.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=80, help="how many")
    parser.add_argument("--seconds", type=float, help="begin no fault after so long")
    parser.add_argument("--at-least", type=int, default=0, help="as many faults in any case, however long they take")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--report", type=Path, default=Path("fault-report"), help="folder; faults.md, .png and .json")
    parser.add_argument("--rate", type=float, default=1000, help="records a second")
    parser.add_argument("--per-round", type=int, default=40, help="faults before a round is judged")
    parser.add_argument("--only", action="append", help="this kind or family; may be repeated")
    arguments = parser.parse_args()
    arguments.report = arguments.report.resolve()
    if "--seed" not in sys.argv:
        sys.argv += ["--seed", str(arguments.seed)]
    return arguments


def _scratch() -> tuple[Path, TextIO]:
    """A folder for this run, locked while it goes on; those of runs that were cut off are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError), (old / "running").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old)
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-"))
    lock = (scratch / "running").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return scratch, lock


if __name__ == "__main__":
    sys.exit(main())
