"""Crashes, one row for each run that had one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "crashes",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("stage", sa.String(50), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("name", sa.String(50), nullable=False),
        sa.Column("hash", sa.String(16), nullable=False),
        sa.Column("finer", sa.String(16), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
        sa.Column("op", sa.String(200), nullable=True),
        sa.Column("headline", sa.Text(), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("remedy", sa.Text(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("reproducer", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name="fk_crashes_run_id_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", name="pk_crashes"),
    )
    op.create_index("ix_crashes_hash", "crashes", ["hash"])
