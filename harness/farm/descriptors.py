"""Open files for a large farm: many systems allow a process 1024, unless it asks for more."""

from __future__ import annotations

import logging
import resource

FOR_A_BOARD = 16  # its socket, channels with two pipes each, spool and arrays that are written
FOR_THE_REST = 256

log = logging.getLogger("harness.farm")


def make_room(boards: int) -> None:
    """Raises this process's soft limit of open files to what `boards` boards need, as far as the
    hard one allows. Says so where it does not."""
    needed = FOR_THE_REST + FOR_A_BOARD * boards
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "%d boards need up to %d open files, this process may have %d; raise the hard limit "
            "(ulimit -Hn) or drive fewer boards at once",
            boards,
            needed,
            allowed,
        )
