"""`harness compare`: is B better than A on this board?"""

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
    FarmOption,
    FreshOption,
    JsonOption,
    ModelOption,
    UnitOption,
    prepare,
)
from harness.cli.output import console, emit, emit_json, guard, say, visible
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.compare.arms import Arm, Words
    from harness.compare.session import Orders, Progress, Report

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SHORT = {"tpot": "tpot_s", "ttft": "ttft_s", "rss": "rss_mb"}


@app.command()
@guard
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help='What A is; "." is as the board runs.')],
    b: Annotated[str, typer.Argument(metavar="B", help="What B is: is it better?")],
    board: Annotated[
        str | None,
        typer.Option("--board", "-b", metavar="NAME", help="The board to compare on."),
    ] = None,
    farm: FarmOption = Path("devices.yaml"),
    model: ModelOption = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="tpot|ttft|rss", help="That decides; may be given again. Default: all three."
        ),
    ] = None,
    depth: Annotated[
        int, typer.Option(min=1, help="Positions in the cache before the tokens that are timed.")
    ] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="That are timed in each generation.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Generations of each process.")] = 3,
    pairs: Annotated[int, typer.Option(min=8, max=20, help="Of the first look.")] = 10,
    most: Annotated[
        int, typer.Option(min=8, max=20, help="Pairs where the first look does not decide.")
    ] = 20,
    effect: Annotated[
        float, typer.Option(min=0.011, max=1.0, help="The difference that is planned for.")
    ] = 0.02,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say how many pairs and minutes it needs.")
    ] = False,
    repo: Annotated[
        Path, typer.Option("--repo", metavar="FOLDER", help="The repository that rev= is of.")
    ] = Path(),
    engine_path: Annotated[
        str, typer.Option("--engine-path", metavar="FOLDER", help="The engine's folder in it.")
    ] = "engine",
    unit: UnitOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure A and B in turns on one board, each visit a fresh process, and say whether B is
    better: by time per token at a depth, time to the first token, and peak memory.

    A and B are some of: options of the engine (kv=int8), model=FILE, rev=REVISION of the engine,
    engine=HASH of a night, env=KEY=VALUE; "." is as the board runs. Turns are ABBA, 10 pairs and
    up to 20. A pair that did not begin alike is made again, and clocks that differ by more than
    1 % make the verdict invalid. Pairs are kept: the same command goes on with them.

    \b
    Examples
      harness compare kv=f16 kv=int8 --board rk3588-01 --depth 1024
      harness compare model=q8.gguf model=q4.gguf --board pi4-01 --metric tpot
      harness compare rev=v1.4 . --board rk3588-01 --model model.gguf
      harness compare . . --board rk3588-01          its own noise: equal versions
      harness compare . threads=2 --board pi4-01 --plan

    Exit codes: 0 better or equivalent, 1 worse, unknown or invalid, 2 wrong use or infrastructure.
    """
    from harness.cli.bisect_revision import one_board
    from harness.compare import arms as saying
    from harness.compare.measuring import Measure
    from harness.compare.planning import plan_json, plan_lines, planned
    from harness.compare.session import Orders, compare_on_board
    from harness.farm.stopping import stop_on_signal
    from harness.store import Store

    said = {"A": saying.parse("A", a), "B": saying.parse("B", b)}
    deciding = _deciding(metric or ())
    chosen = one_board(farm, board, board_env or ())
    with Store.open() as store:
        if plan:
            plans = planned(store, chosen.name, effect, deciding)
            if as_json:
                emit_json({"board": chosen.name, "effect": effect, "plans": plan_json(plans)})
            else:
                for line in plan_lines(plans, deciding, chosen.name):
                    emit(visible(line))
            return
        made = {
            letter: _arm(words, (a, b)["AB".index(letter)], farm, chosen.name, model, unit,
                         engine_option or (), board_env or (), (repo, engine_path))
            for letter, words in said.items()
        }  # fmt: skip
        orders = Orders(Measure(depth, tokens, repeats), deciding, pairs, max(pairs, most), effect)
        packed = made["A"].model.sha256
        for line in plan_lines(planned(store, chosen.name, effect, deciding, packed), deciding,
                               chosen.name):  # fmt: skip
            say(visible(line))
        with stop_on_signal(say) as stop, _shown(orders) as tell:
            report = compare_on_board(
                made,
                orders,
                store,
                command=["harness", *sys.argv[1:]],
                tell=tell,
                note=lambda text: say(visible(text)),
                stop=stop.is_set,
                fresh=fresh,
            )
    if as_json:
        emit_json(report.as_json())
    else:
        for line in lines(report):
            emit(visible(line))
    raise typer.Exit(report.exit_code)


def _deciding(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in SHORT:
            raise HarnessError(f"--metric {name}", expected=f"one of {', '.join(SHORT)}")
    return tuple(SHORT[name] for name in dict.fromkeys(names)) or tuple(SHORT.values())


def _arm(
    words: Words,
    text: str,
    farm: Path,
    board: str,
    model: Path | None,
    unit: str | None,
    options: Sequence[str],
    environment: Sequence[str],
    source: tuple[Path, str],
) -> Arm:
    from harness.compare.arms import Arm, titles
    from harness.farm.faults import require_ops
    from harness.farm.selection import choose_boards, engine_words
    from harness.jobs.engines import likely_layout

    own = [f"{board}:{one}" for one in words.environment]
    (found,) = choose_boards(farm, [board], (), [*environment, *own])
    named = {word.partition("=")[0] for word in words.options}
    common = [word for word in options if word.partition("=")[0] not in named]
    asked = engine_words([*common, *words.options], unit=None if "unit" in named else unit)
    packed = prepare(Path(words.model) if words.model else model, likely_layout([found], asked))
    require_ops([found], packed)
    sources, build, name = _sources(words, source)
    return Arm(titles([text])[0], found, asked, packed, build, sources, source=name)


def _sources(words: Words, source: tuple[Path, str]) -> tuple[Path | None, str, str]:
    """(folder of another engine, its hash, what to call it)."""
    from harness.bisect.history import History
    from harness.deploy.kept import build_hash, kept

    if words.engine is not None:
        place = kept(words.engine)
        if place is None:
            raise HarnessError(
                f"no engine {words.engine!r} is kept",
                expected="the first characters of the hash of one engine that a night ran",
                remedy="name its revision: rev=…",
            )
        return place, build_hash(place), f"engine {words.engine[:8]}"
    if words.source is not None and words.revision is not None:
        history = History(*source)
        revision = history.revision(words.revision)
        place = history.export(revision)
        return place, build_hash(place), revision.name
    return None, build_hash(), "this checkout"


@contextlib.contextmanager
def _shown(orders: Orders) -> Iterator[Callable[[Progress], None]]:
    """A bar of pairs with what they say by now on a terminal, a line for each pair elsewhere."""
    if not console().is_terminal:
        yield lambda progress: say(visible(told(progress))) if progress.judgement else None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("pairs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task("preparing the board", total=orders.pairs)
        last = ""

        def tell(progress: object) -> None:
            nonlocal last
            from harness.compare.session import Progress as Told

            if not isinstance(progress, Told):
                return
            if progress.judgement is not None:
                last = told(progress)
            bar.update(
                task,
                completed=progress.pairs,
                total=progress.of,
                description=visible(f"{progress.text}  {last}".strip()),
            )

        yield tell


def told(progress: Progress) -> str:
    """What the pairs say by now."""
    found = progress.judgement
    if found is None:
        return progress.text
    ratios = ", ".join(
        f"{name.partition('_')[0]} × {one.ratio:.3f}" for name, one in found.metrics.items()
    )
    return f"{progress.pairs} of {progress.of} pairs: {ratios}"


def lines(report: Report) -> Iterator[str]:
    """The result for people, the verdict first."""
    from harness.compare.judging import METRICS, words

    found = report.judgement
    yield f"{report.board} {found.verdict.upper()}: {report.headline}"
    for letter, arm in report.arms.items():
        yield f"  {letter}  {arm.title} ({arm.source})"
    for name in METRICS:
        if name in found.metrics:
            aside = "" if name in report.deciding else " (does not decide)"
            yield f"  {words(found, name)}{aside}"
    yield f"  clocks {found.clocks.state}: {found.clocks.reason}"
    for name, of_a, of_b in report.difference:
        yield f"  differs  {name}: {of_a} → {of_b}"
    yield f"  {len(report.pairs)} pairs, comparison {report.search_id[:8]}"
