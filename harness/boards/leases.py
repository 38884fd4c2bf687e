"""One owner per board: leases in the results store.

A lease has an owner, a reason, a time to live that its holder's heartbeats renew, and a fencing
token that grows with each owner, so that one who was taken for dead and comes back is refused. An
owner that is provably dead (a process of this machine that is gone, or of an earlier boot) is
replaced at once, any other when its time has run out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterator

import sqlalchemy as sa
from sqlalchemy.orm import Session

from harness.errors import BoardError, HarnessError
from harness.store import Store
from harness.store.models import LeaseRow
from harness.store.owner import current_owner, is_dead

DEFAULT_TTL_S = 60.0
_HEARTBEATS_PER_TTL = 4  # three may be missed

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a board. Times are this database's, for people."""

    board: str
    owner: str
    reason: str
    token: int
    acquired_at: datetime.datetime
    heartbeat_at: datetime.datetime
    expires_at: datetime.datetime

    def __str__(self) -> str:
        until = self.expires_at.astimezone().strftime("%H:%M:%S")
        since = self.acquired_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.owner} ({self.reason}) since {since}, until {until} unless renewed"


@dataclasses.dataclass(frozen=True)
class Lease:
    """Held by the caller until released, taken over, or expired."""

    board: str
    owner: str
    reason: str
    token: int
    ttl_s: float
    _leases: Leases = dataclasses.field(repr=False, compare=False)

    def heartbeat(self) -> None:
        """Renews it. Raises BoardError "busy" if somebody else has taken the board over."""
        self._leases.heartbeat(self)

    def release(self) -> None:
        """Gives the board back; a second release, or one after a takeover, does nothing."""
        self._leases.release(self)


class Leases:
    def __init__(self, store: Store) -> None:
        self._database = store.database

    def acquire(
        self,
        board: str,
        owner: str | None = None,
        reason: str = "",
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease:
        """Takes the board, or raises BoardError "busy" with who holds it, why and until when.

        `owner` is `current_owner()` by default; another text, such as a person's name, works too
        and is only ever replaced after its TTL. An owner that holds the board already is refused
        as any other: two threads of one process must not share it either.
        """
        if ttl_s <= 0:
            raise ValueError(f"a lease needs a time to live, found {ttl_s} s")
        holder = owner or current_owner()
        with self._database.writing() as session:
            row = session.get(LeaseRow, board)
            if row is not None and self._is_held(session, row):
                raise _busy(_holder(row))
            if row is None:
                row = LeaseRow(board=board, token=0)
                session.add(row)
            elif row.released_at is None:
                log.warning("board %s: taking over the lease of %s", board, row.owner)
            row.token += 1
            row.owner, row.reason, row.ttl_s = holder, reason, ttl_s
            row.released_at = None
            row.acquired_at = datetime.datetime.now(datetime.UTC)
            self._renew(session, row)
            return Lease(board, holder, reason, row.token, ttl_s, self)

    def heartbeat(self, lease: Lease) -> None:
        """See Lease.heartbeat. A lease that ran out but was not taken over is renewed."""
        with self._database.writing() as session:
            row = session.get(LeaseRow, lease.board)
            if row is None or row.token != lease.token or row.released_at is not None:
                raise _lost(lease, None if row is None else row)
            self._renew(session, row)

    def release(self, lease: Lease) -> None:
        """See Lease.release."""
        with self._database.writing() as session:
            session.execute(
                sa.update(LeaseRow)
                .where(
                    LeaseRow.board == lease.board,
                    LeaseRow.token == lease.token,
                    LeaseRow.released_at.is_(None),
                )
                .values(released_at=datetime.datetime.now(datetime.UTC))
            )

    def holder(self, board: str) -> Holder | None:
        """Who holds the board now; None if nobody does, or only a dead or expired owner."""
        with self._database.reading() as session:
            row = session.get(LeaseRow, board)
            return _holder(row) if row is not None and self._is_held(session, row) else None

    def held(self) -> list[Holder]:
        """All leases in force, by board."""
        with self._database.reading() as session:
            rows = session.scalars(sa.select(LeaseRow).order_by(LeaseRow.board)).all()
            return [_holder(row) for row in rows if self._is_held(session, row)]

    def _is_held(self, session: Session, row: LeaseRow) -> bool:
        if row.released_at is not None or is_dead(row.owner):
            return False
        clock, now = self._database.clock(session)
        if row.clock == clock:
            return now < row.expires_s
        # Its clock died with an earlier boot, so only the wall clock is left to compare.
        return datetime.datetime.now(datetime.UTC) < row.expires_at

    def _renew(self, session: Session, row: LeaseRow) -> None:
        row.clock, now = self._database.clock(session)
        row.expires_s = now + row.ttl_s
        row.heartbeat_at = datetime.datetime.now(datetime.UTC)
        row.expires_at = row.heartbeat_at + datetime.timedelta(seconds=row.ttl_s)


@contextlib.contextmanager
def lease_guard(
    leases: Leases,
    board: str,
    reason: str,
    *,
    owner: str | None = None,
    ttl_s: float = DEFAULT_TTL_S,
    on_lost: Callable[[HarnessError], None] | None = None,
) -> Iterator[Lease]:
    """Holds the board for a block, renewing the lease from a thread; released at the end.

    If the board is taken over meanwhile (this process was suspended for longer than the TTL), or
    the store cannot be written for a whole TTL, `on_lost` is called once, from the thread: stop
    touching the board. The block's own end then raises that error, unless it raises another.
    """
    lease = leases.acquire(board, owner, reason, ttl_s)
    stop = threading.Event()
    lost: list[HarnessError] = []

    def beat() -> None:
        renewed = time.monotonic()
        while not stop.wait(ttl_s / _HEARTBEATS_PER_TTL):
            try:
                lease.heartbeat()
                renewed = time.monotonic()
                continue
            except BoardError as error:
                lost.append(error)
            except HarnessError as error:
                log.warning("board %s: the lease was not renewed: %s", board, error)
                if time.monotonic() - renewed < ttl_s:
                    continue
                lost.append(error)
            if on_lost is not None:
                on_lost(lost[0])
            return

    thread = threading.Thread(target=beat, name=f"lease-{board}", daemon=True)
    thread.start()
    try:
        yield lease
        if lost:
            raise lost[0]
    finally:
        stop.set()
        thread.join()
        try:
            lease.release()
        except HarnessError as error:  # must not hide what the block raised; the TTL ends it
            log.warning("board %s: the lease was not released: %s", board, error)


def _holder(row: LeaseRow) -> Holder:
    return Holder(
        row.board,
        row.owner,
        row.reason,
        row.token,
        row.acquired_at,
        row.heartbeat_at,
        row.expires_at,
    )


def _busy(holder: Holder) -> BoardError:
    return BoardError(
        holder.board,
        "busy",
        f"held by {holder}",
        remedy=f"wait for it, or see `harness boards why {holder.board}`",
    )


def _lost(lease: Lease, row: LeaseRow | None) -> BoardError:
    if row is None or (row.released_at is not None and row.token == lease.token):
        found = "the lease was released meanwhile"
    else:
        found = f"the lease was taken over by {_holder(row)}"
    return BoardError(
        lease.board,
        "busy",
        found,
        expected=f"token {lease.token} of {lease.owner}",
        remedy="run the command again",
    )
