"""The operators' commands against a real cluster: one for the whole file, since none of them harms it.

Those that only ask coordinators run in this process: a process of its own takes ten times as long to start as to ask.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from seriatim.cli import main
from seriatim.cli.embedded.cluster import ClusterSettings
from seriatim.producer import Producer
from tests.clusters import sound_cluster

pytestmark = pytest.mark.timeout(300)

SERIATIM = (sys.executable, "-m", "seriatim.cli.main")
PATIENT = {"SERIATIM_SESSION_TIMEOUT_MS": "20000"}
"""Neither a member nor a command leaves where the machine stands still."""
ASKING = {"queue", "group", "status"}
RECORDS = "".join(f"{number}\n" for number in range(500))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    settings = ClusterSettings(
        tmp_path_factory.mktemp("cluster"), groups=2, environment=PATIENT, is_restarted=True, start_timeout_s=90
    )
    with sound_cluster(settings) as started:
        yield started


@pytest.fixture
def seriatim(cluster, capfd):
    """Runs a command against the cluster; answers how it ended, with `objects` for --json."""

    def run(*arguments, code=0, given=None):
        arguments = (*arguments, "--coordinator", cluster.coordinators)
        if arguments[0] in ASKING:
            capfd.readouterr()
            returncode = main.run(arguments)
            done = subprocess.CompletedProcess(arguments, returncode, *capfd.readouterr())
        else:
            done = subprocess.run(
                (*SERIATIM, *arguments),
                capture_output=True, text=True, timeout=250, check=False, input=given or "", env=os.environ | PATIENT,
            )  # fmt: skip
        assert done.returncode == code, done.stderr
        done.objects = [json.loads(line) for line in done.stdout.splitlines()] if "--json" in arguments else []
        return done

    return run


@pytest.fixture
def queue(seriatim):
    """A queue of this test's own."""
    name = f"q-{uuid.uuid4().hex[:8]}"
    seriatim("queue", "create", name)
    yield name
    seriatim("queue", "delete", name, "--yes")


def fill(cluster, queue):
    """Send RECORDS, and rather wait than give a link up where the machine stands still: it decides on how many links."""
    with Producer(cluster.coordinators, queue, acknowledgement_deadline_s=5, session_timeout_s=20) as producer:
        producer.send_many(RECORDS.encode().split())
        producer.flush(60)


def status(seriatim, queue, holds):
    """A status of which this holds: what members tell comes a moment later, or is left out where they don't answer at once."""
    deadline_s = time.monotonic() + 60
    while not holds(view := seriatim("status", queue, "--json").objects[0]):
        assert time.monotonic() < deadline_s, view
        time.sleep(0.05)
    return view


def is_told_by_both(view):
    return all(link["copies"] == 2 for link in view["links"]) and all(
        one["lag_records"] is not None for one in view["subscriptions"]
    )


def test_queues_are_made_listed_described_and_deleted(seriatim):
    made = seriatim(
        "queue", "create", "orders", "--durability", "interval", "--flush-ms", "20", "--groups", "g2,g1",
        "--retention", "2h", "--readmit", "in-sync", "--max-record-bytes", "5000", "--rotate-every", "30m", "--json",
    ).objects[0]  # fmt: skip
    assert made["settings"] == {
        "durability": "interval", "flush_ms": 20, "groups": ["g2", "g1"], "retention_ms": 7_200_000,
        "readmit": "in-sync", "max_record_bytes": 5000, "rotate_ms": 1_800_000,
    }  # fmt: skip
    assert made["send_list"] == ["g2", "g1"]
    assert "already" in seriatim("queue", "create", "orders", code=2).stderr
    assert "orders" in [one["queue"] for one in seriatim("queue", "list", "--json").objects]
    described = seriatim("queue", "describe", "orders", "--json").objects[0]
    assert (described["queue_id"], described["links"]) == (made["queue_id"], [])
    assert "chain          empty" in seriatim("queue", "describe", "orders").stdout
    assert "give --yes" in seriatim("queue", "delete", "orders", code=2).stderr
    seriatim("queue", "delete", "orders", "--yes")
    assert "there is no queue orders" in seriatim("queue", "describe", "orders", code=2).stderr
    assert "orders" not in [one["queue"] for one in seriatim("queue", "list", "--json").objects]


