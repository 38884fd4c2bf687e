"""`harness boards`: list, probe and enrol boards; the rest of it is in `care.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import care
from harness.cli.board_options import (
    DEVICES,
    FarmOption,
    JsonOption,
    NameArgument,
    NamesArgument,
    TagOption,
)
from harness.cli.output import (
    EXIT_GOOD,
    EXIT_TROUBLE,
    complain,
    emit,
    emit_json,
    guard,
    say,
    visible,
)
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.boards.status import Status
    from harness.inventory import Board

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
for _command in (care.why, care.health, care.quarantine, care.release, care.power):
    app.command()(_command)


@app.callback()
def boards() -> None:
    """List, probe and enrol the boards of devices.yaml; say how one is, and act on it."""


@app.command("list")
@guard
def list_boards(
    farm: FarmOption = DEVICES, tag: TagOption = None, as_json: JsonOption = False
) -> None:
    """List the boards, who holds each or why it is set aside, and how its last run ended. Connects
    to none.

    \b
    Examples
      harness boards list
      harness boards list --tag rk3588 --json
    """
    from harness.boards.status import status_of
    from harness.inventory import load_farm

    chosen = load_farm(farm).select((), tag or ())
    found = status_of(chosen)
    if as_json:
        emit_json([_listed(board, status) for board, status in zip(chosen, found, strict=True)])
        return
    rows = [
        (
            status.board,
            "virtual" if board.virtual is not None else "ssh",
            status.address,
            ", ".join(board.tags),
            care.standing(status),
            care.brief(status.last),
        )
        for board, status in zip(chosen, found, strict=True)
    ]
    _table(("board", "kind", "address", "tags", "state", "last run"), rows)


def _listed(board: Board, status: Status) -> dict[str, Any]:
    return {
        **status.model_dump(mode="json"),
        "virtual": board.virtual is not None,
        "budget": board.budget.model_dump(exclude_none=True),
    }


@app.command()
@guard
def probe(
    names: NamesArgument = None,
    farm: FarmOption = DEVICES,
    tag: TagOption = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For each board, connecting included.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Ask boards what they are: cores, memory, Python, folders, clock. Changes nothing on them.

    Boards are asked side by side; one that cannot be reached does not keep the others. The exit
    code is 2 when one of them gave no answer.

    \b
    Examples
      harness boards probe
      harness boards probe rk3588-01 pi4-01
      harness boards probe --tag nightly --json > facts.json
    """
    from harness.inventory import load_farm

    chosen = load_farm(farm).select(names or (), tag or ())
    answers = _ask(chosen, timeout)
    if as_json:
        emit_json(
            {
                name: {"error": str(answer), "kind": getattr(answer, "kind", "")}
                if isinstance(answer, HarnessError)
                else answer.model_dump(mode="json")
                for name, answer in answers.items()
            }
        )
    else:
        for name, answer in answers.items():
            if not isinstance(answer, HarnessError):
                _show_facts(name, answer)
    errors = [answer for answer in answers.values() if isinstance(answer, HarnessError)]
    for error in errors:
        complain(str(error))
    raise typer.Exit(EXIT_TROUBLE if errors else EXIT_GOOD)


def _ask(boards: Sequence[Board], seconds: float) -> dict[str, Facts | HarnessError]:
    """Facts or the error of each board, in their order."""
    from concurrent.futures import ThreadPoolExecutor

    from harness.boards.probe import probe as ask
    from harness.connect import open_session
    from harness.deadline import Deadline

    def one(board: Board) -> Facts | HarnessError:
        deadline = Deadline.after(seconds, f"probe of {board.name}")
        try:
            with open_session(board, deadline=deadline) as session:
                return ask(session, deadline=deadline)
        except HarnessError as error:
            return error

    with ThreadPoolExecutor(max(1, min(32, len(boards)))) as pool:
        return dict(zip((board.name for board in boards), pool.map(one, boards), strict=True))


def _show_facts(name: str, facts: Facts) -> None:
    python = facts.python
    limit = f" (limited by {facts.memory_limit})" if facts.memory_limit else ""
    rows = [
        ("system", f"{facts.machine}, {facts.kernel}, {facts.os}, {facts.libc or 'unknown libc'}"),
        ("model", " ".join(filter(None, (facts.model, facts.serial and f"serial {facts.serial}")))),
        ("cores", _cores(facts)),
        ("memory", f"{facts.memory_mb} MiB{limit}, {facts.available_mb} MiB available"),
        (
            "python",
            f"{python.path}, {python.version}" if python else f"none: {facts.why_no_python()}",
        ),
        *(
            (
                "folder",
                f"{folder.path}: "
                + (f"{folder.free_mb} MiB free" if folder.usable else folder.reason),
            )
            for folder in facts.folders
        ),
        ("clock", _offset(facts.clock_offset_s)),
        ("governor", facts.governor),
        (
            "heat",
            ", ".join(
                f"{zone.kind or zone.name} {zone.celsius:.0f} °C"
                for zone in facts.thermal_zones
                if zone.celsius is not None
            ),
        ),
    ]
    _table((name, ""), [row for row in rows if row[1]])


