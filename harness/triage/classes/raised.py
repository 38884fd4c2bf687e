"""The engine told an error of its own and ended, or ended with a code and no word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.finding import Finding

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "error", 80, "Error of the engine"
# Errors that say the deployment or the board is at fault, not the engine's arithmetic.
INFRASTRUCTURE = (
    "ImportError",
    "ModuleNotFoundError",
    "PackageError",
    "FileNotFoundError",
    "PermissionError",
    "OSError",
)
REFUSED = "OverBudget"  # before anything ran: no crash


def recognise(case: Case) -> Finding | None:
    kind = str(case.error.get("kind") or "")
    if kind == REFUSED:
        return None
    if kind:
        message = str(case.error.get("message", ""))
        raised = case.error.get("raised_at")
        frames = [str(item) for item in raised] if isinstance(raised, (list, tuple)) else []
        at = f"; raised at {'; '.join(frames)}" if frames else ""
        return Finding(
            NAME,
            headline=f"the engine stopped: {kind}: {message}",
            sentence=f"{kind}: {message}",
            remedy=f"read the engine's log{at}",
            op=case.op,
            frames=tuple(reversed(frames))[:3],
            kind=kind,
            finding=kind not in INFRASTRUCTURE,
        )
    code = case.exit.get("code")
    if case.own_exit and code:
        return Finding(
            NAME,
            headline=f"the engine ended with exit code {code} and reported no error",
            sentence=f"exit code {code}, and no error was told",
            remedy="read engine.*.log in the run's folder: it ends with the Python frames",
            frames=case.python_frames(),
            kind=f"exit code {code}",
        )
    return None
