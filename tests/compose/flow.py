"""Records that flow while a deployment is harmed: two senders and three readers in containers, and the judgement.

They are those of tests/faults, with histories of their own, in the image that everything else runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import docker
from docker.models.containers import Container

from seriatim.protocol import seriatim_pb2 as pb
from tests.compose.deployment import COORDINATORS, MEMBERS, ROOT, Deployment
from tests.faults import certificates, checker
from tests.faults.history import Acknowledged, Delivered, Event, Tail
from tests.faults.logs import defects
from tests.faults.trial import SUBSCRIPTIONS, copies_of, is_all_read, read_again, sealed_links, wait_until

SENDERS: Final = ("sender-1", "sender-2")
READERS: Final = {"reader-1": "main", "reader-2": "main", "reader-3": "other"}
RECORDS_PER_S: Final = 150


class Flow:
    """A context manager: a queue of its own, and the workload's containers on it."""

    def __init__(self, deployment: Deployment, queue: str, directory: Path, image: str) -> None:
        self.deployment = deployment
        self.queue = queue
        self._directory = directory
        self._image = image
        self._tails = {name: Tail(directory / f"{name}.jsonl") for name in (*SENDERS, *READERS)}
        self._events: list[Event] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self.deployment.wait_until_whole()
        # Whoever runs in a container isn't this user.
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o777)
        self.deployment.ask("CreateQueue", pb.CreateQueueRequest(queue=self.queue))
        for name in (*SENDERS, *READERS):
            self.start(name)
        self.wait_for_progress("at the start")
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        for name in (*SENDERS, *READERS):
            self.instance(name).remove(force=True)
        self.deployment.ask("DeleteQueue", pb.QueueRequest(queue=self.queue))

    # ---- the instances

    def start(self, name: str, image: str | None = None) -> None:
        kind, more = ("sender", str(RECORDS_PER_S)) if name in SENDERS else ("reader", READERS[name])
        coordinators = "coordinator-1:7000,coordinator-2:7000"
        self.deployment.client.containers.run(
            image or self._image,
            entrypoint=["python", "-m", "tests.faults.workload"],
            command=[kind, coordinators, self.queue, name, f"/histories/{name}.jsonl", more],
            name=f"{self.deployment.project}-{self.queue}-{name}",
            hostname=name,
            environment={"PYTHONPATH": "/workload"},
            volumes={
                str(ROOT / "tests" / "faults"): {"bind": "/workload/tests/faults", "mode": "ro"},
                str(self._directory): {"bind": "/histories", "mode": "rw"},
            },
            network=self.deployment.network,
            detach=True,
        )

    def instance(self, name: str) -> Container:
        """A container by its short name: an instance of the workload, or a service."""
        if name in (*SENDERS, *READERS):
            return self.deployment.client.containers.get(f"{self.deployment.project}-{self.queue}-{name}")
        return self.deployment.container(name)

    # ---- what is known

    def events(self) -> list[Event]:
        """What was recorded so far, in the order of time."""
        for tail in self._tails.values():
            self._events += tail.follow()
        self._events.sort(key=lambda event: event.at_s)
        return self._events

    def view(self) -> pb.QueueView:
        view = self.deployment.ask("DescribeQueue", pb.QueueRequest(queue=self.queue))
        assert isinstance(view, pb.QueueView)
        return view

    def find(self, who: str) -> str:
        """The container that is now `master`, `slave`, `coordinator`, `zookeeper`, `sender` or `reader`."""
        if who == "coordinator":
            return self.deployment.elected_coordinator()
        if who == "zookeeper":
            return self.deployment.zookeeper_leader()

        def found() -> str | None:
            view = self.view()
            if who in ("master", "slave"):
                member = getattr(view.links[-1], who)
                return f"{member.group}-{member.member}" if member.group else None
            # Of the readers, one of the two that stand for the same subscription.
            main = next(one for one in view.subscriptions if one.subscription == "main")
            node = view.sender if who == "sender" else main.reader
            return next((name for name in (*SENDERS, *READERS) if node.startswith(f"{name}-")), None)

        return wait_until(found, f"there is a {who}")

    def wait_for_progress(self, when: str, timeout_s: float = 90, least: int = 50) -> None:
        """Records are acknowledged, and each subscription gets some that were acknowledged since."""
        since_s = time.monotonic()

        def goes_on() -> bool:
            events = [event for event in self.events() if event.at_s > since_s]
            acknowledged = sum(isinstance(one, Acknowledged) for one in events)
            read = {one.subscription for one in events if isinstance(one, Delivered)}
            return acknowledged >= least and read == set(SUBSCRIPTIONS)

        wait_until(goes_on, f"records flow {when}", timeout_s)

    # ---- harm and healing

    def harm(self, how: str, name: str) -> None:
        """`kill`, `pause`, `disconnect`: lasts until `heal`. `restart`: SIGTERM, and at once a new start."""
        container = self.instance(name)
        match how:
            case "kill":
                container.kill()
                self._undo.append(container.start)
            case "pause":
                pause(container)
                self._undo.append(container.unpause)
            case "disconnect":
                network = self.deployment.client.networks.get(self.deployment.network)
                network.disconnect(container)
                self._undo.append(lambda: network.connect(container, aliases=[name]))
            case "restart":
                container.restart(timeout=15)
            case _:
                raise AssertionError(how)

    def heal(self) -> None:
        """Everything that was harmed goes on."""
        while self._undo:
            self._undo.pop()()

    # ---- judging

    def judge(self, least: int) -> checker.Verdict:
        """Go on until `least` records are acknowledged, read to the end, and judge everything; asserts that all holds."""
        self.heal()
        self.deployment.wait_until_whole()
        self.wait_for_progress("after healing")
        wait_until(lambda: self._acknowledged() >= least, f"{least} records are acknowledged")
        self._stop(SENDERS)
        wait_until(lambda: is_all_read(self.view(), SUBSCRIPTIONS), "everything is read", 60)
        self._stop(tuple(READERS))
        verdict = checker.check([*self.events(), *read_again(self.deployment.coordinators, self.queue)])
        assert verdict.is_clean, (verdict.kinds(), verdict.anomalies[:10], str(self._directory))
        wait_until(
            lambda: all(link.copies == 2 for link in self.view().links if link.has_end and link.end),
            "each sealed link has two copies again",
            60,
        )
        for name in (*COORDINATORS, *MEMBERS, *SENDERS, *READERS):
            assert not defects(self.instance(name).logs().decode(errors="replace")), name
        view = self.view()
        claims, links = sealed_links(view)
        assert not certificates.problems(claims, asyncio.run(copies_of(view, links)))
        return verdict

    def _stop(self, names: tuple[str, ...]) -> None:
        for name in names:
            container = self.instance(name)
            container.stop(timeout=60)
            status = container.wait(timeout=60)["StatusCode"]
            assert status == 0, (name, status, container.logs(tail=20).decode(errors="replace"))

    def _acknowledged(self) -> int:
        return sum(isinstance(event, Acknowledged) for event in self.events())


def pause(container: Container) -> None:
    """The kernel doesn't always manage to freeze a container that just starts a process (a health check) in it."""

    def is_paused() -> bool:
        try:
            container.pause()
        except docker.errors.APIError as error:
            if "unable to freeze" not in str(error):
                raise
        container.reload()
        return bool(container.status == "paused")

    wait_until(is_paused, f"{container.name} is paused")
