"""A Spark session for the replay: small, quiet, and quick with small micro-batches."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark import SparkContext
from pyspark.accumulators import AccumulatorTCPServer, AccumulatorUnixServer
from pyspark.sql import SparkSession

from seriatim.consumer.spark import class_archive, python
from seriatim.consumer.spark.datasource import SeriatimDataSource
from seriatim.protocol.errors import InvalidArgument, WorldError

JAVA_VERSION = 17
"""The oldest Java that Spark 4 runs on."""
_ANSWER_S = 30.0
_ENDING_S = 1.0
_SOCKET_NAME = f".{uuid.UUID(int=0)}.sock"
"""As long as Spark's names are."""
_SOCKET_PATH_BYTES = 107
"""As long as the path of a socket may be on Linux: unix(7), less the byte behind it."""

_LOGGING = """\
status = off
rootLogger.level = {level}
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{yy-MM-dd HH:mm:ss}} %p %c{{1}}: %m%n%ex
"""


_JAVA_OPTIONS = "spark.driver.extraJavaOptions"

_STREAMING = "org.apache.spark.sql.execution.streaming"
_CHECKPOINT = {
    "spark.sql.streaming.checkpointFileManagerClass": f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
"""For a checkpoint that lies on this machine and serves one run: Spark's own choice runs a program for each look at a file, some
eight in each micro-batch, and writes a checksum beside each, which nobody will read.
"""

_FIXED = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Nothing is shuffled; should a plan ever want to, one partition is in order.
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "4",
    "spark.sql.streaming.stopTimeout": "10s",
}
"""How a query runs; what it runs on is the user's."""


class JavaMissing(WorldError):
    """Spark has no Java to run on."""

    code = "java-missing"
    can_retry = False
    next_step = "install one, on Debian or Ubuntu: apt-get install openjdk-17-jre-headless (on Debian 13 openjdk-21-jre-headless); or set JAVA_HOME"


class SparkNotStarted(WorldError):
    """Spark refused its master's address, or nobody answered there."""

    code = "spark-not-started"
    can_retry = False
    next_step = (
        "check --master: spark://HOST:PORT of a master that can be reached from here and can reach back, or local[N]"
    )


class JavaEnded(SparkNotStarted):
    """Java ended while Spark started."""

    code = "java-ended"
    next_step = "what it printed above, if it could, says why: an option or a setting of memory that it doesn't take; else memory is short, and it was killed"


def check_java() -> None:
    """Raises JavaMissing where Spark would not find a Java it runs on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else "java"
    if shutil.which(java) is None:
        raise JavaMissing(f"Spark needs Java {JAVA_VERSION} or newer, and {java} isn't there")
    # In a session of its own, so that Ctrl-C, which a terminal sends to all, isn't taken for a Java that doesn't work.
    command = [java, "-version"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise JavaMissing(f"{java} -version didn't answer within {_ANSWER_S:g} s") from error
    found = re.search(r'version "(\d+)', answer.stderr)
    if answer.returncode != 0 or found is None:
        raise JavaMissing(f"{java} -version failed: {answer.stderr.strip()[:200]}")
    if int(found[1]) < JAVA_VERSION:
        raise JavaMissing(f"Spark needs Java {JAVA_VERSION} or newer, and {java} is Java {found[1]}")


def check_conf(conf: Mapping[str, str]) -> None:
    """Raises InvalidArgument where a setting that a user gave is none of Spark's, or isn't the user's to choose."""
    for name in conf:
        if not name.startswith("spark."):
            raise InvalidArgument(f"{name} is no setting of Spark's: their names start with spark.")
        if name == "spark.master":
            raise InvalidArgument("where Spark runs is said with --master, not as a setting")
        if name in _FIXED:
            raise InvalidArgument(f"{name} is {_FIXED[name]}: a replay needs it so")


def driver_memory(conf: Mapping[str, str]) -> dict[str, str]:
    """What the driver gets, unless a user's settings say: so little that what is too much for it is refused before its memory is out.

    Measured: of 768 MiB 150 MiB of records pass in one piece, 220 don't.
    """
    if "spark.driver.memory" in conf:
        return {}
    return {"spark.driver.memory": "768m", "spark.driver.maxResultSize": "160m"}


def python_sockets(directory: Path) -> dict[str, str]:
    """How Java and Python reach each other: by files, which only this user opens, and not by ports of the loopback.

    There the first four bytes that anybody sent, a scanner or a client of a server that is gone, are taken for a length,
    which is 1.3 GB for HTTP/2's: the driver's memory was out. Where the name of a file in `directory` is too long for a
    socket, they are in /tmp.
    """
    settings = {"spark.python.unix.domain.socket.enabled": "true"}
    if len(os.fsencode(directory / _SOCKET_NAME)) > _SOCKET_PATH_BYTES:
        settings["spark.python.unix.domain.socket.dir"] = "/tmp"  # noqa: S108 - the name is Spark's, and is random
    return settings


