from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest

from seriatim.cli.embedded.errors import StartFailed
from seriatim.cli.embedded.postgres import EmbeddedPostgres
from seriatim.cli.embedded.processes import Supervisor

pytestmark = pytest.mark.postgres
FAST = {"fsync": "off"}


def test_it_decodes_logically_survives_a_kill_and_keeps_port_and_data(tmp_path):
    with EmbeddedPostgres(tmp_path) as server:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table kept (id int primary key)")
            connection.execute("insert into kept values (7)")
            connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        server.supervisor.kill("postgres")
        assert not server.is_serving()
    with EmbeddedPostgres(tmp_path) as server:
        assert server.dsn() == dsn
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select id from kept").fetchall() == [(7,)]
            assert connection.execute("select slot_name from pg_replication_slots").fetchall() == [("s",)]


def test_a_program_that_takes_too_long_is_named(tmp_path):
    with (
        EmbeddedPostgres(tmp_path, settings={"fsync": "off"}) as server,
        pytest.raises(StartFailed, match=r"psql didn't end within 0\.1 s"),
    ):
        server.run("psql", "-c", "SELECT pg_sleep(60)", timeout_s=0.1)


def test_two_run_under_one_supervisor_and_pgbench_works(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        east, west = (
            EmbeddedPostgres(tmp_path / name, name=name, supervisor=supervisor, settings=FAST)
            for name in ("east", "west")
        )
        east.start()
        west.start()
        assert set(supervisor.pids()) == {"east", "west"}
        east.run("pgbench", "--initialize", "--quiet")
        assert east.run("psql", "-Atc", "select count(*) from pgbench_accounts").strip() == "100000"
        with pytest.raises(StartFailed, match="pgbench_accounts"):
            west.run("psql", "-Atc", "select count(*) from pgbench_accounts")
        east.close()
        assert set(supervisor.pids()) == {"west"}


@pytest.mark.skipif(os.geteuid() != 0, reason="about being root")
def test_root_s_server_runs_as_somebody_else_even_in_a_private_folder(tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with EmbeddedPostgres(private / "server", settings=FAST) as server:
        pid = server.supervisor.pid("postgres")
        assert Path(f"/proc/{pid}").stat().st_uid != 0
        assert (private / "server" / "data").stat().st_uid == Path(f"/proc/{pid}").stat().st_uid
