"""`harness report`: is a board with a model accepted, line by line? As a file to mail, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import EXIT_FINDING, EXIT_GOOD, emit, emit_json, guard, say, visible
from harness.cli.results import open_existing
from harness.errors import HarnessError

if TYPE_CHECKING:
    from dashboards.acceptance import Acceptance
    from dashboards.data import Case, Results

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@guard
def report(
    board: Annotated[
        str, typer.Option("--board", "-b", metavar="NAME", help="The board to report on.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="NAME", help="Its model, if it ran several; a part is enough."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.html", help="Write the report there, as one file."),
    ] = None,
    farm: Annotated[
        Path | None,
        typer.Option(
            "--farm", metavar="FILE", help="Take the targets from this file, not the last run's."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="FILE|URL",
            help="Results database, or a PostgreSQL URL; results.sqlite of the state folder.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """The acceptance report of a board with a model: targets and baseline, compression, runtime
    tuning, integration and stress, rollout. Each line has its target, what was measured, a verdict
    and the run that shows it. What was not measured is not accepted.

    \b
    Examples
      harness report --board rk3588-01
      harness report --board rk3588-01 --model SmolLM2 --out report.html
      harness report --board rk3588-01 --farm devices.yaml --json > report.json

    Exit codes: 0 every line is accepted, 1 not every line, 2 wrong use or infrastructure.
    """
    from dashboards.acceptance import accept
    from dashboards.acceptance import as_json as told
    from dashboards.pages import report as pages
    from dashboards.pages.base import Places
    from dashboards.reading import fill, outline, whole_runs
    from dashboards.site import make_environment, render

    with open_existing(store) as opened:
        results = outline(opened)
        case = choose(results, board, model)
        case = fill(case, whole_runs(opened, {run.id for run in case.runs.values()}))
    found = accept(case, _budget(farm, board), results.crashes)
    if out is not None:
        places = Places(results)
        _write(out, render(make_environment(), pages.page(case, places, found), places))
    if as_json:
        emit_json(told(case, found))
    elif out is not None:
        emit(str(out))
        say(found.words)
    else:
        _show(case, found)
    raise typer.Exit(EXIT_GOOD if found.accepted else EXIT_FINDING)


def choose(results: Results, board: str, model: str | None) -> Case:
    """The case of a board whose model is called so, or holds the text; the newest scheme of it."""
    names = sorted({case.board.name for case in results.cases})
    mine = [case for case in results.cases if case.board.name == board]
    if not mine:
        raise HarnessError(
            f"no results of the board {board!r}",
            expected=f"one of: {', '.join(names)}" if names else "a board that was tested",
            remedy=f"run `harness bringup --board {board}`",
        )
    wanted = [case for case in mine if model is None or _named(case, model)]
    exact = [case for case in wanted if model in (case.model, case.model_hash)]
    wanted = exact or wanted
    models = sorted({case.model or "no model" for case in wanted or mine})
    if not wanted:
        raise HarnessError(
            f"no results of the model {model!r} on the board {board!r}",
            expected=f"one of: {', '.join(models)}",
        )
    if len(models) > 1:
        raise HarnessError(
            f"the board {board!r} ran {len(models)} models",
            expected=f"--model with one of: {', '.join(models)}",
        )
    return max(wanted, key=lambda case: case.newest.started_at)


def _named(case: Case, model: str) -> bool:
    return model.lower() in f"{case.model} {case.scheme}".lower() or (
        len(model) >= 8 and case.model_hash.startswith(model)
    )


def _budget(farm: Path | None, board: str) -> Mapping[str, Any] | None:
    """The board's targets as a file has them today; None for those that its last run had."""
    if farm is None:
        return None
    from harness.inventory import load_farm

    boards = load_farm(farm).boards
    if board not in boards:
        raise HarnessError(
            f"no board {board!r}", where=str(farm), expected=f"one of: {', '.join(boards)}"
        )
    return boards[board].budget.model_dump()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HarnessError(
            f"cannot write the report: {error.strerror}",
            where=str(path),
            remedy="name another file with --out",
        ) from error


def _plain(text: str) -> str:
    """Thin spaces between thousands are for pages."""
    return visible(text.replace("\u202f", " "))


def _show(case: Case, found: Acceptance) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dashboards.acceptance import FAIL, INVALID, MISSING, PASS, WORDS

    colours = {PASS: "green", FAIL: "red", INVALID: "magenta", MISSING: "yellow"}
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=160)
    table = Table(title=Text(visible(f"{case.board.name}, {case.model}")), title_justify="left")
    for column in ("line", "target", "measured", "verdict", "run"):
        table.add_column(column, overflow="fold")
    for step in found.steps:
        table.add_section()
        table.add_row(Text(step.name, style="bold"), "", "", "", "")
        for line in step.lines:
            table.add_row(
                Text(line.name),
                Text(_plain(line.target)),
                Text(_plain(line.measured) or "–"),
                Text(WORDS[line.verdict], style=colours[line.verdict]),
                Text(line.run[:8]),
            )
    console.print(table)
    console.print(Text(found.words, style="green" if found.accepted else "bold"))
