"""What a class says of a case."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from harness.triage.case import Case


@dataclasses.dataclass(frozen=True)
class Finding:
    """One crash, explained.

    `name` is the class that found it. `headline` says in a few words what happened, `sentence` the
    same with its evidence. `kind` is the mnemonic or the kind of fault, `frames` the innermost own
    frames, in a form that does not change from board to board. `facts` are (what, found) lines.
    """

    name: str
    headline: str
    sentence: str
    remedy: str
    signal: str = ""
    code: str = ""
    op: str = ""
    frames: tuple[str, ...] = ()
    kind: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    finding: bool = True  # about the product; False: about the board, or a board too slow


@runtime_checkable
class Class(Protocol):
    """A module of `harness/triage/classes/`. ORDER: the smallest is asked first."""

    NAME: str
    ORDER: int
    TITLE: str

    def recognise(self, case: Case) -> Finding | None:
        """None when the case is of another class."""
        ...
