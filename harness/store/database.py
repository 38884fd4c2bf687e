"""Opening the database: SQLite beside the results, or a PostgreSQL that several hosts share.

SQLite runs in WAL mode: readers never wait, and one writer at a time across threads and processes
takes its turn with BEGIN IMMEDIATE (a transaction that starts as a reader and then writes would
fail at once when another writer was quicker). On PostgreSQL writers take turns too, by an advisory
lock: results are written rarely, and whoever checks before writing needs no second thought.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from harness.errors import HarnessError
from harness.paths import made_folder
from harness.store.migrations import HEAD
from harness.store.owner import boot_identity

BUSY_SECONDS = 60.0  # how long a writer waits for its turn
_WRITERS_LOCK = 0x6465636F6465  # PostgreSQL advisory lock: "decode"

T = TypeVar("T")


class Database:
    """Connections and transactions. Threads may share one object."""

    def __init__(self, target: Path | str) -> None:
        """Raises HarnessError where `target` cannot be opened or belongs to a newer harness."""
        self.url = _url(target)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        # Without the password, and without options, of which one may be a password, too.
        shown = self.url.set(query={})
        self.label = str(self.url.database) if self.is_sqlite else str(shown)
        # Waiting for our own threads here is cheaper and fairer than SQLite's polling.
        self._writers = threading.RLock()
        self._engine = self._create_engine()
        self._migrate()

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Session]:
        """A session on one consistent snapshot; what it returns stays usable afterwards."""
        with self._reported(), Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction: committed as a whole at the end, or not at all."""
        engine = self._engine.execution_options(writes=True)
        guard = self._writers if self.is_sqlite else contextlib.nullcontext()
        with (
            guard,
            self._reported(),
            Session(engine, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def clock(self, session: Session) -> tuple[str, float]:
        """(name, seconds) of a clock that all users of this database share and nobody steps.

        SQLite: this machine's CLOCK_MONOTONIC, named by the boot. PostgreSQL: the server's clock.
        """
        if self.is_sqlite:
            return f"boot {boot_identity()}", time.monotonic()
        with session.no_autoflush:  # rows that are still being filled must not be written yet
            seconds = session.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())"))
        return "server", float(str(seconds))

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            reason = str(error.orig).strip().splitlines()[0] if str(error.orig) else "unknown"
            if isinstance(error, exc.IntegrityError):
                raise  # a caller's mistake or a race that it handles, not the database's state
            raise HarnessError(
                f"the results database refused: {reason}",
                where=self.label,
                remedy=_remedy(reason),
            ) from error

    def _create_engine(self) -> Engine:
        if not self.is_sqlite:
            try:
                engine = sa.create_engine(self.url, pool_pre_ping=True)
            except (ModuleNotFoundError, exc.NoSuchModuleError) as error:
                raise HarnessError(
                    f"no driver for this kind of database: {error}",
                    where=self.label,
                    expected="a SQLite path, or a PostgreSQL URL with its driver installed",
                    remedy="run: pip install 'psycopg[binary]'",
                ) from error
            sa.event.listen(engine, "begin", _take_turn)
            return engine
        path = Path(str(self.url.database))
        made_folder(path.parent, "HARNESS_HOME")
        # Without a pool, no connection is shared with a forked child or between threads.
        engine = sa.create_engine(
            self.url, poolclass=NullPool, connect_args={"timeout": BUSY_SECONDS}
        )
        sa.event.listen(engine, "connect", _prepare_connection)
        sa.event.listen(engine, "begin", _begin)
        return engine

    def _migrate(self) -> None:
        with self._reported():
            with self._engine.connect() as connection:
                if self._revision(connection) == HEAD:
                    return
            if self.is_sqlite:
                self._enable_wal()
            with self._engine.execution_options(writes=True).begin() as connection:
                # Another process may have upgraded while this one waited for its turn.
                if self._revision(connection) != HEAD:
                    upgrade(connection, "head")

    def _revision(self, connection: Connection) -> str | None:
        """Raises HarnessError for a schema that this version does not know."""
        if not sa.inspect(connection).has_table("alembic_version"):
            tables = sa.inspect(connection).get_table_names()
            if tables:
                raise HarnessError(
                    f"found a database with the table {tables[0]!r} and no version",
                    where=self.label,
                    expected="a results database of the harness, or a new file",
                    remedy="name another file",
                )
            return None
        found = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
        if found is not None and str(found) > HEAD:
            raise HarnessError(
                f"found schema revision {found}",
                where=self.label,
                expected=f"at most {HEAD}",
                remedy="a newer harness wrote these results: update this one, or set HARNESS_HOME",
            )
        return None if found is None else str(found)

    def _enable_wal(self) -> None:
        """WAL is a property of the file, so it is set once; it cannot be set in a transaction."""
        with contextlib.closing(
            sqlite3.connect(str(self.url.database), timeout=BUSY_SECONDS, isolation_level=None)
        ) as raw:
            try:
                _retry_locked(lambda: raw.execute("PRAGMA journal_mode = WAL").fetchone())
            except sqlite3.DatabaseError as error:
                raise HarnessError(
                    f"the results database refused: {error}",
                    where=self.label,
                    remedy=_remedy(str(error)),
                ) from error


def upgrade(connection: Connection, revision: str) -> None:
    """Runs the migrations up to `revision` in the caller's transaction."""
    # Imported late: alembic costs a fifth of a second, and most openings need no migration.
    from alembic import command
    from alembic.config import Config

    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _url(target: Path | str) -> sa.URL:
    if isinstance(target, str) and "://" in target:
        try:
            url = sa.make_url(target)
        except (exc.ArgumentError, ValueError) as error:
            raise HarnessError(
                "this is no database URL",
                expected="a path or postgresql://user@host/name",
            ) from error
        backend = url.get_backend_name()
        if backend not in ("postgresql", "sqlite"):
            raise HarnessError(
                f"found a {backend} URL", expected="a SQLite path or a postgresql:// URL"
            )
        if backend == "postgresql" and url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return url
    return sa.URL.create("sqlite", database=str(Path(target).absolute()))


def _prepare_connection(connection: DBAPIConnection, _record: object) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # The driver's own implicit BEGIN is a deferred one; `_begin` issues the right kind instead.
    connection.isolation_level = None
    # The very first read of a connection may meet another one that is just closing the file as its
    # last user; SQLite then reports "locked" without waiting.
    _retry_locked(lambda: connection.execute("SELECT count(*) FROM sqlite_master").fetchone())
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _take_turn(connection: Connection) -> None:
    if connection.get_execution_options().get("writes", False):
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_WRITERS_LOCK)))


def _retry_locked(action: Callable[[], T], patience_s: float = BUSY_SECONDS) -> T:
    end = time.monotonic() + patience_s
    while True:
        try:
            return action()
        except (sqlite3.OperationalError, exc.OperationalError) as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _remedy(reason: str) -> str:
    text = reason.lower()
    if "not a database" in text or "malformed" in text:
        return "this is no results database, or it is damaged: name another file or move it away"
    if "locked" in text:
        return "another process holds it for long: end that process, or try again"
    if "readonly" in text or "read-only" in text or "unable to open" in text:
        return "set HARNESS_HOME to a folder that you may write"
    if "disk" in text or "full" in text:
        return "free some space and run the command again"
    return ""
