"""`harness bisect options`: which optimisations of the engine make it fail."""

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
    FarmOption,
    FreshOption,
    JsonOption,
    KvOption,
    ModelOption,
    UnitOption,
    prepare,
)
from harness.cli.output import console, emit, emit_json, guard, say, visible

if TYPE_CHECKING:
    from harness.farm.option_search import Progress, Report

DEVICES = Path("devices.yaml")
SHOWN = 3  # of the likeliest options, while a search goes on


@guard
def options(
    board: Annotated[
        str, typer.Option("--board", "-b", metavar="NAME", help="The board that it fails on.")
    ],
    farm: FarmOption = DEVICES,
    model: ModelOption = None,
    rank: Annotated[
        bool,
        typer.Option("--rank", help="Do not search: rank what each option costs, 2 N + 2 runs."),
    ] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="NATS", help="Mean divergence from which on it fails; the board's."
        ),
    ] = None,
    positions: Annotated[
        int, typer.Option(min=8, max=512, help="Positions of the text that is read.")
    ] = 64,
    delta: Annotated[
        float, typer.Option(min=1e-6, max=0.4, help="Largest probability of a wrong name.")
    ] = 0.01,
    budget: Annotated[int, typer.Option(min=1, help="Most trials.")] = 2000,
    least_p: Annotated[
        float,
        typer.Option(
            "--least-rate", min=0.001, max=1, help="How seldom it may fail with all options on."
        ),
    ] = 0.05,
    signature: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The failure to hunt, as an earlier trial told it; the first seen."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Name the options that make the engine fail on a board: the smallest set that fails alone, and
    what is enough to switch off.

    Options are fusion passes, layouts, precisions (layer by layer), kernels, threads, cores, huge
    pages and the executor, of what the board runs or is asked to run. Each trial reads one text:
    it fails when the engine crashes, when numbers are not finite, or when its logits are further
    from the reference than allowed.

    \b
    Examples
      harness bisect options --board rk3588-01 --model model.gguf
      harness bisect options -b pi4-01 --kv int8 --max-kl 0.01
      harness bisect options -b pi4-01 --rank

    Exit codes: 0 named, 1 no name (graded, inconclusive, not reproducible), 2 wrong use or
    infrastructure.
    """
    from harness.farm.faults import require_ops
    from harness.farm.option_search import Orders, search_options
    from harness.farm.option_trials import Limits
    from harness.farm.selection import choose_boards, engine_words
    from harness.farm.stopping import stop_on_signal
    from harness.jobs.engines import likely_layout
    from harness.store import Store

    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    (chosen,) = choose_boards(farm, [board], (), board_env or ())
    prepared = prepare(model, likely_layout([chosen], engine))
    require_ops([chosen], prepared)
    kl = chosen.budget.max_kl if max_kl is None else max_kl
    orders = Orders(Limits(kl, positions), delta, budget, least_p, seed, signature, rank)
    with Store.open() as store, stop_on_signal(say) as stop, _shown() as tell:
        report = search_options(
            chosen,
            prepared,
            engine,
            store,
            orders,
            command=["harness", *sys.argv[1:]],
            where=_where(board, farm, model, board_env or ()),
            tell=tell,
            stop=stop.is_set,
            fresh=fresh,
        )
    if as_json:
        emit_json(report.as_json())
    else:
        for line in lines(report):
            emit(visible(line))
    raise typer.Exit(report.exit_code)


def _where(board: str, farm: Path, model: Path | None, environment: Sequence[str]) -> list[str]:
    """The words of a command that say which board and model it is about."""
    words = ["--board", board]
    words += [] if farm == DEVICES else ["--farm", str(farm)]
    words += [] if model is None else ["--model", str(model)]
    return [*words, *(word for text in environment for word in ("--board-env", text))]


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """How far a search is: one line that changes on a terminal, a line for each trial elsewhere."""
    if not console().is_terminal:
        yield lambda progress: say(visible(told(progress)))
        return
    with console().status("preparing the board") as status:
        yield lambda progress: status.update(visible(told(progress)).replace("[", "\\["))


def told(progress: Progress) -> str:
    """A trial, and what is likeliest by now."""
    trial, search = progress.trial, progress.search
    of = f" of {progress.of}" if progress.of else ""
    value = "" if trial.value is None else f", KL {trial.value:.2g}"
    text = (
        f"trial {progress.trials}{of}, {trial.phase}: {len(trial.subject['on'])} options on, "
        f"{trial.result.value}{value}"
    )
    shares = search.shares() if search is not None else {}
    likely = sorted(shares.items(), key=lambda item: -item[1])[:SHOWN]
    if likely:
        text += "; " + ", ".join(f"{name} {share:.0%}" for name, share in likely)
    return text


def lines(report: Report) -> Iterator[str]:
    """The result for people, the verdict first."""
    verdict, space = report.verdict, report.space
    yield f"{report.board} {verdict.outcome.value.upper()}: {verdict.sentence}"
    for one in verdict.sets:
        for name in one.options:
            yield f"  to blame      {name}: {space.words(name)}"
        if one.needed:
            yield f"  which need    {', '.join(one.needed)}"
        if one.beside:
            yield f"  untried       {', '.join(one.beside)} without them"
    if verdict.disable:
        yield f"  switch off    {', '.join(verdict.disable)}"
    if verdict.confidence is not None:
        yield f"  confidence    {verdict.confidence:.3f}"
    if verdict.suspects:
        yield f"  left over     {', '.join(verdict.suspects)}"
    if report.ranked is not None:
        yield from _ranking(report)
    yield f"  trials        {report.trials}, of search {report.search_id[:8]}"
    for word, command in (("fails", report.fails), ("passes", report.passes)):
        if command:
            yield f"  {word:<12}  {command}"


def _ranking(report: Report) -> Iterator[str]:
    ranked = report.ranked
    if ranked is None:
        return
    yield f"  {'option':<24}  {'left out':>9}  {'alone':>9}  {'share':>6}"
    for effect in ranked.effects:
        share = ranked.share(effect)
        cells = [
            f"{'–' if value is None else f'{value:+.2e}':>9}"
            for value in (effect.left_out, effect.alone)
        ]
        text = "–" if share is None else f"{share:.0%}"
        yield f"  {effect.name:<24}  {cells[0]}  {cells[1]}  {text:>6}"
