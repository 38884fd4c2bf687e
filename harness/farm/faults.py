"""Faults that are planted on purpose (ENGINE_FAULT), and the models that they fit.

The tiny stage's model has fewer layers than the one that is brought up: a fault in an op that a
stage's model has not is left out there. One that the model itself has not is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from harness.errors import HarnessError

if TYPE_CHECKING:
    from engine.architectures import Hyperparameters
    from engine.program.ops import Program
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board

VARIABLE = "ENGINE_FAULT"


def environment_for(environment: Mapping[str, str], model: PreparedModel) -> dict[str, str]:
    """A board's environment with the faults alone that the model has ops for."""
    found = dict(environment)
    text = found.pop(VARIABLE, "")
    known = _ids(model.hyperparameters) if text else set()
    kept = [piece for piece in _pieces(text) if _ops(piece) <= known]
    if kept:
        found[VARIABLE] = ";".join(kept)
    return found


def require_ops(boards: Iterable[Board], model: PreparedModel) -> None:
    """Raises HarnessError for a fault in an op that the model has not, naming near ones."""
    for board in boards:
        pieces = _pieces(board.environment.get(VARIABLE, ""))
        known = _ids(model.hyperparameters) if pieces else set()
        for piece in pieces:
            for op in sorted(_ops(piece) - known):
                near = _programs(model.hyperparameters)[-1].near(op).removeprefix("; near: ")
                raise HarnessError(
                    f"ENGINE_FAULT: {model.name} has no op {op!r}",
                    where=f"environment of board {board.name}",
                    expected=f"an op of it, such as {near}" if near else "an op of it",
                    remedy="correct it in devices.yaml or in --board-env",
                )


def _ops(piece: str) -> set[str]:
    """The ids that a fault names; one that names none names the op ""."""
    from engine.units.faulty import ops_of  # numpy, only where a fault is asked for

    return ops_of(piece) or {""}


def _pieces(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(";") if piece.strip()]


def _ids(hp: Hyperparameters) -> set[str]:
    return {op.id for program in _programs(hp) for op in program.ops}


def _programs(hp: Hyperparameters) -> tuple[Program, Program]:
    """With every op alone, and fused."""
    from engine.architectures import family_named  # numpy, only where a fault is asked for
    from engine.program.passes import apply

    plain = family_named(hp.architecture).program(hp)
    return plain, apply(plain)
