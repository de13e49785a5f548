"""A development cluster whose processes must not have logged a defect of their own when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from seriatim.cli import coordinators
from seriatim.cli.embedded.cluster import ClusterSettings, DevelopmentCluster
from tests.faults.logs import logged_defects


@contextlib.contextmanager
def sound_cluster(settings: ClusterSettings) -> Iterator[DevelopmentCluster]:
    """The cluster, started; ended with the block, whatever was done to it in there."""
    with DevelopmentCluster(settings) as cluster:
        yield cluster
    assert not logged_defects(cluster.supervisor.logs.iterdir())


def ask(cluster: DevelopmentCluster, method: str, request: object) -> Any:
    """A coordinator's answer, also where the machine stands still for a moment."""
    return coordinators.call(cluster.coordinators, method, request, 60)
