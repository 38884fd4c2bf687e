"""`harness bisect race`: which steps race when they run asynchronously on a board."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.bringup import EngineOption, EnvOption, FarmOption, KvOption, UnitOption
from harness.cli.output import (
    EXIT_FINDING,
    EXIT_GOOD,
    EXIT_TROUBLE,
    emit,
    emit_json,
    guard,
    say,
    visible,
)
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.bisect.race_hunt import Ended, Wanted
    from harness.deploy.models import PreparedModel
    from harness.farm.decoding import DecodeSession
    from harness.store import Store

OneBoard = Annotated[str, typer.Option("--board", "-b", metavar="NAME", help="The board.")]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        help="A GGUF file, or a safetensors file or folder. Without it: a synthetic model of two "
        "layers, whose trials take milliseconds.",
    ),
]


@guard
def race(
    board: OneBoard,
    farm: FarmOption = Path("devices.yaml"),
    model: ModelOption = None,
    delta: Annotated[
        float,
        typer.Option(min=1e-6, max=0.2, help="Error probability of what a name rests on."),
    ] = 0.01,
    budget: Annotated[int, typer.Option(min=1, help="Trials, at most.")] = 2000,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a trial.")] = 4,
    delays: Annotated[
        bool,
        typer.Option(
            "--delays/--no-delays", help="Hold results back, to make the race more frequent."
        ),
    ] = True,
    delay_ms: Annotated[
        float, typer.Option(min=0.1, max=1000, help="By so much; more than an op takes.")
    ] = 3.0,
    tried: Annotated[
        str | None,
        typer.Option(
            "--try",
            metavar="STEPS",
            help="Search nothing: run these steps asynchronously (A,B, or all).",
        ),
    ] = None,
    held_back: Annotated[
        str | None,
        typer.Option("--held-back", metavar="STEPS", help="With --try: whose results are late."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="With --try: so many trials.")] = 20,
    unit: UnitOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew, even if a search was interrupted.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the steps that race: the set of ops that fail when they run asynchronously together, and
    the event that is missing between which two.

    The sync executor's results on the board are what is expected. A trial decodes a few steps with
    some ops asynchronous. What is named fails on its own and passes without each of its members;
    what cannot be named ends as inconclusive, with the interval it lies in. An interrupted search
    is continued by the same command.

    \b
    Examples
      harness bisect race --board rk3588-01 --model model.gguf
      harness bisect race --board virt-1 --board-env virt-1:ENGINE_FAULT=drop-edge:0.3@L01.attn.out
      harness bisect race -b rk3588-01 --no-delays --budget 5000 --delta 0.001
      harness bisect race -b rk3588-01 --try L01.attn.out --trials 50

    Exit codes: 0 named, 1 inconclusive, not reproduced, or no race, 2 wrong use or infrastructure.
    With --try: 0 no trial failed, 1 some did.
    """
    from harness.bisect.race_hunt import Wanted
    from harness.farm.decoding import DecodeSession
    from harness.farm.deployed import on_board
    from harness.farm.faults import require_ops
    from harness.farm.runner import stop_virtual_boards
    from harness.farm.selection import choose_boards, engine_words
    from harness.jobs.engines import likely_layout
    from harness.store import Store

    if held_back and not tried:
        raise HarnessError("--held-back without --try", expected="both, or neither")
    engine = engine_words(engine_option or (), unit=unit, kv=kv)
    (chosen,) = choose_boards(farm, [board], (), board_env or ())
    prepared = _prepared(model, likely_layout([chosen], engine))
    require_ops([chosen], prepared)
    wanted = Wanted(delta, budget, delays, steps, delay_ms / 1000)
    given = [
        ("--board", board),
        ("--farm", farm),
        ("--model", model),
        ("--unit", unit),
        ("--kv", kv),
    ]
    given += [("--engine-option", word) for word in engine_option or ()]
    given += [("--board-env", word) for word in board_env or ()]
    given += [("--steps", steps), ("--delay-ms", delay_ms)]
    where = [str(word) for option, value in given if value is not None for word in (option, value)]
    with Store.open() as store, tempfile.TemporaryDirectory(prefix="harness-race-") as folder:
        try:
            with on_board(chosen, prepared, engine, store, "the search for a race") as there:
                session = DecodeSession(there, Path(folder))
                if tried:
                    code = _try(session, wanted, tried, held_back, trials, as_json)
                else:
                    code = _search(session, wanted, store, where, fresh, as_json)
        finally:
            stop_virtual_boards(store, [chosen])
    raise typer.Exit(code)


def _prepared(model: Path | None, layout: str) -> PreparedModel:
    from harness.cli.bringup import prepare
    from harness.deploy.models import prepare_tiny

    return prepare_tiny(0, layout) if model is None else prepare(model, layout)


def _search(
    session: DecodeSession,
    wanted: Wanted,
    store: Store,
    where: Sequence[str],
    fresh: bool,
    as_json: bool,
) -> int:
    from harness.bisect.race import Outcome
    from harness.bisect.race_hunt import hunt
    from harness.cli.race_view import RaceView

    with RaceView(wanted.budget) as view:
        ended = hunt(session, wanted, store, sys.argv, where, view.watch(), fresh=fresh)
    _print(ended, as_json)
    if ended.verdict.outcome is Outcome.BOARD_LOST:
        say(f"{ended.trials} trials are kept: the same command goes on with the search")
        return EXIT_TROUBLE
    named = ended.verdict.outcome in (Outcome.NAMED, Outcome.STATIC)
    return EXIT_GOOD if named else EXIT_FINDING


def _print(ended: Ended, as_json: bool) -> None:
    if as_json:
        emit_json(ended.as_json())
        return
    emit(visible(ended.headline))
    for race, sentence, command in zip(
        ended.verdict.races, ended.sentences, ended.commands, strict=True
    ):
        emit(visible(f"  {sentence}"))
        emit(visible(f"  confidence {race.probability:.4f}; to see it again:"))
        emit(visible(f"    {command}"))
    for finding in ended.verdict.findings:
        emit(visible(f"  {finding}"))
    emit(f"  {ended.trials} trials, search {ended.search[:8]}")


def _try(
    session: DecodeSession,
    wanted: Wanted,
    tried: str,
    held_back: str | None,
    count: int,
    as_json: bool,
) -> int:
    from harness.bisect.race_hunt import try_out

    on = [step for step in tried.split(",") if step]
    delayed = [step for step in (held_back or "").split(",") if step]
    failed, trials, _ = try_out(session, wanted, on, delayed, count)
    if as_json:
        emit_json(
            {"on": on, "held_back": delayed, "failed": failed, "trials": [vars(t) for t in trials]}
        )
    else:
        emit(visible(f"{failed} of {count} trials failed with {', '.join(on)} asynchronous"))
    return EXIT_FINDING if failed else EXIT_GOOD
