"""Asks a board what it is, in one round trip."""

from __future__ import annotations

import logging
import secrets
import shlex
import time
from collections.abc import Sequence
from importlib import resources
from typing import Protocol

from harness.boards.facts import Facts
from harness.boards.parse import SIZE_LIMIT, ProbeError, parse_probe
from harness.deadline import Deadline
from harness.errors import BoardError
from harness.inventory import Board

log = logging.getLogger(__name__)


class Result(Protocol):
    """What a session's `run` returns, as far as it is needed here."""

    @property
    def stdout(self) -> bytes: ...
    @property
    def noise(self) -> bytes: ...


class Session(Protocol):
    """The part of `harness.connect.BoardSession` that a probe uses."""

    @property
    def board(self) -> Board: ...
    def run(self, command: str, *, deadline: Deadline, limit_bytes: int) -> Result: ...


def probe_script(nonce: str, python: str | None, folders: Sequence[str]) -> str:
    """The text for `sh`. `nonce` (hex) marks the sections; `python` is tried first."""
    text = resources.files("harness.boards").joinpath("probe.sh").read_text(encoding="utf-8")
    head = f"N={shlex.quote(nonce)}; P={shlex.quote(python or '')}; set -- {shlex.join(folders)}"
    return f"# probe\n{head}\n{text}"


def probe(session: Session, *, deadline: Deadline) -> Facts:
    """The board's facts, its clock compared with ours.

    Raises BoardError: what `run` raises, or `protocol` when the output is not that of the probe.
    """
    board = session.board
    script = probe_script(secrets.token_hex(8), board.python, board.folders)
    before = time.time()
    result = session.run(script, deadline=deadline, limit_bytes=SIZE_LIMIT)
    after = time.time()
    try:
        facts = parse_probe(result.stdout)
    except ProbeError as error:
        raise BoardError(
            board.name,
            "protocol",
            str(error),
            expected="the output of a POSIX shell",
            remedy="log in and look whether `sh` works there",
        ) from error
    # Both clocks are read twice and averaged, so that the time the probe takes cancels out.
    offset = None if facts.clock_s is None else round(facts.clock_s - (before + after) / 2, 1)
    if offset is not None and abs(offset) > 60:
        log.info("board %s: its clock is off by %.0f s", board.name, offset)
    return facts.model_copy(update={"clock_offset_s": offset, "noise": bool(result.noise.strip())})
