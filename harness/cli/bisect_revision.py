"""`harness bisect revision`: which commit of the engine is to blame."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.bringup import (
    EngineOption,
    EnvOption,
    ExecutorOption,
    FreshOption,
    JsonOption,
    ModelOption,
    UnitOption,
    prepare,
)
from harness.cli.output import (
    EXIT_FINDING,
    EXIT_GOOD,
    complain,
    console,
    emit,
    emit_json,
    guard,
    say,
    visible,
)
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.bisect.session import Wanted
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board, Engine

GIT_GOOD, GIT_BAD, GIT_SKIP, GIT_ABORT = 0, 1, 125, 255  # git-bisect(1), "Bisect run"


@guard
def revision(
    good: Annotated[
        str | None, typer.Argument(metavar="GOOD", help="A revision without the fault.")
    ] = None,
    bad: Annotated[
        str | None, typer.Argument(metavar="BAD", help="A later one that has it.")
    ] = None,
    what: Annotated[
        str,
        typer.Option(
            "--what",
            metavar="crash|accuracy|tpot|rss|TEST",
            help="What went wrong: it crashes, computes wrongly, is slower, takes more memory, or "
            "a test of a board fails, as pytest names it.",
        ),
    ] = "accuracy",
    repo: Annotated[
        Path, typer.Option("--repo", metavar="FOLDER", help="The repository with the history.")
    ] = Path(),
    engine_path: Annotated[
        str,
        typer.Option(
            "--engine-path", metavar="FOLDER", help='The engine\'s folder in it; "." for its root.'
        ),
    ] = "engine",
    board: Annotated[
        str | None,
        typer.Option("--board", "-b", metavar="NAME", help="The board to try on."),
    ] = None,
    farm: Annotated[
        Path, typer.Option("--farm", help="The file that describes the boards.")
    ] = Path("devices.yaml"),
    model: ModelOption = None,
    confidence: Annotated[
        float,
        typer.Option(min=0.8, max=0.999, help="That a name must have; else none is given."),
    ] = 0.99,
    least_rate: Annotated[
        float | None,
        typer.Option(
            min=0.02,
            max=1.0,
            metavar="RATE",
            help="Failures of BAD that are rarer than this are not looked for; default: 0.2, of "
            "wrong results 0.5.",
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(min=8, help="Trials at most; default: 400, or 150 visits of a measurement."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of each generation; default: 32, of accuracy 200."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Generations that are timed in each visit; default: as many as take 2 s, 5 at "
            "least.",
        ),
    ] = None,
    any_failure: Annotated[
        bool,
        typer.Option("--any-failure", help="Hunt any failure, not only the one that BAD shows."),
    ] = False,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    ignore_uncommitted: Annotated[
        bool, typer.Option("--ignore-uncommitted", help="Search although the engine was changed.")
    ] = False,
    this: Annotated[
        bool,
        typer.Option(
            "--this",
            help="Try only what is checked out, and end as `git bisect run` wants it: 0 good, "
            "1 bad, 125 cannot be tested, 255 when the board is in the way.",
        ),
    ] = False,
    times: Annotated[
        int, typer.Option(min=1, help="With --this: so often, or until it fails.")
    ] = 1,
    limit: Annotated[
        float | None,
        typer.Option(metavar="VALUE", help="With --this: bad above it, ms (tpot) or MiB (rss)."),
    ] = None,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Name the commit between GOOD and BAD that broke the engine, by trials on one board.

    Each revision is exported, built by its own recipe and deployed beside the others; the model,
    the references and this harness stay the same. Failures may be rare: the search takes as many
    trials as the confidence needs. A time or a size is compared by visits, each a new deployment
    and a new process. The named commit is verified against its parent, and by a revert where that
    applies. Trials are kept: the same command goes on with a search that was interrupted.

    \b
    Examples
      harness bisect revision v1.4 HEAD --what accuracy --board rk3588-01
      harness bisect revision 1a2b3c4 main --what crash --board pi4-01 --least-rate 0.05
      harness bisect revision HEAD~60 HEAD --what tpot --board rk3588-01 --model model.gguf
      harness bisect revision v1.4 HEAD --what tests/test_my_boards.py::test_text --board rk-01
      git bisect run harness bisect revision --this --what accuracy --board rk3588-01

    Exit codes: 0 a commit is named, 1 it is not (the outcome says why), 2 wrong use or
    infrastructure.
    """

    def wanted() -> Wanted:
        from harness.bisect.hunted import hunted
        from harness.bisect.session import Wanted, is_test
        from harness.farm.selection import engine_words

        if not is_test(what):
            hunted(what)  # a wrong word is told before a model is fetched
        asked = engine_words(engine_option or (), unit=unit, executor=executor)
        chosen = one_board(farm, board, board_env or ())
        return Wanted(
            what=what,
            board=chosen,
            farm=farm,
            model=None if is_test(what) else _model(what, model, chosen, asked),
            model_path=model,
            engine=asked,
            confidence=confidence,
            least_rate=least_rate,
            budget=budget,
            tokens=tokens,
            repeats=repeats,
            any_failure=any_failure,
        )

    if this:
        with _for_git():
            raise typer.Exit(_try_this(wanted, what, repo / engine_path, times, limit, as_json))
    if good is None or bad is None:
        raise HarnessError(
            "a revision is missing",
            expected="GOOD and BAD",
            remedy="name both, or try what is checked out with --this",
        )
    source = (repo, engine_path)
    raise typer.Exit(_search(wanted, source, good, bad, ignore_uncommitted, fresh, as_json))