def test_altered_settings_hold_for_the_next_link_and_records_go_on(seriatim, queue, cluster):
    fill(cluster, queue)
    altered = seriatim("queue", "alter", queue, "--durability", "async", "--flush-ms", "20", "--retention", "2h")
    assert f"`seriatim queue rotate {queue}`" in altered.stderr
    view = seriatim("queue", "describe", queue, "--json").objects[0]
    changed = view["settings"]
    assert (changed["durability"], changed["flush_ms"], changed["retention_ms"]) == ("async", 20, 7_200_000)
    assert (changed["readmit"], changed["groups"]) == ("drained", []), "what wasn't given stays"
    assert [one["durability"] for one in view["links"]] == ["sync"]
    rotate(seriatim, queue)
    fill(cluster, queue)
    view = seriatim("queue", "describe", queue, "--json").objects[0]
    assert [one["durability"] for one in view["links"]] == ["sync", "async"]
    assert "there is no queue nosuch" in seriatim("queue", "alter", "nosuch", "--retention", "1h", code=2).stderr


def test_a_raised_limit_holds_for_who_is_elected_next_on_the_open_link_too(seriatim, queue):
    narrow = f"narrow-{queue}"
    seriatim("queue", "create", narrow, "--groups", "g2,g1", "--max-record-bytes", "1000")
    small, large = "a" * 1000 + "\n", "a" * 5000 + "\n"
    seriatim("produce", "--queue", narrow, given=small)
    refused = seriatim("produce", "--queue", narrow, given=large, code=2)
    assert "`seriatim queue alter NAME --max-record-bytes N`" in refused.stderr
    assert "only be raised" in seriatim("queue", "alter", narrow, "--max-record-bytes", "999", code=2).stderr
    seriatim("queue", "alter", narrow, "--max-record-bytes", "5000", "--all-groups")
    seriatim("produce", "--queue", narrow, given=large)
    view = seriatim("queue", "describe", narrow, "--json").objects[0]
    assert (view["settings"]["max_record_bytes"], view["settings"]["groups"]) == (5000, [])
    assert view["send_list"] == ["g2", "g1"]
    assert [link["epoch"] for link in view["links"]] == [1]
    consumed = seriatim("consume", "--queue", narrow, "--subscription", "s", "--from", "earliest", "--max", "2")
    assert consumed.stdout == small + large
    seriatim("queue", "delete", narrow, "--yes")


def test_a_queue_moves_on_by_itself_when_its_link_is_old_and_rests_when_told_to(seriatim, cluster, queue):
    seriatim("queue", "alter", queue, "--rotate-every", "1s")
    with Producer(cluster.coordinators, queue, session_timeout_s=20) as producer:
        deadline_s = time.monotonic() + 60
        sent = 0
        while len({link["group"] for link in seriatim("queue", "describe", queue, "--json").objects[0]["links"]}) < 2:
            assert time.monotonic() < deadline_s
            producer.send(str(sent).encode())
            sent += 1
            time.sleep(0.05)
        seriatim("queue", "alter", queue, "--rotate-every", "never")
        producer.send(str(sent).encode())
        producer.flush(60)
    consumed = seriatim(
        "consume", "--queue", queue, "--subscription", "s", "--from", "earliest", "--max", str(sent + 1)
    )
    assert consumed.stdout.split() == [str(number) for number in range(sent + 1)]
    view = seriatim("queue", "describe", queue, "--json").objects[0]  # what was under way is over by now
    time.sleep(2.5)
    after = seriatim("queue", "describe", queue, "--json").objects[0]
    assert [link["epoch"] for link in after["links"]] == [link["epoch"] for link in view["links"]]


