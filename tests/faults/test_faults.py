"""Real processes, harmed in every way the protocol has an answer for, under a workload whose history is judged."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator

import pytest

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from tests.faults.history import Delivered
from tests.faults.trial import READERS, Trial, wait_until, wait_until_whole

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]

SESSION_S = 1.5
PAST_ITS_SESSION_S = 3.0
MIX_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    settings = ClusterSettings(
        tmp_path_factory.mktemp("cluster"),
        groups=3,
        environment={"SERIATIM_SESSION_TIMEOUT_MS": str(int(SESSION_S * 1000))},
    )
    with DevelopmentCluster(settings) as started:
        yield started


@pytest.fixture
def trial(cluster: DevelopmentCluster, request: pytest.FixtureRequest) -> Iterator[Trial]:
    name = "".join(char if char.isalnum() else "-" for char in request.node.name.removeprefix("test_")).strip("-")
    with Trial(cluster, name[:60]) as started:
        yield started


def say(text: str) -> None:
    """For whoever looks into a failure."""
    sys.stdout.write(f"{text}\n")


@pytest.mark.parametrize("side", ["master", "slave"])
def test_a_member_of_the_head_is_killed(trial: Trial, side: str) -> None:
    epoch = trial.head.epoch
    trial.kill(trial.place(side))
    trial.wait_for_switch(epoch)
    trial.wait_for_progress("on the next group")
    trial.judge()


def test_both_members_of_the_head_are_killed(trial: Trial) -> None:
    epoch = trial.head.epoch
    names = trial.place("master"), trial.place("slave")
    for name in names:
        trial.kill(name)
    killed_s = time.monotonic()
    trial.wait_for_switch(epoch)
    trial.wait_for_sending("while nobody can tell where the link ends")
    (dead,) = [link for link in trial.view().links if link.epoch == epoch]
    assert dead.state == "lost"
    # What was fetched ahead may still be handed out; what lies behind the lost link may not.
    late = [one for one in trial.events(*READERS) if isinstance(one, Delivered) and one.at_s > killed_s + 1]
    assert not late, "order demands that readers stop at a link whose end nobody can tell"
    trial.heal()
    trial.judge()


def test_the_master_is_paused_past_its_session(trial: Trial) -> None:
    epoch, master = trial.head.epoch, trial.place("master")
    trial.pause(master)
    trial.wait_for_switch(epoch)
    time.sleep(PAST_ITS_SESSION_S)
    trial.resume(master)
    trial.wait_for_progress("beside the master that woke up")
    trial.judge()


def test_the_elected_coordinator_is_killed(trial: Trial) -> None:
    epoch, coordinator = trial.head.epoch, trial.elected_coordinator()
    trial.kill(coordinator)
    trial.rotate()
    trial.wait_for_switch(epoch)
    wait_until(lambda: trial.elected_coordinator() not in ("", coordinator), "the other coordinator is elected")
    trial.wait_for_progress("with the other coordinator")
    trial.judge()


def test_the_elected_sender_is_killed(trial: Trial) -> None:
    sender = trial.elected_sender()
    trial.kill(sender)
    wait_until(lambda: trial.elected_sender() not in ("", sender), "the other sender is elected")
    trial.wait_for_progress("from the other sender")
    trial.judge()


def test_the_elected_sender_is_paused_past_its_session(trial: Trial) -> None:
    sender = trial.elected_sender()
    trial.pause(sender)
    paused_s = time.monotonic()
    wait_until(lambda: trial.elected_sender() not in ("", sender), "the other sender is elected")
    trial.wait_for_sending("from the other sender")
    resumed_s = time.monotonic()
    trial.resume(sender)
    trial.wait_for_progress("beside the sender that woke up")
    assert trial.elected_sender() != sender
    assert not trial.zombie_acknowledgements(sender, paused_s=paused_s, resumed_s=resumed_s)
    trial.judge()


@pytest.mark.parametrize("harm", ["killed", "paused"])
def test_the_elected_reader_is_harmed(trial: Trial, harm: str) -> None:
    reader = trial.elected_reader()
    if harm == "killed":
        trial.kill(reader)
    else:
        trial.pause(reader)
    wait_until(lambda: trial.elected_reader() not in ("", reader), "the other reader is elected")
    trial.wait_for_progress("at the other reader")
    trial.heal()
    trial.wait_for_progress("beside the reader that came back")
    trial.judge()


def test_zookeeper_is_killed(trial: Trial) -> None:
    trial.wait_for_sending("before", 200)
    trial.kill("zookeeper")
    killed_s = time.monotonic()
    time.sleep(PAST_ITS_SESSION_S)
    # Nobody can renew a lease: whatever was acknowledged, was so while leases still ran.
    assert not trial.acknowledged_since(killed_s + SESSION_S)
    trial.heal()
    trial.judge()


def test_a_member_comes_back_with_a_blank_disk(trial: Trial) -> None:
    link, member = trial.head, trial.place("slave")
    trial.kill(member)
    trial.wipe(member)
    trial.wait_for_switch(link.epoch)
    trial.heal()
    wait_until_whole(trial.cluster)
    (now,) = [one for one in trial.view().links if one.epoch == link.epoch]
    assert now.slave_now.disk_id != link.slave.incarnation.disk_id
    assert now.end > 0
    trial.judge()


def test_every_group_serves_and_is_readmitted(trial: Trial) -> None:
    while True:
        served = [link.group for link in trial.view().links if not link.has_end or link.end]
        if len(served) > len(trial.cluster.groups) and set(served) == set(trial.cluster.groups):
            break
        epoch = trial.head.epoch
        trial.kill(trial.place("master"))
        trial.wait_for_switch(epoch)
        trial.heal()
        wait_until_whole(trial.cluster)
        trial.wait_for_progress(f"behind link {epoch}")
    trial.judge()


def test_the_whole_cluster_is_killed_at_once(trial: Trial) -> None:
    epoch = trial.head.epoch
    for name in ("zookeeper", *trial.cluster.coordinator_names, *trial.cluster.member_names):
        trial.kill(name)
    trial.heal()
    trial.wait_for_switch(epoch)
    trial.judge()


def test_planned_switches_under_load(trial: Trial) -> None:
    for _ in range(3):
        epoch = trial.head.epoch
        trial.rotate()
        trial.wait_for_switch(epoch)
        trial.wait_for_progress(f"behind link {epoch}")
    assert trial.head.epoch >= 4
    trial.judge()


def test_a_mix_of_faults(trial: Trial) -> None:
    seed = int(os.environ.get("SERIATIM_FAULTS_SEED") or random.SystemRandom().randrange(10**6))
    say(f"seed {seed}: repeat with SERIATIM_FAULTS_SEED={seed}")
    chance = random.Random(seed)
    until_s = time.monotonic() + MIX_S
    done = []
    while time.monotonic() < until_s:
        fault = chance.choice(("master", "slave", "coordinator", "sender", "reader", "zookeeper", "rotate"))
        how = chance.choice(("kill", "pause")) if fault not in ("zookeeper", "rotate") else "kill"
        name = {
            "master": lambda: trial.place("master"),
            "slave": lambda: trial.place("slave"),
            "coordinator": trial.elected_coordinator,
            "sender": trial.elected_sender,
            "reader": trial.elected_reader,
        }.get(fault, lambda fault=fault: fault)()
        done.append(f"{how} {name}")
        say(f"{until_s - time.monotonic():.1f} s left: {done[-1]}")
        if fault == "rotate":
            trial.rotate()
        elif name and how == "kill":
            trial.kill(name)
        elif name:
            trial.pause(name)
        time.sleep(chance.uniform(0, 3))
        trial.heal()
        wait_until_whole(trial.cluster)
        trial.wait_for_progress(f"after {done}")
    assert len(done) >= 3
    verdict = trial.judge()
    say(f"{verdict.counts} over {[link.group for link in trial.view().links]}")
