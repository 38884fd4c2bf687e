"""Suspects of nights and what became of them; which engine a campaign ran."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


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