def test_groups_that_aren_t_there_are_refused(seriatim, queue):
    assert "g9" in seriatim("queue", "create", "x", "--groups", "g1,g9", code=2).stderr
    assert "g9" in seriatim("queue", "alter", queue, "--groups", "g1,g9", code=2).stderr
    assert "there is no group g9" in seriatim("group", "describe", "g9", code=2).stderr
    assert "there is no group g9" in seriatim("group", "drain", "g9", code=2).stderr
    assert [one["group"] for one in seriatim("group", "list", "--json").objects] == ["g1", "g2"]


def test_status_tells_chain_lists_cursor_and_lag(seriatim, queue, cluster):
    fill(cluster, queue)
    seriatim("consume", "--queue", queue, "--subscription", "s", "--max", "200")
    view = status(seriatim, queue, lambda view: is_told_by_both(view) and view["switches_left"] and not view["sender"])
    [link] = view["links"]
    assert (link["state"], link["committed"], link["copies"], link["base"]) == ("open", 500, 2, 0)
    [subscription] = view["subscriptions"]
    assert (subscription["consume_list"], subscription["cursor_offset"], subscription["lag_records"]) == ([1], 200, 300)
    assert view["switches_left"] == 1
    # Who had the token is gone: nobody is elected.
    assert (view["sender"], view["sender_token"]) == (None, 1)
    assert (subscription["reader"], subscription["reader_token"]) == (None, 1)
    text = seriatim("status", queue).stdout
    assert "consume list" in text
    told, *others = seriatim("status", "--json").objects
    assert told["kind"] == "cluster"
    assert told["elected_coordinator"] in told["coordinators"]
    assert {one["kind"] for one in others} == {"group", "queue"}


def test_status_tells_who_is_elected(seriatim, queue, cluster):
    command = (*SERIATIM, "produce", "--queue", queue, "--name", "somebody", "--session-timeout-ms", "20000")
    command += ("--coordinator", cluster.coordinators)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as producing:
        sender = status(seriatim, queue, lambda view: view["sender"])["sender"]
        producing.communicate(b"", timeout=100)
    assert sender.startswith("somebody-")
    assert status(seriatim, queue, lambda view: not view["sender"])["sender"] is None


def test_a_subscription_that_has_read_all_is_at_the_end(seriatim, queue, cluster):
    fill(cluster, queue)
    seriatim("consume", "--queue", queue, "--max", "500")
    rotate(seriatim, queue)
    [told] = status(seriatim, queue, lambda view: not view["subscriptions"][0]["consume_list"])["subscriptions"]
    cursor = (told["cursor_epoch"], told["cursor_index"], told["cursor_offset"], told["lag_records"])
    assert cursor == (1, 500, 500, 0)


def rotate(seriatim, queue):
    """A planned switch, once another group can take over: it may be on its way back into service."""
    status(seriatim, queue, lambda view: view["switches_left"])
    seriatim("queue", "rotate", queue)


def test_a_drained_group_loses_nothing_and_comes_back(seriatim, queue, cluster):
    fill(cluster, queue)
    seriatim("consume", "--queue", queue, "--max", "100")
    group = seriatim("status", queue, "--json").objects[0]["links"][0]["group"]
    drained = seriatim("group", "drain", group, "--timeout", "60", "--json").objects[0]
    try:
        assert drained["is_draining"]
        assert drained["sending_queues"] == []
        assert drained["backlog_queues"] == [queue]
        assert (
            "unread records" in seriatim("group", "drain", group, "--until", "drained", "--timeout", "1", code=1).stderr
        )
        fill(cluster, queue)
        view = seriatim("status", queue, "--json").objects[0]
        assert [link["state"] for link in view["links"]] == ["sealed", "open"]
        assert view["links"][1]["group"] != group
        read = seriatim("consume", "--queue", queue, "--max", "900").stdout
        assert seriatim("consume", "--queue", queue, "--idle-exit", "1").stdout == ""
        assert read == RECORDS.split("\n", 100)[100] + RECORDS
        seriatim("group", "drain", group, "--until", "drained", "--timeout", "60")
        removed = seriatim("group", "remove", group, code=3).stderr
        assert f"{group}-a: it is registered, stop it first" in removed
        assert f"queue {queue}: 1 of its links are there" in removed
    finally:
        resumed = seriatim("group", "resume", group, "--json").objects[0]
    assert not resumed["is_draining"]


