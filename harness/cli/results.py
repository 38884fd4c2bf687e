"""`harness results`: look at stored results, and hand them to other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import ledger
from harness.cli.output import emit_json, guard, say, visible
from harness.errors import HarnessError
from harness.verdicts import Outcome, noted

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import CheckRow, RunRow, Store

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

CampaignOption = Annotated[
    str | None,
    typer.Option(
        "--campaign",
        "-c",
        metavar="ID",
        help='Only this campaign: the first characters of its id, or "last".',
    ),
]
BoardOption = Annotated[
    str | None, typer.Option("--board", "-b", metavar="NAME", help="Only this board.")
]
StageOption = Annotated[
    str | None,
    typer.Option("--stage", "-s", metavar="NAME", help="Only this stage, such as curve."),
]
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
def results() -> None:
    """Look at stored results, and hand them to other tools."""


@app.command()
@guard
def show(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run: the first characters of its id.")
    ] = None,
    campaign: CampaignOption = None,
    board: BoardOption = None,
    stage: StageOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every run, not only the newest verdicts.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the newest verdict of each board, model and stage; or one run with all its checks.

    With --campaign or --all every run is listed, unfinished ones too, the oldest first.

    \b
    Examples
      harness results show
      harness results show --board rk3588-01 --stage curve --all
      harness results show --campaign last --json
      harness results show 3f2a91bc             one run: checks, evidence, what to do
    """
    with open_existing(store) as opened:
        if run is not None:
            if campaign or board or stage or everything:
                raise HarnessError(
                    "found a run and a filter", expected="one of them: a run is shown as a whole"
                )
            row = opened.run(opened.find_run(run))
            if as_json:
                emit_json(_whole_run(row))
            else:
                _show_run(row)
            return
        columns = () if as_json else LISTED
        frame = _chosen(opened, campaign, board, stage, everything, columns)
        if as_json:
            from harness.store.export import records

            emit_json(records(frame))
        else:
            _show_runs(frame)


