"""Leases on boards, with fencing tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "leases",
        sa.Column("board", sa.String(200), nullable=False),
        sa.Column("token", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("ttl_s", sa.Double(), nullable=False),
        sa.Column("clock", sa.String(100), nullable=False),
        sa.Column("expires_s", sa.Double(), nullable=False),
        sa.Column("acquired_at", time, nullable=False),
        sa.Column("heartbeat_at", time, nullable=False),
        sa.Column("expires_at", time, nullable=False),
        sa.Column("released_at", time),
        sa.PrimaryKeyConstraint("board", name="pk_leases"),
    )
