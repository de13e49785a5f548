"""One Spark session for all tests of the data source; queues that cost nothing; databases."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.databases import new_database, postgres_server

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["new_database", "postgres_server"]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from seriatim.consumer.spark.engine import spark_session

    directory = tmp_path_factory.mktemp("spark")
    wrapped = directory / "programs" / "readlink"
    wrapped.parent.mkdir()
    wrapped.write_text(f'#!/bin/sh\necho "$*" >> {directory}/readlink\nexec {shutil.which("readlink")} "$@"\n')
    wrapped.chmod(0o755)
    java_options = f"-Dseriatim.tests=yes -Xlog:class+load:file={directory / 'loaded'}"
    conf = {"spark.driver.memory": "800m", "spark.driver.extraJavaOptions": java_options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(wrapped.parent), prepend=os.pathsep)
        session = spark_session("local[2]", directory, conf=conf)
    yield session
    session.stop()