@app.command()
@guard
def export(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to: its ending is the form; - is stdout.")
    ],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="csv|json|parquet", help="If the ending does not say it."),
    ] = None,
    table: Annotated[
        str, typer.Option("--table", metavar="runs|checks", help="Verdicts, or single checks.")
    ] = "runs",
    campaign: CampaignOption = None,
    board: BoardOption = None,
    stage: StageOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write stored results to a file or to stdout: one row per run, or per check.

    CSV and Parquet hold nested values (parameters, details) as JSON texts; Parquet needs pyarrow.

    \b
    Examples
      harness results export runs.csv
      harness results export checks.parquet --table checks
      harness results export last.json --campaign last --board rk3588-01
      harness results export - --format csv | column -s, -t
    """
    on_stdout = str(path) == "-"
    if on_stdout and as_json:
        raise HarnessError(
            "--json and the results both want stdout",
            expected="one of them",
            remedy="name a file, or use --format json without --json",
        )
    with open_existing(store) as opened:
        rows = opened.export(
            path,
            form,
            table=table,
            campaign=None if campaign is None else opened.find_campaign(campaign),
            board=board,
            stage=stage,
        )
    if as_json:
        emit_json({"path": str(path.absolute()), "table": table, "rows": rows})
    else:
        unit = table if rows != 1 else table.removesuffix("s")
        say(f"{rows} {unit} {'on stdout' if on_stdout else f'in {path}'}")


app.command("event")(ledger.event)
app.command("alerts")(ledger.alerts)


def open_existing(target: str | None) -> Store:
    """The store, which must exist: looking at results makes no file."""
    from harness.paths import existing_state_dir
    from harness.store import Store

    if target is not None and "://" in target:
        return Store.open(target)
    path = existing_state_dir() / "results.sqlite" if target is None else Path(target)
    if not path.is_file():
        raise HarnessError(
            "there are no results yet",
            where=str(path),
            remedy="run `harness demo` or `harness bringup`, or set HARNESS_HOME",
        )
    return Store.open(path)


def _chosen(
    store: Store,
    campaign: str | None,
    board: str | None,
    stage: str | None,
    everything: bool,
    columns: Sequence[str],
) -> pd.DataFrame:
    if everything or campaign is not None:
        known = None if campaign is None else store.find_campaign(campaign)
        frame = store.frames.runs(campaign=known, board=board, stage=stage, columns=columns)
        frame = frame.rename(columns={"id": "run_id"})
        if not frame.empty:
            return frame
        if known is None:
            frame = store.frames.latest_matrix()
        else:
            frame = store.frames.runs(known, columns=("board", "stage"))
    else:
        frame = store.frames.latest_matrix()
    for column, wanted in (("board", board), ("stage", stage)):
        if wanted is None:
            continue
        present = sorted(set(frame[column]))
        frame = frame[frame[column] == wanted]
        if frame.empty:
            raise HarnessError(
                f"no results of the {column} {wanted!r}",
                expected=", ".join(present) or "none: there are no results yet",
            )
    return frame.iloc[:0] if everything else frame.reset_index(drop=True)


def _show_runs(frame: pd.DataFrame) -> None:
    from rich.text import Text

    if frame.empty:
        say("there are no results yet; run `harness demo` or `harness bringup`")
        return
    table, console = _table("run", "board", "model", "stage", "outcome", "when", "headline")
    for row in frame.to_dict("records"):
        outcome = row["outcome"] or row["state"]
        before = f" (was {row['previous_outcome']})" if row.get("changed") else ""
        table.add_row(
            str(row["run_id"])[:8],
            Text(visible(row["board"])),
            Text(visible(row["model_name"] or "")),
            Text(visible(row["stage"])),
            Text(outcome + before, style=_style(outcome)),
            f"{row['started_at'].to_pydatetime().astimezone():%Y-%m-%d %H:%M}",
            Text(visible(row["headline"] or "")),
        )
    console.print(table)


def _outcome(check: CheckRow) -> str:
    """As on the pages: a check without a limit did not pass anything."""
    limit = check.limit if check.limit_text is None else check.limit_text
    return "noted" if noted(check.outcome, limit) else check.outcome


def _show_run(row: RunRow) -> None:
    from rich.text import Text

    outcome = row.outcome or row.state
    table, console = _table("", "", header=False)
    facts: dict[str, Any] = {
        "run": row.id,
        "campaign": row.campaign_id,
        "board": row.board,
        "model": f"{row.model_name or ''} {row.scheme or ''}".strip(),
        "stage": f"{row.stage}, attempt {row.attempt}",
        "headline": row.headline,
        "culprit": row.culprit,
        "remedy": row.remedy,
        "error": row.error_kind,
        "clocks": row.clocks,
        "started": f"{row.started_at.astimezone():%Y-%m-%d %H:%M:%S}",
        "took": None if row.seconds is None else f"{row.seconds:.1f} s on the board",
        "series": ", ".join(series.name for series in row.series),
    }
    table.add_row("outcome", Text(outcome, style=_style(outcome)))
    for name, value in facts.items():
        if value:
            table.add_row(name, Text(visible(str(value))))
    console.print(table)
    if row.checks:
        checks, _ = _table("check", "outcome", "measured", "limit", "unit", "what it says")
        for check in row.checks:
            checks.add_row(
                Text(visible(check.name)),
                Text(_outcome(check), style=_style(check.outcome)),
                Text(_value(check.measured, check.measured_text)),
                Text(_value(check.limit, check.limit_text)),
                Text(check.unit),
                Text(visible(check.sentence)),
            )
        console.print(checks)


def _whole_run(row: RunRow) -> dict[str, Any]:
    def columns(record: RunRow | CheckRow) -> dict[str, Any]:
        mapper = type(record).__mapper__
        return {attribute.key: getattr(record, attribute.key) for attribute in mapper.column_attrs}

    return {
        **columns(row),
        "checks": [columns(check) for check in row.checks],
        "series": [
            {"name": item.name, "path": item.path, "sha256": item.sha256, "bytes": item.bytes}
            for item in row.series
        ],
    }


def _value(number: float | None, text: str | None) -> str:
    if number is None:
        return visible(text or "")
    return f"{number:.6g}"


def _style(outcome: str) -> str:
    from harness.farm.progress import STYLES

    return STYLES[Outcome(outcome)] if outcome in set(Outcome) else "dim"


LISTED = ("id", "board", "model_name", "stage", "outcome", "state", "started_at", "headline")
ONE_LINE = ("run", "stage", "when")  # columns that are short: rich need not look for a break


def _table(*columns: str, header: bool = True) -> tuple[Any, Any]:
    """A table, and the console on stdout that prints it; a file gets lines that are not cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, emoji=False, width=200)
    table = Table(show_header=header)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in ONE_LINE)
    return table, console
