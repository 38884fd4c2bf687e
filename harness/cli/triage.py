"""`harness triage`: why engines ended badly, what is the same crash, and how to see it again."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.output import EXIT_FINDING, emit, emit_json, guard, say, visible
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.store import RunRow, Store
    from harness.store.crashes import CrashGroup
    from harness.verdicts import CrashNote

app = typer.Typer(rich_markup_mode=None, add_completion=False)

AGAIN = 5  # runs of --again unless another number is given


@app.command()
@guard
def triage(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help='A run: the first characters of its id, or "last" for the newest that crashed. '
            "A signature's hash shows its newest run.",
        ),
    ] = None,
    board: Annotated[
        str | None, typer.Option("--board", "-b", metavar="NAME", help="List only this board's.")
    ] = None,
    minimise: Annotated[
        bool, typer.Option("--minimise", help="Make it smaller on its board, and keep the result.")
    ] = False,
    again: Annotated[
        int | None,
        typer.Option(
            "--again",
            min=1,
            metavar="N",
            help="Run what reproduces it N times on its board, and tell how often it came.",
        ),
    ] = None,
    asan: Annotated[
        bool,
        typer.Option(
            "--asan",
            help="Run it on its board over a build with the address sanitiser; read its report.",
        ),
    ] = False,
    farm: Annotated[
        Path, typer.Option("--farm", help="The file that describes the boards.")
    ] = Path("devices.yaml"),
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", help="The model of the run, where it is not the demonstration's."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="FILE|URL",
            help="A results file or a postgresql:// URL; results.sqlite of the state folder if "
            "absent.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Explain crashes: their class with its evidence, a signature that is the same on every board,
    and one command that shows the crash again.

    Without RUN, the signatures are listed, the newest first. Every crash of a stage is looked into
    as it happens; this shows it again, and goes further with it on the board.

    \b
    Examples
      harness triage                            signatures, boards, how often
      harness triage last                       the newest crash, with its evidence
      harness triage 3f2a91bc --minimise        shrink it: tokens, layers, options, shape
      harness triage 3f2a91bc --again 20        "19 of 20"
      harness triage 3f2a91bc --asan --model model.gguf

    Exit codes: 0 nothing is wrong with the run (or a list), 1 a crash, 2 wrong use or
    infrastructure.
    """
    from harness.cli.results import open_existing

    asked = [
        name for name, on in (("--minimise", minimise), ("--again", again), ("--asan", asan)) if on
    ]
    if len(asked) > 1:
        raise HarnessError(f"{asked[0]} beside {asked[1]}", expected="one of them at a time")
    if asked and run is None:
        raise HarnessError(f"{asked[0]} without a run", expected="harness triage RUN " + asked[0])
    with open_existing(store) as opened:
        if run is None:
            _list(opened, board, as_json)
            return
        row = _find(opened, run)
        if not asked:
            found = _explain(opened, row, as_json)
        else:
            found = _on_board(opened, row, farm, model, asked[0], again or AGAIN, as_json)
    raise typer.Exit(EXIT_FINDING if found else 0)


# --- looking -------------------------------------------------------------------------------------


def _list(store: Store, board: str | None, as_json: bool) -> None:
    from harness.store.crashes import Crashes

    groups = Crashes(store).groups(board)
    if as_json:
        emit_json([_group(group) for group in groups])
        return
    if not groups:
        say("no crash in the results")
    for group in groups:
        boards = ", ".join(group.boards)
        emit(visible(f"{group.hash}  {group.newest.name:<20}  {group.count} x on {boards}"))
        emit(visible(f"  {group.newest.headline}"))
        emit(visible(f"  {group.newest.signature}"))
        emit(
            f"  first {group.first_seen.astimezone():%Y-%m-%d %H:%M}, last "
            f"{group.last_seen.astimezone():%Y-%m-%d %H:%M}; harness triage {group.runs[0][:8]}"
        )


def _group(group: CrashGroup) -> dict[str, Any]:
    return {
        "hash": group.hash,
        "class": group.newest.name,
        "signature": group.newest.signature,
        "headline": group.newest.headline,
        "count": group.count,
        "boards": list(group.boards),
        "first_seen": group.first_seen,
        "last_seen": group.last_seen,
        "runs": list(group.runs),
        "reproducer": group.reproducer,
    }


