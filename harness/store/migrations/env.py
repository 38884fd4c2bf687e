"""Called by alembic. The connection and its transaction come from harness.store.database."""

from __future__ import annotations

from alembic import context

from harness.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter a column in place
    # All revisions in one transaction, so that an interrupted upgrade leaves the old schema.
    transactional_ddl=True,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
