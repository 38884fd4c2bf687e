"""The tables. Changing one needs a migration beside it (harness/store/migrations/versions).

Times are wall-clock UTC and for people; no duration is ever computed from them.
"""

from __future__ import annotations

import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

RUN_STATES = ("planned", "running", "collected", "judged")


class UtcDateTime(TypeDecorator[datetime.datetime]):
    """An aware UTC time. SQLite keeps no zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(
        self, value: datetime.datetime | None, dialect: Dialect
    ) -> datetime.datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a time without a zone cannot be stored: {value.isoformat()}")
        return value.astimezone(datetime.UTC)

    def process_result_value(
        self, value: datetime.datetime | None, dialect: Dialect
    ) -> datetime.datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            return value.replace(tzinfo=datetime.UTC)
        return value.astimezone(datetime.UTC)


JsonColumn = JSON(none_as_null=True)


class Base(DeclarativeBase):
    # Named constraints: a migration on PostgreSQL can drop them, and SQLite's batch mode too.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - read by the declarative base, never changed
        datetime.datetime: UtcDateTime,
        float: Double(),
        dict[str, Any]: JsonColumn,
        list[str]: JsonColumn,
    }


class BoardRow(Base):
    """A board as last seen. `name` is its key in devices.yaml."""

    __tablename__ = "boards"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    host: Mapped[str | None] = mapped_column(String(300))
    serial: Mapped[str | None] = mapped_column(String(200))
    virtual: Mapped[bool | None]
    tags: Mapped[list[str] | None]
    budget: Mapped[dict[str, Any] | None]
    facts: Mapped[dict[str, Any] | None]
    boot_id: Mapped[str | None] = mapped_column(String(64))
    last_seen: Mapped[datetime.datetime | None]


class ModelRow(Base):
    """A packed model; `hash` is the sha256 of its package."""

    __tablename__ = "models"

    hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str | None] = mapped_column(String(300))
    scheme: Mapped[str | None] = mapped_column(String(100))
    source_sha256: Mapped[str | None] = mapped_column(String(64))
    hyperparameters: Mapped[dict[str, Any] | None]
    notes: Mapped[list[str] | None]
    bytes: Mapped[int | None] = mapped_column(BigInteger)


class CampaignRow(Base):
    """One command that ran jobs on boards. `owner` is the process (see harness.store.owner)."""

    __tablename__ = "campaigns"
    __table_args__ = (Index(None, "kind", "options_hash"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    kind: Mapped[str] = mapped_column(String(50))
    command: Mapped[list[str]]
    options: Mapped[dict[str, Any]]
    options_hash: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(300))
    outcome: Mapped[str | None] = mapped_column(String(20))
    started_at: Mapped[datetime.datetime]
    finished_at: Mapped[datetime.datetime | None]

    runs: Mapped[list[RunRow]] = relationship(back_populates="campaign")


class RunRow(Base):
    """One attempt of one stage on one board."""

    __tablename__ = "runs"
    __table_args__ = (
        Index(None, "campaign_id", "board"),
        Index(None, "board", "model_hash", "stage", "started_at"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    campaign_id: Mapped[str] = mapped_column(ForeignKey("campaigns.id"))
    board: Mapped[str] = mapped_column(ForeignKey("boards.name"))
    model_hash: Mapped[str | None] = mapped_column(ForeignKey("models.hash"))
    model_name: Mapped[str | None] = mapped_column(String(300))
    scheme: Mapped[str | None] = mapped_column(String(100))
    quant_hash: Mapped[str | None] = mapped_column(String(64))
    engine_hash: Mapped[str | None] = mapped_column(String(64))
    toolchain: Mapped[str | None] = mapped_column(String(200))
    power_mode: Mapped[str | None] = mapped_column(String(100))
    stage: Mapped[str] = mapped_column(String(50))
    parameters: Mapped[dict[str, Any]]
    boot_id: Mapped[str | None] = mapped_column(String(64))
    attempt: Mapped[int]
    state: Mapped[str] = mapped_column(String(20))  # one of RUN_STATES
    outcome: Mapped[str | None] = mapped_column(String(20))
    headline: Mapped[str | None] = mapped_column(Text)
    culprit: Mapped[str | None] = mapped_column(String(200))
    remedy: Mapped[str | None] = mapped_column(Text)
    details: Mapped[dict[str, Any] | None]
    error_kind: Mapped[str | None] = mapped_column(String(50))
    started_at: Mapped[datetime.datetime]
    finished_at: Mapped[datetime.datetime | None]
    seconds: Mapped[float | None]  # by the board's monotonic clock
    remote_spool: Mapped[str | None] = mapped_column(Text)
    deployment: Mapped[dict[str, Any] | None]
    facts: Mapped[dict[str, Any] | None]
    clocks: Mapped[str | None] = mapped_column(Text)  # "valid", "unknown" or why it is invalid
    # What ran: options, unit, kernels by kind of op, threads, cores, features, and what fell back.
    engine: Mapped[dict[str, Any] | None]

    campaign: Mapped[CampaignRow] = relationship(back_populates="runs")
    checks: Mapped[list[CheckRow]] = relationship(
        back_populates="run", order_by="CheckRow.position", cascade="all, delete-orphan"
    )
    series: Mapped[list[SeriesRow]] = relationship(
        back_populates="run", order_by="SeriesRow.name", cascade="all, delete-orphan"
    )


class CheckRow(Base):
    """One acceptance line of a run. A measured value or limit is a number or a text."""

    __tablename__ = "checks"
    __table_args__ = (UniqueConstraint("run_id", "position"), Index(None, "name"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    position: Mapped[int]
    name: Mapped[str] = mapped_column(String(100))
    outcome: Mapped[str] = mapped_column(String(20))
    measured: Mapped[float | None]
    measured_text: Mapped[str | None] = mapped_column(Text)
    limit: Mapped[float | None] = mapped_column("limit_value")  # LIMIT is a keyword of SQL
    limit_text: Mapped[str | None] = mapped_column(Text)
    unit: Mapped[str] = mapped_column(String(50))
    sentence: Mapped[str] = mapped_column(Text)

    run: Mapped[RunRow] = relationship(back_populates="checks")


class SeriesRow(Base):
    """A raw file of a run. `path` is relative to the store's raw folder."""

    __tablename__ = "series"
    __table_args__ = (UniqueConstraint("run_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(200))
    path: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)

    run: Mapped[RunRow] = relationship(back_populates="series")


class TuningRow(Base):
    """What a board was measured to run best with. `key` names everything that it was measured with
    (engine, its native library, options, model, cores): it holds for nothing else."""

    __tablename__ = "tunings"

    board: Mapped[str] = mapped_column(String(200), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    engine_hash: Mapped[str] = mapped_column(String(64))
    facts_hash: Mapped[str] = mapped_column(String(64))
    model_hash: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[str] = mapped_column(String(36))
    found: Mapped[dict[str, Any]]
    measured_at: Mapped[datetime.datetime]


class LeaseRow(Base):
    """Who holds a board. The row stays after a release, so that tokens never repeat."""

    __tablename__ = "leases"

    board: Mapped[str] = mapped_column(String(200), primary_key=True)
    token: Mapped[int]  # grows by one with each acquisition
    owner: Mapped[str] = mapped_column(String(300))
    reason: Mapped[str] = mapped_column(Text)
    ttl_s: Mapped[float]
    clock: Mapped[str] = mapped_column(String(100))  # which clock `expires_s` is on
    expires_s: Mapped[float]
    acquired_at: Mapped[datetime.datetime]
    heartbeat_at: Mapped[datetime.datetime]
    expires_at: Mapped[datetime.datetime]  # for people; `expires_s` decides
    released_at: Mapped[datetime.datetime | None]


class QuarantineRow(Base):
    """A board that is set aside. The row goes when it is re-admitted."""

    __tablename__ = "quarantines"

    board: Mapped[str] = mapped_column(String(200), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    set_by: Mapped[str] = mapped_column(String(300))
    automatic: Mapped[bool]  # set by the harness, not by a person
    since: Mapped[datetime.datetime]


class BoardEventRow(Base):
    """Something that was done about a board: a restart, a health check, a quarantine."""

    __tablename__ = "board_events"
    __table_args__ = (Index(None, "board", "kind"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    board: Mapped[str] = mapped_column(String(200))
    at: Mapped[datetime.datetime]
    kind: Mapped[str] = mapped_column(String(50))
    good: Mapped[bool]
    told: Mapped[str] = mapped_column(Text)


class SearchRow(Base):
    """A search for what is to blame. `kind` is race, options or revision; `options` decide what
    it repeats. `outcome` is the search's own word: "named", "inconclusive", "environment", …"""

    __tablename__ = "searches"
    __table_args__ = (Index(None, "kind", "options_hash"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    kind: Mapped[str] = mapped_column(String(50))
    board: Mapped[str] = mapped_column(String(200))
    command: Mapped[list[str]]
    options: Mapped[dict[str, Any]]
    options_hash: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(300))
    outcome: Mapped[str | None] = mapped_column(String(50))
    headline: Mapped[str | None] = mapped_column(Text)
    culprits: Mapped[list[str] | None]
    confidence: Mapped[float | None]
    details: Mapped[dict[str, Any] | None]
    started_at: Mapped[datetime.datetime]
    finished_at: Mapped[datetime.datetime | None]


class TrialRow(Base):
    """One trial of a search; the fields of harness.bisect.trials.Trial."""

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("search_id", "position"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    search_id: Mapped[str] = mapped_column(ForeignKey("searches.id", ondelete="CASCADE"))
    position: Mapped[int]
    phase: Mapped[str] = mapped_column(String(50))
    subject: Mapped[dict[str, Any]]
    result: Mapped[str] = mapped_column(String(20))
    signature: Mapped[str | None] = mapped_column(Text)
    value: Mapped[float | None]
    seconds: Mapped[float | None]
    run: Mapped[str | None] = mapped_column(String(100))
    evidence: Mapped[dict[str, Any] | None]


class CrashRow(Base):
    """A run whose engine ended badly. `hash` names what is the same crash elsewhere, `finer` a part
    of that. `facts` holds {"lines": [[what, found], …]}, `reproducer` a command and
    how often it shows the crash."""

    __tablename__ = "crashes"
    __table_args__ = (Index(None, "hash"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    board: Mapped[str] = mapped_column(String(200))
    stage: Mapped[str] = mapped_column(String(50))
    seen_at: Mapped[datetime.datetime]
    name: Mapped[str] = mapped_column(String(50))
    hash: Mapped[str] = mapped_column(String(16))
    finer: Mapped[str] = mapped_column(String(16))
    signature: Mapped[str] = mapped_column(Text)
    op: Mapped[str | None] = mapped_column(String(200))
    headline: Mapped[str] = mapped_column(Text)
    sentence: Mapped[str] = mapped_column(Text)
    remedy: Mapped[str] = mapped_column(Text)
    facts: Mapped[dict[str, Any]]
    reproducer: Mapped[dict[str, Any] | None]


class AlertRow(Base):
    """A suspect of a night and what became of it. `series` names all that its nights have alike,
    `decided` is a harness.statistics.policy.Decided, `told` says how it was decided. `right`:
    whether the detector was right, as the A/B or a person says; None while nobody knows."""

    __tablename__ = "alerts"
    __table_args__ = (Index(None, "board", "series"), Index(None, "campaign_id"))

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    detector: Mapped[str] = mapped_column(String(50))
    board: Mapped[str] = mapped_column(String(200))
    stage: Mapped[str] = mapped_column(String(50))
    metric: Mapped[str] = mapped_column(String(100))
    series: Mapped[str] = mapped_column(String(64))
    campaign_id: Mapped[str] = mapped_column(String(36))
    run_id: Mapped[str] = mapped_column(String(36))
    night: Mapped[datetime.datetime]
    before: Mapped[float | None]
    now: Mapped[float | None]
    shift: Mapped[float | None]
    p: Mapped[float | None]
    nights: Mapped[int]
    good_build: Mapped[str | None] = mapped_column(String(64))
    build: Mapped[str | None] = mapped_column(String(64))
    decided: Mapped[str] = mapped_column(String(50))
    told: Mapped[str] = mapped_column(Text)
    search_id: Mapped[str | None] = mapped_column(String(36))  # of the A/B
    right: Mapped[bool | None]


class BuildRow(Base):
    """Which engine a campaign ran: the hash of its sources, Python and C (harness.deploy.kept)."""

    __tablename__ = "builds"

    campaign_id: Mapped[str] = mapped_column(
        ForeignKey("campaigns.id", ondelete="CASCADE"), primary_key=True
    )
    build: Mapped[str] = mapped_column(String(64))


class NumbersRow(Base):
    """What nights are held against, of one run; see harness.store.numbers."""

    __tablename__ = "numbers"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    speed_start: Mapped[float | None]
    speed_middle: Mapped[float | None]
    speed_end: Mapped[float | None]
    ttft_s: Mapped[float | None]
    rss_mb: Mapped[float | None]
    mean_kl: Mapped[float | None]