def test_rotate_goes_on_with_the_other_group(seriatim, queue, cluster):
    fill(cluster, queue)
    rotate(seriatim, queue)
    fill(cluster, queue)
    links = seriatim("queue", "describe", queue, "--json").objects[0]["links"]
    assert [link["base"] for link in links] == [0, 500]
    assert len({link["group"] for link in links}) == 2
    refused = seriatim("queue", "abandon-link", queue, "--epoch", "1", "--confirm", queue, code=2)
    assert "need not be abandoned" in refused.stderr


def test_a_watch_shows_changes_as_they_come_and_ends_on_a_signal(seriatim, queue, cluster, tmp_path):
    output = tmp_path / "watched"
    command = (*SERIATIM, "status", queue, "--watch", "--json", "--coordinator", cluster.coordinators)
    with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE) as watching:

        def watched():
            return [json.loads(line) for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]

        def wait_until(holds):
            deadline_s = time.monotonic() + 60
            while not (views := watched()) or not holds(views[-1]):
                assert time.monotonic() < deadline_s, views[-1:]
                time.sleep(0.1)

        wait_until(lambda view: view["links"] == [])
        fill(cluster, queue)
        wait_until(lambda view: [link["committed"] for link in view["links"]] == [500])
        watching.send_signal(signal.SIGTERM)
        assert watching.communicate(timeout=100)[1] == b""
    assert watching.returncode == 0


def test_a_watch_that_nobody_reads_any_more_ends_quietly(seriatim, queue, cluster):
    command = (*SERIATIM, "status", queue, "--watch", "--json", "--coordinator", cluster.coordinators)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert json.loads(watching.stdout.readline())["queue"] == queue
        watching.stdout.close()
        fill(cluster, queue)
        assert (watching.wait(100), watching.stderr.read()) == (0, b"")


def test_a_watch_of_a_queue_that_is_deleted_says_so_in_one_line(seriatim, cluster):
    queue = f"q-{uuid.uuid4().hex[:8]}"
    seriatim("queue", "create", queue)
    command = (*SERIATIM, "status", queue, "--watch", "--json", "--coordinator", cluster.coordinators)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
        assert watching.stdout.readline()
        seriatim("queue", "delete", queue, "--yes")
        errors = watching.communicate(timeout=100)[1].decode()
    assert watching.returncode == 2
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1


FIGURES = {
    "records_per_s",
    "mb_per_s",
    "latency_p50_ms",
    "latency_p99_ms",
    "count",
    "seconds",
    "bench",
    "queue",
    "size",
}


def test_bench_makes_its_queue_and_measures(seriatim):
    name = f"load-{uuid.uuid4().hex[:8]}"
    arguments = ("--queue", name, "--json")
    done = seriatim("bench", "produce", "--size", "100", "--count", "5000", *arguments)
    assert f"queue {name} wasn't there: made it" in done.stderr
    assert set(done.objects[0]) == FIGURES
    assert done.objects[0]["count"] == 5000
    assert done.objects[0]["latency_p50_ms"] > 0
    done = seriatim("bench", "latency", "--count", "20", *arguments)
    assert set(done.objects[0]) == FIGURES
    assert done.stderr == ""
    done = seriatim("bench", "consume", "--count", "5000", *arguments)
    assert set(done.objects[0]) == FIGURES
    assert (done.objects[0]["count"], done.objects[0]["size"]) == (5000, 100)
    assert seriatim("bench", "consume", "--count", "6000", *arguments, code=1).objects[0]["count"] == 5021
    assert seriatim("queue", "describe", name, "--json").objects[0]["subscriptions"] == []


