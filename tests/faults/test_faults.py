"""Real processes, harmed under a workload: what the campaign's checker can't see, because it is about that very moment."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from tests.clusters import sound_cluster
from tests.faults.history import Delivered
from tests.faults.trial import READERS, SESSION_S, Trial, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

PAST_ITS_SESSION_S = SESSION_S + 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevelopmentCluster]:
    settings = ClusterSettings(
        tmp_path_factory.mktemp("cluster"),
        groups=3,
        environment={"SERIATIM_SESSION_TIMEOUT_MS": str(int(SESSION_S * 1000))},
    )
    with sound_cluster(settings) as started:
        yield started


@pytest.fixture
def trial(cluster: DevelopmentCluster, request: pytest.FixtureRequest) -> Iterator[Trial]:
    name = "".join(char if char.isalnum() else "-" for char in request.node.name.removeprefix("test_")).strip("-")
    with Trial(cluster, name[:60]) as started:
        yield started


def test_both_members_of_the_head_are_killed(trial: Trial) -> None:
    head = trial.head
    epoch = head.epoch
    trial.kill_at_once([f"{one.group}-{one.member}" for one in (head.master, head.slave)])
    killed_s = time.monotonic()
    trial.wait_for_switch(epoch)
    trial.wait_for_sending("while nobody can tell where the link ends")
    (dead,) = [link for link in trial.view().links if link.epoch == epoch]
    assert dead.state == "lost"
    # What was fetched ahead may still be handed out; what lies behind the lost link may not.
    behind = {seq for seq, sent_s in trial.first_sent_s().items() if sent_s > killed_s}
    assert behind
    late = [one for one in trial.events(*READERS) if isinstance(one, Delivered) and one.seq in behind]
    assert not late, "order demands that readers stop at a link whose end nobody can tell"
    trial.heal()
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


def test_zookeeper_is_killed(trial: Trial) -> None:
    trial.wait_for_sending("before", 200)
    trial.kill("zookeeper")
    killed_s = time.monotonic()
    time.sleep(PAST_ITS_SESSION_S)
    # Nobody can renew a lease: whatever was acknowledged, was so while leases still ran.
    assert not trial.acknowledged_since(killed_s + SESSION_S)
    trial.heal()
    trial.judge()
