"""One Spark session for all tests of the data source; queues that cost nothing; databases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from seriatim.consumer.spark.engine import spark_session

    directory = tmp_path_factory.mktemp("spark")
    java_options = f"-Dseriatim.tests=yes -Xlog:class+load:file={directory / 'loaded'}"
    conf = {"spark.driver.memory": "800m", "spark.driver.extraJavaOptions": java_options}
    session = spark_session("local[2]", directory, conf=conf)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    settings = {"fsync": "off", "full_page_writes": "off"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), settings=settings) as server:
        yield server


@pytest.fixture
def new_database(postgres_server: EmbeddedPostgres) -> Callable[[], str]:
    """Call it for the DSN of a new, empty database."""

    def make() -> str:
        name = f"test_{next(_NUMBERS)}"
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return postgres_server.dsn(name)

    return make