def _cores(facts: Facts) -> str:
    kinds: dict[str, list[int]] = {}
    for cpu in facts.allowed_cpus:
        clock = f" {cpu.max_mhz} MHz" if cpu.max_mhz else ""
        kinds.setdefault(f"{cpu.part or 'unknown'}{clock}", []).append(cpu.number)
    text = "; ".join(f"{len(numbers)} × {kind}" for kind, numbers in kinds.items())
    hidden = len(facts.cpus) - len(facts.allowed_cpus)
    return text + (f"; {hidden} more are not ours to use" if hidden else "")


def _offset(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if abs(seconds) < 2:
        return "as here"
    return f"{abs(seconds):.0f} s {'behind' if seconds < 0 else 'ahead'}"


@app.command()
@guard
def enrol(
    name: NameArgument,
    farm: FarmOption = DEVICES,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Pin the key that the board shows, unasked.")
    ] = False,
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="SHA256:...", help="Pin only this key, read on the board's console."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For the answer.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Pin a board's host key in devices.yaml, after showing it. Comments and layout stay.

    Compare the fingerprint with the board's own: on its console,
    `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`.

    \b
    Examples
      harness boards enrol rk3588-01
      harness boards enrol rk3588-01 --fingerprint SHA256:kZ39fmPkJoE...
      harness boards enrol rk3588-01 --yes
    """
    from harness.boards.enrol import pin_host_key
    from harness.connect import scan_host_key
    from harness.deadline import Deadline
    from harness.inventory import load_farm

    board = load_farm(farm).select([name])[0]
    if board.virtual is not None:
        raise HarnessError(
            "it is virtual, its key is made and checked by the harness itself",
            where=f"board {name}",
            expected="a board with 'host'",
        )
    wanted = None if fingerprint is None else _fingerprint(fingerprint)
    limit = Deadline.after(timeout, "host key")
    shown = scan_host_key(board.host, board.port, limit, jump=board.jump, board=name)
    known = board.host_key == shown
    if not known:
        _confirm(board, shown, yes, wanted, farm)
        pin_host_key(farm, name, shown)
    if as_json:
        emit_json(
            {"board": name, "host_key": shown, "before": board.host_key, "changed": not known}
        )
    else:
        emit(f"{name}: {shown} {'was pinned already' if known else f'is pinned in {farm}'}")


def _fingerprint(written: str) -> str:
    """What --fingerprint names. Raises HarnessError for anything that is no fingerprint."""
    from harness.inventory.scalars import Refused, parse_fingerprint

    text = written.strip()
    try:
        return parse_fingerprint(text if text.startswith("SHA256:") else f"SHA256:{text}")
    except Refused as error:
        raise HarnessError(
            f"--fingerprint {written!r}",
            expected=error.expected,
            remedy="copy what `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` prints on its "
            "console",
        ) from error


def _confirm(board: Board, shown: str, yes: bool, wanted: str | None, farm: Path) -> None:
    """Raises HarnessError unless the user wants `shown` pinned."""
    if wanted is not None:
        if wanted != shown:
            raise HarnessError(
                f"it shows {shown}",
                where=f"board {board.name}",
                expected=wanted,
                remedy="read the fingerprint again on its console; if that is right, somebody may "
                "sit in between",
            )
        return
    say(f"{board.name} at {board.host}:{board.port} shows the host key")
    say(f"  {shown}")
    if board.host_key is not None:
        say(f"{farm} pins another one")
        say(f"  {board.host_key}")
    if yes:
        return
    if not sys.stdin.isatty():
        raise HarnessError(
            "nobody is here to confirm the host key",
            where=f"board {board.name}",
            expected="a terminal, --fingerprint or --yes",
            remedy=f"compare it with the board's own, then add --fingerprint {shown}",
        )
    if not typer.confirm("Is it the board's own, and shall it be pinned?", err=True):
        raise HarnessError("not pinned", where=f"board {board.name}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On stdout. Text of boards is shown as it stands, its control characters made visible."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=any(head))
    for title in head:
        table.add_column(Text(title))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:  # lines of a file or a pipe are not cut
        console = Console(highlight=False, emoji=False, width=200)
    console.print(table)
