"""`harness bisect`: name what is to blame, and look at searches that were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.bisect_options import options
from harness.cli.bisect_race import race
from harness.cli.bisect_revision import revision
from harness.cli.output import emit, emit_json, guard, say, visible

if TYPE_CHECKING:
    from harness.store.models import SearchRow

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
app.command()(options)

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="FILE|URL",
        help="A results file or a postgresql:// URL; results.sqlite of the state folder if absent.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def bisect() -> None:
    """Name what is to blame for a failure on a board, with stated confidence, or say that it cannot
    be named.

    Trials are kept as they are made: a search that was interrupted goes on where it stood when the
    same command is given again.
    """


app.command()(race)
app.command()(revision)


@app.command("list")
@guard
def list_(
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="Only race, options or revision.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many of the newest.")] = 20,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List searches, the newest first.

    \b
    Examples
      harness bisect list
      harness bisect list --kind race --json
    """
    from harness.store import Store
    from harness.store.searches import Searches

    with Store.open(store) as opened:
        rows = Searches(opened).newest(kind, limit)
    if as_json:
        emit_json([_plain(row) for row in rows])
        return
    for row in rows:
        emit(visible(f"{row.id[:8]}  {row.kind:<8}  {row.board:<16}  {_ending(row)}"))
    if not rows:
        say("no search yet: see `harness bisect --help`")


@app.command()
@guard
def show(
    search: Annotated[
        str, typer.Argument(metavar="SEARCH", help='The first characters of its id, or "last".')
    ] = "last",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one search: its outcome, and its trials by what was tried.

    \b
    Examples
      harness bisect show last
      harness bisect show 3f2a --json
    """
    from harness.store import Store
    from harness.store.searches import Searches

    with Store.open(store) as opened:
        searches = Searches(opened)
        row = searches.find(search)
        trials = searches.trials(row.id)
    if as_json:
        emit_json({**_plain(row), "trials": [vars(trial) for trial in trials]})
        return
    emit(visible(f"{row.kind} on {row.board}: {_ending(row)}"))
    for name in row.culprits or ():
        emit(visible(f"  to blame  {name}"))
    if row.confidence is not None:
        emit(f"  confidence  {row.confidence:.3f}")
    counts: dict[str, dict[str, int]] = {}
    for trial in trials:
        of_phase = counts.setdefault(trial.phase, {})
        of_phase[trial.result.value] = of_phase.get(trial.result.value, 0) + 1
    for phase, results in counts.items():
        told = ", ".join(f"{count} {result}" for result, count in sorted(results.items()))
        emit(visible(f"  {phase:<12}  {told}"))


def _ending(row: SearchRow) -> str:
    if row.outcome is None:
        return "without an outcome: the same command goes on with it"
    return f"{row.outcome}: {row.headline}"


def _plain(row: SearchRow) -> dict[str, Any]:
    columns = type(row).__table__.columns.keys()
    return {name: getattr(row, name) for name in columns if name != "owner"}
