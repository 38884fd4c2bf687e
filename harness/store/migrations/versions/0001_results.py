"""Boards, models, campaigns, runs, their checks and their raw series."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "boards",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("host", sa.String(300)),
        sa.Column("serial", sa.String(200)),
        sa.Column("virtual", sa.Boolean()),
        sa.Column("tags", sa.JSON()),
        sa.Column("budget", sa.JSON()),
        sa.Column("facts", sa.JSON()),
        sa.Column("boot_id", sa.String(64)),
        sa.Column("last_seen", time),
        sa.PrimaryKeyConstraint("name", name="pk_boards"),
    )
    op.create_table(
        "models",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("name", sa.String(300)),
        sa.Column("scheme", sa.String(100)),
        sa.Column("source_sha256", sa.String(64)),
        sa.Column("hyperparameters", sa.JSON()),
        sa.Column("notes", sa.JSON()),
        sa.Column("bytes", sa.BigInteger()),
        sa.PrimaryKeyConstraint("hash", name="pk_models"),
    )
    op.create_table(
        "campaigns",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(50), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("options_hash", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(300), nullable=False),
        sa.Column("outcome", sa.String(20)),
        sa.Column("started_at", time, nullable=False),
        sa.Column("finished_at", time),
        sa.PrimaryKeyConstraint("id", name="pk_campaigns"),
    )
    op.create_index("ix_campaigns_kind_options_hash", "campaigns", ["kind", "options_hash"])
    op.create_table(
        "runs",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("campaign_id", sa.String(36), nullable=False),
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("model_hash", sa.String(64)),
        sa.Column("model_name", sa.String(300)),
        sa.Column("scheme", sa.String(100)),
        sa.Column("quant_hash", sa.String(64)),
        sa.Column("engine_hash", sa.String(64)),
        sa.Column("toolchain", sa.String(200)),
        sa.Column("power_mode", sa.String(100)),
        sa.Column("stage", sa.String(50), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("boot_id", sa.String(64)),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("outcome", sa.String(20)),
        sa.Column("headline", sa.Text()),
        sa.Column("culprit", sa.String(200)),
        sa.Column("remedy", sa.Text()),
        sa.Column("details", sa.JSON()),
        sa.Column("error_kind", sa.String(50)),
        sa.Column("started_at", time, nullable=False),
        sa.Column("finished_at", time),
        sa.Column("seconds", sa.Double()),
        sa.Column("remote_spool", sa.Text()),
        sa.Column("deployment", sa.JSON()),
        sa.Column("facts", sa.JSON()),
        sa.Column("clocks", sa.Text()),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["campaigns.id"], name="fk_runs_campaign_id_campaigns"
        ),
        sa.ForeignKeyConstraint(["board"], ["boards.name"], name="fk_runs_board_boards"),
        sa.ForeignKeyConstraint(["model_hash"], ["models.hash"], name="fk_runs_model_hash_models"),
    )
    op.create_index("ix_runs_campaign_id_board", "runs", ["campaign_id", "board"])
    op.create_index(
        "ix_runs_board_model_hash_stage_started_at",
        "runs",
        ["board", "model_hash", "stage", "started_at"],
    )
    op.create_table(
        "checks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("outcome", sa.String(20), nullable=False),
        sa.Column("measured", sa.Double()),
        sa.Column("measured_text", sa.Text()),
        sa.Column("limit_value", sa.Double()),
        sa.Column("limit_text", sa.Text()),
        sa.Column("unit", sa.String(50), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_checks"),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_checks_run_id_runs", ondelete="CASCADE"
        ),
        sa.UniqueConstraint("run_id", "position", name="uq_checks_run_id_position"),
    )
    op.create_index("ix_checks_name", "checks", ["name"])
    op.create_table(
        "series",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_series"),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_series_run_id_runs", ondelete="CASCADE"
        ),
        sa.UniqueConstraint("run_id", "name", name="uq_series_run_id_name"),
    )
