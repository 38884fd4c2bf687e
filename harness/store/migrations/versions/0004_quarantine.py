"""Boards in quarantine, and what was done about boards."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "quarantines",
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("set_by", sa.String(300), nullable=False),
        sa.Column("automatic", sa.Boolean(), nullable=False),
        sa.Column("since", time, nullable=False),
        sa.PrimaryKeyConstraint("board", name="pk_quarantines"),
    )
    op.create_table(
        "board_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("at", time, nullable=False),
        sa.Column("kind", sa.String(50), nullable=False),
        sa.Column("good", sa.Boolean(), nullable=False),
        sa.Column("told", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_board_events"),
    )
    op.create_index("ix_board_events_board_kind", "board_events", ["board", "kind"])
