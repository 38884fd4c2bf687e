"""The schema from nothing, from its first revision, and against the models."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import harness.store.database as database_module
from harness.boards.leases import Leases
from harness.errors import HarnessError
from harness.store import Store
from harness.store.database import upgrade
from harness.store.migrations import HEAD
from harness.store.models import Base

FOLDER = Path(database_module.__file__).parent / "migrations"


def revisions() -> list[str]:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    config.set_main_option("path_separator", "os")
    return [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]


def at_revision(path: Path, revision: str) -> sa.Engine:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        upgrade(connection, revision)
    return engine


def test_the_newest_migration_is_the_one_that_stores_are_brought_to() -> None:
    assert revisions()[0] == HEAD


def test_migrations_make_exactly_the_tables_of_the_models(tmp_path: Path) -> None:
    engine = at_revision(tmp_path / "results.sqlite", "head")
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_a_store_of_the_first_revision_is_upgraded_with_its_results(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    engine = at_revision(path, "0001")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO campaigns (id, kind, command, options, options_hash, owner, started_at)"
            " VALUES ('c', 'bringup', '[]', '{}', 'h', 'o', '2026-01-01 10:00:00.000000')"
        )
        connection.exec_driver_sql("INSERT INTO boards (name) VALUES ('rk-01')")
        connection.exec_driver_sql(
            "INSERT INTO runs (id, campaign_id, board, stage, parameters, attempt, state,"
            " started_at) VALUES ('r', 'c', 'rk-01', 'tiny', '{}', 1, 'judged',"
            " '2026-01-01 10:00:00.000000')"
        )
    engine.dispose()
    with Store.open(path) as store:
        assert store.run("r").board == "rk-01"
        Leases(store).acquire("rk-01", reason="bring-up").release()


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    Store.open(path).close()

    def schema() -> list[tuple[str]]:
        with sqlite3.connect(path) as raw:
            return raw.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()

    before = schema()
    Store.open(path).close()
    assert schema() == before


def test_an_upgrade_that_fails_leaves_the_old_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.sqlite"

    def upgrade_and_fail(connection: sa.Connection, revision: str) -> None:
        upgrade(connection, revision)
        raise RuntimeError("the power went")

    monkeypatch.setattr(database_module, "upgrade", upgrade_and_fail)
    with pytest.raises(RuntimeError, match="power"):
        Store.open(path)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    monkeypatch.undo()
    Store.open(path).close()


def test_a_store_of_a_newer_harness_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    Store.open(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(HarnessError, match=r"revision 9999.*newer harness"):
        Store.open(path)


def test_processes_that_open_a_new_store_at_once_make_it_once(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    processes = multiprocessing.get_context("fork")
    children = [processes.Process(target=Store.open, args=(path,)) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 6
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]
