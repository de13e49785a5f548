"""A PostgreSQL server for the session, and databases of its own for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import psycopg
import pytest

from seriatim.cli.embedded.postgres import EmbeddedPostgres

_NUMBERS = count(1)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that doesn't flush: it is killed by no test."""
    settings = {"fsync": "off", "full_page_writes": "off", "max_prepared_transactions": "10"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres"), settings=settings) as server:
        yield server


@pytest.fixture
def new_database(postgres_server: EmbeddedPostgres) -> Iterator[Callable[..., str]]:
    """Call it for the DSN of a new, empty database; it is dropped after the test."""
    made: list[str] = []

    def make(options: str = "") -> str:
        name = f"test_{next(_NUMBERS)}"
        with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} {options}")
        made.append(name)
        return postgres_server.dsn(name)

    yield make
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as connection:
        for name in made:
            # A walsender ends a moment after its client, and a database with a slot in use can't be dropped.
            connection.execute(
                "SELECT pg_terminate_backend(active_pid, 60000) FROM pg_replication_slots WHERE database = %s AND active",
                (name,),
            )
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