def _find(store: Store, text: str) -> RunRow:
    """By id, by "last", or by the hash of a signature. Raises HarnessError."""
    from harness.store.crashes import Crashes

    crashes = Crashes(store)
    if text == "last":
        groups = crashes.groups()
        if not groups:
            raise HarnessError(
                "no crash in the results", remedy="`harness results show` lists runs"
            )
        newest = max(groups, key=lambda group: group.last_seen)
        return store.run(newest.runs[0])
    try:
        return store.run(store.find_run(text))
    except HarnessError:
        if any(group.hash.startswith(text) for group in crashes.groups()):
            return store.run(crashes.group(text).runs[0])
        raise


def _explain(store: Store, row: RunRow, as_json: bool) -> bool:
    from harness.store.crashes import Crashes
    from harness.triage.reading import crash_in_store

    note = crash_in_store(store, row)
    if note is None:
        if as_json:
            emit_json({"run": row.id, "board": row.board, "crash": None})
        else:
            emit(visible(f"run {row.id[:8]} on {row.board}: no crash ({row.outcome or row.state})"))
        return False
    same = [group for group in Crashes(store).groups() if group.hash == note.hash]
    reproducer = same[0].reproducer if same else None
    if as_json:
        emit_json(
            {
                "run": row.id,
                "board": row.board,
                "stage": row.stage,
                "crash": note,
                "seen": _group(same[0]) if same else None,
            }
        )
        return True
    _show(note, f"run {row.id[:8]}, {row.stage} on {row.board}")
    if same:
        others = ", ".join(same[0].boards)
        emit(visible(f"  seen       {same[0].count} x on {others}"))
    if reproducer:
        emit(visible(f"  again      {reproducer.get('command')}: {reproducer.get('rate')}"))
        emit(visible(f"             {reproducer.get('words')}"))
    else:
        emit(f"  again      harness triage {row.id[:8]} --minimise")
    if note.name in ("out-of-bounds", "fatal-signal", "error"):
        race = f"harness bisect race --board {shlex.quote(row.board)}"
        emit(visible(f"  if it does not come every time: {race}"))
    return True


def _show(note: CrashNote, where: str) -> None:
    from harness.triage.deciding import title

    emit(visible(f"{title(note.name)}: {note.headline}"))
    emit(visible(f"  where      {where}"))
    emit(visible(f"  why        {note.sentence}"))
    for name, text in note.facts:
        emit(visible(f"  {name:<10} {text}"))
    emit(visible(f"  next       {note.remedy}"))
    emit(visible(f"  signature  {note.hash} ({note.signature})"))


# --- on the board --------------------------------------------------------------------------------


def _on_board(
    store: Store,
    row: RunRow,
    farm: Path,
    model: Path | None,
    what: str,
    times: int,
    as_json: bool,
) -> bool:
    from harness.farm.selection import choose_boards
    from harness.triage import again
    from harness.triage.reading import crash_in_store

    wanted = crash_in_store(store, row)
    if wanted is None:
        raise HarnessError(
            f"run {row.id[:8]} has no crash to see again", remedy="`harness triage` lists crashes"
        )
    (board,) = choose_boards(farm, [row.board], ())
    board = _with_environment(board, store, row)
    packed = _model(model, row)
    if what == "--asan":
        return _sanitised(store, row, board, packed, wanted, as_json)
    options = dict(again.first_recipe(row, packed).options)
    with again.on_board(
        board, packed, store, f"triage of {row.id[:8]}", options=options
    ) as session:
        if what == "--minimise":
            return _minimised(store, row, session, packed, wanted, model, as_json)
        return _repeated(store, row, session, packed, wanted, times, as_json)


def _with_environment(board: Board, store: Store, row: RunRow) -> Board:
    """The board with the environment that the run's campaign gave it (--board-env)."""
    described = store.campaign(row.campaign_id).options.get("boards") or ()
    for entry in described:
        if isinstance(entry, dict) and entry.get("name") == board.name:
            added = entry.get("environment") or {}
            return board.model_copy(update={"environment": {**board.environment, **added}})
    return board


def _model(path: Path | None, row: RunRow) -> PreparedModel:
    from harness.cli.bringup import prepare
    from harness.deploy.models import prepare_tiny

    if row.stage == "tiny" and path is None:
        return prepare_tiny(int((row.parameters or {}).get("seed") or 0))
    found = prepare(path)
    if row.model_name and found.name != row.model_name:
        raise HarnessError(
            f"the model is {found.name}, that of the run was {row.model_name}",
            remedy="name its file with --model",
        )
    return found