def test_bench_failover_kills_masters_and_loses_nothing(seriatim, cluster):
    name = f"load-{uuid.uuid4().hex[:8]}"
    before = cluster.supervisor.pids()
    [figures] = seriatim(
        "bench", "failover", "--queue", name, "--count", "2", "--rate", "200", "--session-timeout-ms", "20000",
        "--pids", str(cluster.supervisor.directory / "pids.json"), "--json",
    ).objects  # fmt: skip
    after = cluster.supervisor.pids()
    assert sum(before[name] != after[name] for name in before) in {1, 2}
    assert figures["records_sent"] == figures["records_acknowledged"]
    assert figures["fault"] == "master-kill"
    assert len(figures["outages_ms"]) == len(figures["reading_outages_ms"]) == 2
    # Above the ordinary silence, which on a busy machine is as long as the outage.
    assert 0 <= figures["outage_p50_ms"] <= figures["outage_p99_ms"]
    assert 0 <= figures["reading_outage_p50_ms"] <= figures["reading_outage_p99_ms"]
    arguments = ("--queue", name, "--count", "1", "--rate", "200", "--session-timeout-ms", "20000", "--json")
    [planned] = seriatim("bench", "failover", *arguments).objects
    assert planned["fault"] == "rotate"
    described = seriatim("queue", "describe", name, "--json").objects[0]
    assert described["send_list"][0] in {"g1", "g2"}
    assert described["subscriptions"] == []


def failover_shown(seriatim, least_ms, *arguments):
    """What is measured; again where the machine stood still before the fault, so that it counts as ordinary."""
    for _ in range(5):
        [figures] = seriatim("bench", "failover", "--count", "1", "--rate", "200", "--json", *arguments).objects
        if figures["outage_p50_ms"] > least_ms:
            break
    return figures


@pytest.mark.parametrize(("fault", "session_ms"), [("sender-stop", 30_000), ("sender-kill", 3000)])
def test_bench_failover_lets_a_second_sender_take_over(seriatim, fault, session_ms):
    name = f"load-{uuid.uuid4().hex[:8]}"
    least_ms = session_ms / 3 if fault == "sender-kill" else -1
    arguments = ("--queue", name, "--fault", fault, "--session-timeout-ms", str(session_ms))
    figures = failover_shown(seriatim, least_ms, *arguments)
    if fault == "sender-stop":
        assert (figures["records_acknowledged"], figures["records_unknown"]) == (figures["records_sent"], 0)
        assert 0 <= figures["outage_p50_ms"] < session_ms / 2  # its session isn't waited for
    else:
        assert figures["records_acknowledged"] > 0
        assert figures["outage_p50_ms"] > least_ms


def test_bench_failover_pauses_a_member_and_lets_it_go_on(seriatim, cluster):
    name = f"load-{uuid.uuid4().hex[:8]}"
    before = cluster.supervisor.pids()
    arguments = ("--queue", name, "--fault", "master-pause", "--session-timeout-ms", "20000")
    figures = failover_shown(seriatim, 100, *arguments, "--pids", str(cluster.supervisor.directory / "pids.json"))
    assert cluster.supervisor.pids() == before
    assert figures["records_sent"] == figures["records_acknowledged"]
    assert figures["outage_p50_ms"] > 100  # the sender's patience of 300 ms, less the ordinary silence


def test_bench_failover_of_members_needs_their_process_ids(seriatim):
    refused = seriatim("bench", "failover", "--queue", "load", "--count", "1", "--fault", "slave-kill", code=2)
    assert "--pids" in refused.stderr


def test_bench_failover_refuses_somebody_else_s_pids(seriatim, tmp_path):
    other = tmp_path / "pids.json"
    other.write_text("{}")
    name = f"load-{uuid.uuid4().hex[:8]}"
    refused = seriatim("bench", "failover", "--queue", name, "--count", "1", "--pids", str(other), code=2)
    assert "doesn't name the member" in refused.stderr


def test_runs_of_a_sender_without_a_name_are_one_source_to_the_queue(seriatim, queue):
    for _ in range(3):
        seriatim("produce", "--queue", queue, given="a\nb\n")
    read = seriatim("consume", "--queue", queue, "--max", "6", "--json").objects
    assert {one["source"] for one in read} == {"producer"}
    seqs = [one["seq"] for one in read]
    assert len(set(seqs)) == 6
    assert seqs == sorted(seqs)
