"""`harness threads`: in how many threads, and on which cores, boards are fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.bringup import (
    BoardOption,
    EngineOption,
    EnvOption,
    ExecutorOption,
    FarmOption,
    JsonOption,
    KvOption,
    ModelOption,
    TagOption,
    UnitOption,
    run_and_report,
)
from harness.cli.output import emit, guard

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@guard
def threads(
    farm: FarmOption = Path("devices.yaml"),
    board: BoardOption = None,
    tag: TagOption = None,
    model: ModelOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure in how many threads, on which cores and with which cache layout boards decode
    fastest, in turns, and keep the result for their bring-ups.

    A bring-up measures it by itself where devices.yaml leaves threads or cores open and nothing is
    known for the present engine, model and options; this command measures it again.

    \b
    Examples
      harness threads --board rk3588-01 --model model.gguf
      harness threads --tag nightly --engine-option huge_pages=auto

    Exit codes: 0 measured, 1 a finding (such as a wrong text), 2 wrong use or infrastructure.
    """
    from harness.farm.runner import Resume
    from harness.farm.selection import bringup_options, choose_boards, engine_words
    from harness.jobs.ladder import LADDER

    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    boards = choose_boards(farm, board or (), tag or (), board_env or ())
    result = run_and_report(
        boards,
        model,
        bringup_options(seed=seed, engine=engine),
        [LADDER],
        resume=Resume.NEVER,
        as_json=as_json,
        kind="threads",
    )
    if not as_json:
        for name, row in result.results.items():
            for item in row.values():
                if item.outcome.lets_next_stage_run:
                    emit(f"{name}: {item.verdict.headline}")
                    emit(f"  {item.verdict.checks[-1].sentence}")
    raise typer.Exit(result.exit_code)