def _minimised(
    store: Store,
    row: RunRow,
    session: Any,
    packed: PreparedModel,
    wanted: CrashNote,
    model: Path | None,
    as_json: bool,
) -> bool:
    from harness.store.crashes import Crashes
    from harness.store.searches import Searches
    from harness.triage import again

    searches, first = Searches(store), again.first_recipe(row, packed)
    asked = {"run": row.id, "model": packed.sha256, "recipe": first.to_json()}
    search = searches.interrupted("minimise", row.board, asked)
    told = searches.trials(search) if search is not None else []
    if told:
        say(f"going on behind {len(told)} runs of the search that was interrupted")
    if search is None:
        typed = ["harness", "triage", row.id[:8], "--minimise"]
        search = searches.begin("minimise", row.board, typed, asked)
    shrinker, kept = again.minimise(
        session,
        first,
        wanted,
        say,
        told=told,
        keep=functools.partial(searches.add, search),
    )
    if kept is None or not shrinker.found:
        searches.finish(search, "not reproducible", f"not seen in {shrinker.tried} runs")
        words = (
            f"a plain generation does not show it in {shrinker.tried} runs: it needs what "
            f"the {row.stage} stage does beside that"
        )
        if as_json:
            emit_json({"run": row.id, "reproduced": False, "tried": shrinker.tried})
        else:
            emit(visible(words))
        return True
    command = f"harness triage {row.id[:8]} --again {AGAIN}"
    command += f" --model {shlex.quote(str(model))}" if model is not None else ""
    found: dict[str, Any] = {
        "recipe": shrinker.best.to_json(),
        "words": str(shrinker.best),
        "shown": shrinker.shown,
        "tried": shrinker.tried,
        "rate": f"{shrinker.shown} of {shrinker.tried}",
        "needs": list(shrinker.needs),
        "command": command,
        "hash": kept.hash,
        "signature": kept.signature,
    }
    Crashes(store).keep_reproducer(row.id, found)
    searches.finish(search, "minimised", f"{found['rate']}: {shrinker.best}")
    if as_json:
        emit_json({"run": row.id, "reproduced": True, **found})
    else:
        emit(visible(f"{found['rate']}: {found['words']}"))
        if shrinker.needs:
            emit(visible(f"  not without {', '.join(shrinker.needs)}"))
        if any(word.startswith("executor=async") for word in shrinker.needs):
            race = f"harness bisect race --board {shlex.quote(row.board)}"
            emit(visible(f"  op by op it does not come, so it may be a race: {race}"))
        emit(visible(f"  again      {command}"))
    return True


def _repeated(
    store: Store,
    row: RunRow,
    session: Any,
    packed: PreparedModel,
    wanted: CrashNote,
    times: int,
    as_json: bool,
) -> bool:
    from harness.store.crashes import Crashes
    from harness.triage import again
    from harness.triage.shrinking import Recipe

    stored = Crashes(store).of_run(row.id)
    kept = stored.reproducer if stored is not None else None
    recipe = Recipe.of(kept["recipe"]) if kept else again.first_recipe(row, packed)
    shown = 0
    for number in range(times):
        note = again.crash_in(session, again.attempt(session, recipe))
        came = note is not None and (
            note.hash == kept["hash"] if kept else again.alike(note, wanted)
        )
        shown += came
        ended = note.headline if note is not None else "it ran to its end"
        say(f"run {number + 1} of {times}: {'the crash' if came else ended}")
    if as_json:
        emit_json({"run": row.id, "shown": shown, "tried": times, "recipe": recipe.to_json()})
    else:
        emit(visible(f"{shown} of {times}: {recipe}"))
    return shown > 0


def _sanitised(
    store: Store,
    row: RunRow,
    board: Board,
    packed: PreparedModel,
    wanted: CrashNote,
    as_json: bool,
) -> bool:
    from harness.triage import again

    recipe = again.first_recipe(row, packed)
    reason = f"triage of {row.id[:8]} over the address sanitiser"
    with again.on_board(
        board, packed, store, reason, options=dict(recipe.options), sanitize="address"
    ) as session:
        note = again.crash_in(session, again.attempt(session, recipe))
    if as_json:
        emit_json({"run": row.id, "sanitize": "address", "crash": note, "was": wanted})
    elif note is None:
        emit("the address sanitiser finds nothing in a plain generation with these options")
    else:
        _show(note, f"run {row.id[:8]} again on {row.board}, over the address sanitiser")
    return note is not None