def one_board(farm: Path, name: str | None, environment: Sequence[str]) -> Board:
    """The board to try on: the one that is named, or the only one there is."""
    from harness.farm.selection import choose_boards

    found = choose_boards(farm, [name] if name else (), (), environment)
    if len(found) != 1:
        raise HarnessError(
            f"{len(found)} boards: {', '.join(one.name for one in found)}",
            where=str(farm),
            expected="one",
            remedy="name it with --board",
        )
    return found[0]


def _model(what: str, path: Path | None, board: Board, asked: Engine) -> PreparedModel:
    """The model to run: the one that is named, else as small a one as will do."""
    from harness.bisect.session import uses_tiny_model
    from harness.deploy.models import prepare_tiny
    from harness.jobs.engines import likely_layout

    layout = likely_layout([board], asked)
    if path is None and uses_tiny_model(what):
        return prepare_tiny(0, layout)
    return prepare(path, layout)


def _search(
    wanted: Callable[[], Wanted],
    source: tuple[Path, str],
    good: str,
    bad: str,
    ignore_uncommitted: bool,
    fresh: bool,
    as_json: bool,
) -> int:
    from harness.bisect import session
    from harness.bisect.history import History
    from harness.bisect.lines import Outcome
    from harness.bisect.showing import View
    from harness.farm.stopping import stop_on_signal
    from harness.store import Store

    history = History(*source)
    first, last = history.revision(good), history.revision(bad)
    if not ignore_uncommitted:
        history.require_committed(last)
    asked = wanted()
    with Store.open() as store, View(console()) as view, stop_on_signal(view.note) as stop:
        watch = session.Watchers(view.standing, view.tell, view.note, stop.is_set)
        search_id, finding = session.search(
            asked, history, first, last, store, sys.argv[1:], watch, fresh=fresh
        )
    if as_json:
        emit_json(session.as_json(search_id, finding, first, last))
    else:
        emit(visible(f"{finding.outcome.value}: {finding.headline}"))
        for note in finding.notes:
            emit(visible(f"  {note}"))
        sure = "" if finding.confidence is None else f", confidence {finding.confidence:.3f}"
        emit(f"  {finding.trials} trials on {asked.board.name}{sure}, search {search_id[:8]}")
    return EXIT_GOOD if finding.outcome is Outcome.NAMED else EXIT_FINDING


def _try_this(
    wanted: Callable[[], Wanted],
    what: str,
    folder: Path,
    times: int,
    limit: float | None,
    as_json: bool,
) -> int:
    """One revision as `git bisect run` asks for it."""
    from harness.bisect import session
    from harness.bisect.trials import Result
    from harness.farm.stopping import stop_on_signal
    from harness.store import Store

    build = session.working_tree(folder)
    asked = wanted()
    if asked.measures and limit is None:
        raise HarnessError(
            f"--this --what {what} without a limit",
            expected="--limit with what is too much, in ms (tpot) or MiB (rss)",
        )
    scale = 1e3 if asked.measures and asked.kind().unit == "s" else 1.0
    with Store.open() as store, stop_on_signal(say) as stop:
        watch = session.Watchers(tell=say, note=say, stop=stop.is_set)
        with session.trials_of(asked, store, watch, lambda trial: None) as make:
            for _ in range(times):
                trial = make("this", build)
                result = session.verdict_of(trial, None if limit is None else limit / scale)
                if result is not Result.PASS:
                    break
    if as_json:
        emit_json({**vars(trial), "result": result.value})
    else:
        why = trial.evidence.get("untestable") or trial.signature or ""
        value = "" if trial.value is None else f" {trial.value * scale:.4g}"
        emit(visible(f"{result.value}{value} {why}".rstrip()))
    return {Result.PASS: GIT_GOOD, Result.FAIL: GIT_BAD}.get(result, GIT_SKIP)


@contextlib.contextmanager
def _for_git() -> Iterator[None]:
    """What goes wrong is no verdict on a revision: git is told to stop, not to go on."""
    from engine.formats.checkpoint import FormatError

    try:
        yield
    except (HarnessError, FormatError) as error:
        complain(str(error))
        raise typer.Exit(GIT_ABORT) from error
    except KeyboardInterrupt as error:
        complain("interrupted")
        raise typer.Exit(GIT_ABORT) from error
