"""Suspects of nights and what became of them; which engine a campaign ran; numbers of runs."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# As details were when this was written; harness.store.numbers has them as they are now.
PLACES = {
    "speed_start": ("tokens_per_s_start",),
    "speed_middle": ("tokens_per_s_middle",),
    "speed_end": ("tokens_per_s_end",),
    "ttft_s": ("ttft_s",),
    "rss_mb": ("rss_peak_mb",),
    "mean_kl": ("logits", "mean_kl"),
}


def upgrade() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("detector", sa.String(50), nullable=False),
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("stage", sa.String(50), nullable=False),
        sa.Column("metric", sa.String(100), nullable=False),
        sa.Column("series", sa.String(64), nullable=False),
        sa.Column("campaign_id", sa.String(36), nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("night", sa.DateTime(timezone=True), nullable=False),
        sa.Column("before", sa.Double(), nullable=True),
        sa.Column("now", sa.Double(), nullable=True),
        sa.Column("shift", sa.Double(), nullable=True),
        sa.Column("p", sa.Double(), nullable=True),
        sa.Column("nights", sa.Integer(), nullable=False),
        sa.Column("good_build", sa.String(64), nullable=True),
        sa.Column("build", sa.String(64), nullable=True),
        sa.Column("decided", sa.String(50), nullable=False),
        sa.Column("told", sa.Text(), nullable=False),
        sa.Column("search_id", sa.String(36), nullable=True),
        sa.Column("right", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_alerts"),
    )
    op.create_index("ix_alerts_board_series", "alerts", ["board", "series"])
    op.create_index("ix_alerts_campaign_id", "alerts", ["campaign_id"])
    op.create_table(
        "builds",
        sa.Column("campaign_id", sa.String(36), nullable=False),
        sa.Column("build", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name="fk_builds_campaign_id_campaigns",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("campaign_id", name="pk_builds"),
    )
    numbers = op.create_table(
        "numbers",
        sa.Column("run_id", sa.String(36), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in PLACES),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_numbers_run_id_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name="pk_numbers"),
    )
    _fill(numbers)


def _fill(numbers: sa.Table) -> None:
    """The numbers of runs that are there already."""
    bind = op.get_bind()
    runs = sa.table("runs", sa.column("id"), sa.column("stage"), sa.column("details", sa.Text))
    query = sa.select(runs.c.id, sa.cast(runs.c.details, sa.Text)).where(
        runs.c.stage.in_(("curve", "accuracy")), runs.c.details.is_not(None)
    )
    rows = []
    for run_id, text in bind.execute(query):
        found = _numbers(text)
        if any(value is not None for value in found.values()):
            rows.append({"run_id": run_id, **found})
    if rows:
        op.bulk_insert(numbers, rows)


def _numbers(text: str) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    try:
        details = json.loads(text)
    except ValueError:
        details = None
    for name, path in PLACES.items():
        value = details
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        found[name] = float(value) if known and value is not None else None
    return found
