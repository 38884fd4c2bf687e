"""Searches for what is to blame, and their trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "searches",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(50), nullable=False),
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("command", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("options_hash", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(300), nullable=False),
        sa.Column("outcome", sa.String(50), nullable=True),
        sa.Column("headline", sa.Text(), nullable=True),
        sa.Column("culprits", sa.JSON(), nullable=True),
        sa.Column("confidence", sa.Double(), nullable=True),
        sa.Column("details", sa.JSON(), nullable=True),
        sa.Column("started_at", time, nullable=False),
        sa.Column("finished_at", time, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_searches"),
    )
    op.create_index("ix_searches_kind_options_hash", "searches", ["kind", "options_hash"])
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("search_id", sa.String(36), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(50), nullable=False),
        sa.Column("subject", sa.JSON(), nullable=False),
        sa.Column("result", sa.String(20), nullable=False),
        sa.Column("signature", sa.Text(), nullable=True),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("run", sa.String(100), nullable=True),
        sa.Column("evidence", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(
            ["search_id"],
            ["searches.id"],
            name="fk_trials_search_id_searches",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.UniqueConstraint("search_id", "position", name="uq_trials_search_id_position"),
    )
