"""`harness boards`: list, probe and enrol boards; say who holds one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from harness.boards.status import Ending, Status
    from harness.inventory import Board

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

FarmOption = Annotated[Path, typer.Option("--farm", help="The file that describes the boards.")]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", "-t", metavar="TAG", help="Only boards with this tag; again: with all."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
NamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Boards; all without a name.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A board of the farm.")]
DEVICES = Path("devices.yaml")


@app.callback()
def boards() -> None:
    """List, probe and enrol the boards of devices.yaml; say who holds one."""


@app.command("list")
@guard
def list_boards(
    farm: FarmOption = DEVICES, tag: TagOption = None, as_json: JsonOption = False
) -> None:
    """List the boards, who holds each and how its last run ended. Connects to none.

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
            status.holder or "free",
            _brief(status.last),
        )
        for board, status in zip(chosen, found, strict=True)
    ]
    _table(("board", "kind", "address", "tags", "held by", "last run"), rows)


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
def why(name: NameArgument, farm: FarmOption = DEVICES, as_json: JsonOption = False) -> None:
    """Say who holds a board, why and until when, and how its last runs ended.

    \b
    Examples
      harness boards why rk3588-01
      harness boards why rk3588-01 --json
    """
    from harness.boards.status import status_of
    from harness.inventory import load_farm

    status = status_of(load_farm(farm).select([name]))[0]
    if as_json:
        emit_json(status)
        return
    for line in _reasons(status):
        emit(visible(line))


def _reasons(status: Status) -> list[str]:
    if status.holder is None:
        lines = [f"{status.board} is free"]
    else:
        since = status.held_since and status.held_since.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        until = status.held_until and status.held_until.astimezone().strftime("%H:%M:%S")
        lines = [
            f"{status.board} is held by {status.holder}: {status.reason or 'no reason given'}",
            f"  since {since}, until {until} unless renewed",
        ]
    for run in status.left:
        again = "the same command with --resume" if run.stopped else "the same command"
        lines.append(
            f"a {run.stage} run ({run.run_id[:8]}) of a harness that ended may still be on it; "
            f"{again} continues it, another one ends it"
        )
    if status.last is None:
        return lines if status.left else [*lines, "no run of it is known here"]
    lines.append(f"last run: {_sentence(status.last)}")
    error = status.last_error
    if error is not None:
        lines.append(f"last trouble: {_sentence(error)}")
        # A run that found the board busy advises what is being asked right now.
        if error.remedy and "boards why" not in error.remedy:
            lines.append(f"  what to do: {error.remedy}")
    return lines


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


def _brief(ending: Ending | None) -> str:
    return "" if ending is None else f"{ending.stage}: {ending.outcome}, {_when(ending)}"


def _sentence(ending: Ending) -> str:
    model = f" with {ending.model}" if ending.model else ""
    kind = f" ({ending.error_kind})" if ending.error_kind else ""
    return f"{ending.stage}{model} on {_when(ending)}: {ending.outcome}{kind}, {ending.headline}"


def _when(ending: Ending) -> str:
    return ending.at.astimezone().strftime("%Y-%m-%d %H:%M")


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
