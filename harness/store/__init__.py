"""Results: SQLAlchemy models, migrations, and queries that return pandas frames."""

from __future__ import annotations

from harness.store.frames import Frames
from harness.store.models import (
    BoardRow,
    CampaignRow,
    CheckRow,
    LeaseRow,
    ModelRow,
    RunRow,
    SeriesRow,
)
from harness.store.owner import current_owner, is_dead
from harness.store.store import Store, options_hash

__all__ = [
    "BoardRow",
    "CampaignRow",
    "CheckRow",
    "Frames",
    "LeaseRow",
    "ModelRow",
    "RunRow",
    "SeriesRow",
    "Store",
    "current_owner",
    "is_dead",
    "options_hash",
]