def _is_local(master: str) -> bool:
    """Whether Spark runs in one process, which has no executors beside the driver."""
    return master.startswith("local")


def spark_session(
    master: str,
    directory: Path,
    *,
    log_level: str = "fatal",
    conf: Mapping[str, str] | None = None,
    archive_options: Sequence[str] | None = None,
) -> SparkSession:
    """Start Spark at `master`, with its scratch files in `directory`, and teach it the source ``seriatim``.

    `log_level`: of Spark's own log. A query's failure is told by its exception; Spark's log would tell it again, at length.
    `conf`: settings of the user's (`check_conf`), which go before ours; options of Java's are added to ours.
    `archive_options`: Java's, about its class archive; by default to use the one that there is, if any.
    Raises SparkNotStarted, where nobody answers at `master` after a minute; JavaEnded.
    """
    # Tasks run the Python that runs this, unless the user says which: in a cluster the paths may differ.
    command = python.command()
    os.environ.setdefault("PYSPARK_PYTHON", command or sys.executable)
    log4j = directory / "log4j2.properties"
    log4j.write_text(_LOGGING.format(level=log_level))
    wanted = dict(conf or {})
    java_options = wanted.pop(_JAVA_OPTIONS, "")
    if archive_options is None:
        archive_options = class_archive.using(class_archive.SPARK)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        **driver_memory(wanted),
        **(python_sockets(directory) if os.environ["PYSPARK_PYTHON"] == command else {}),
        # Much of a short micro-batch runs once or a few times: the simple compiler and collector cost the least then.
        # What Java, and libraries in it, make in /tmp goes when they end; where that is by a kill, with the directory.
        _JAVA_OPTIONS: f"-Dlog4j2.configurationFile={log4j.as_uri()} -Djava.io.tmpdir={shlex.quote(str(directory))} "
        # Without memory a thread of Spark's may end alone, and the query wait for it for ever: better that all end.
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError {shlex.join(archive_options)} {java_options}",
        "spark.task.maxFailures": "4",
        **_CHECKPOINT,
    }
    _say_once_that_java_is_gone()
    if _is_local(master):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    settings |= wanted | _FIXED
    builder = SparkSession.builder.appName("seriatim replay").master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        spark: SparkSession = builder.getOrCreate()
        spark.dataSource.register(SeriatimDataSource)
    except Exception as error:  # py4j has many, with a Java trace each
        if _has_java_ended(error):
            raise JavaEnded("Spark can't be started: Java has ended") from error
        raise SparkNotStarted(f"Spark can't be started at {master}: {_reason(error)}") from error
    return spark


def _say_once_that_java_is_gone() -> None:
    """A replay does, in a line. py4j and pyspark would print a trace for each call that fails then, of theirs and of ours."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_py4j_s)
    for server in (AccumulatorTCPServer, AccumulatorUnixServer):
        server.handle_error = lambda *_: None  # type: ignore[method-assign]


def _is_not_py4j_s(record: logging.LogRecord) -> bool:
    """Its word goes to the root logger, past its own."""
    return record.msg != "Exception while sending command."


def _has_java_ended(error: Exception) -> bool:
    """Its connections go a moment before it does."""
    process = getattr(SparkContext._gateway, "proc", None)  # noqa: SLF001 - no public way
    if process is None:
        return "JAVA_GATEWAY_EXITED" in str(error)
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _reason(error: Exception) -> str:
    """The line that says what Java met."""
    lines = [line.removeprefix(": ") for line in str(error).splitlines() if "Exception" in line or "Error:" in line]
    return (lines or [type(error).__name__])[0][:300]


def give_up_starting() -> None:
    """End the JVM, so that `spark_session`, which waits for it on another thread, raises."""
    gateway = SparkContext._gateway  # noqa: SLF001 - no public way
    process = getattr(gateway, "proc", None)
    if process is not None:
        process.kill()


def result_limit_bytes(spark: SparkSession) -> int:
    """What may come to the driver at once; 0: no limit. Spark itself looks only when all of a task's result is in its memory."""
    conf = spark.sparkContext._jsc.sc().conf()  # noqa: SLF001 - no public way
    limit_bytes: int = conf.getSizeAsBytes("spark.driver.maxResultSize", "1g")
    return limit_bytes


def lacks_executors(spark: SparkSession) -> bool:
    """Whether nobody is there who could run a task. Where Spark runs in one process, that runs them itself."""
    context = spark.sparkContext
    if _is_local(context.master or ""):
        return False
    known: int = context._jsc.sc().getExecutorMemoryStatus().size()  # noqa: SLF001 - no public way
    return known <= 1  # the driver counts as one


def has_ended(spark: SparkSession) -> bool:
    """Whether it runs nothing any more: the JVM is gone, or lives on behind a context that was stopped, as where a cluster's master ends its application."""
    try:
        is_stopped: bool = spark.sparkContext._jsc.sc().isStopped()  # noqa: SLF001 - no public way
    except Exception:  # py4j has many
        return True
    return is_stopped
