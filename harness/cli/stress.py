"""`harness stress`: only the stress stage, at its real length."""

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
    FreshOption,
    JsonOption,
    KvOption,
    ModelOption,
    ResumeOption,
    StallOption,
    TagOption,
    UnitOption,
    run_and_report,
    which,
)
from harness.cli.output import guard

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@guard
def stress(
    farm: FarmOption = Path("devices.yaml"),
    board: BoardOption = None,
    tag: TagOption = None,
    model: ModelOption = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    stall_seconds: StallOption = None,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Growing multi-turn dialogues up to the context limit, with a cancelled generation, idle gaps
    and a killed and restarted engine; verdicts on leaks, drift, throttling and final accuracy.

    \b
    Examples
      harness stress --board rk3588-01
      harness stress --tag nightly --minutes 240

    Exit codes: 0 passed (or warned), 1 a finding, 2 wrong use or infrastructure.
    """
    from harness.farm.selection import (
        bringup_options,
        choose_boards,
        choose_stages,
        engine_words,
    )

    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    boards = choose_boards(farm, board or (), tag or (), board_env or ())
    options = bringup_options(
        stress_minutes=minutes, seed=seed, stall_seconds=stall_seconds, engine=engine
    )
    raise typer.Exit(
        run_and_report(
            boards,
            model,
            options,
            choose_stages(["stress"]),
            resume=which(resume, fresh),
            as_json=as_json,
        ).exit_code
    )
