"""`harness profile`: where a token's time goes, and what limits a board."""

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
    StallOption,
    TagOption,
    UnitOption,
    prepare,
    run,
)
from harness.cli.output import emit, emit_json, guard, say, visible

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@guard
def profile(
    farm: FarmOption = Path("devices.yaml"),
    board: BoardOption = None,
    tag: TagOption = None,
    model: ModelOption = None,
    depth: Annotated[
        int | None,
        typer.Option(
            min=64, help="Positions in the cache at the deep end; default: the model's, ≤ 2048."
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            min=1, metavar="SECONDS", help="Time for it; slow boards need more to get deep."
        ),
    ] = 15.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Also write every traced token as Chrome's JSON, for ui.perfetto.dev; with "
            "several boards one file each, with the board's name in it.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    stall_seconds: StallOption = None,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every op of every layer in the table.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time every op of a token at a shallow and at a deep position, and say what limits the board:
    compute, memory, dispatch, waiting, or a slow kernel.

    Achieved GB/s stand against the read rate that the same run measures. What lies between ops is a
    row of its own, so that the table adds up to the token. The engine's threads, page faults,
    context switches and, where the kernel allows, hardware counters are told beside it.

    \b
    Examples
      harness profile --board rk3588-01 --model model.gguf
      harness profile --board rk3588-01 --depth 1024 --kv int8 --trace rk3588-01.json
      harness profile --tag nightly --json > profile.json

    Exit codes: 0 profiled, 1 a finding (such as a slow kernel that ran), 2 wrong use or
    infrastructure.
    """
    from harness.farm.profile_report import report, write_traces
    from harness.farm.runner import Resume
    from harness.farm.selection import (
        bringup_options,
        check_context,
        choose_boards,
        engine_words,
    )
    from harness.jobs.engines import likely_layout
    from harness.jobs.profile import PROFILE
    from harness.store import Store

    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    boards = choose_boards(farm, board or (), tag or (), board_env or ())
    options = bringup_options(
        context=depth,
        profile_seconds=seconds,
        seed=seed,
        stall_seconds=stall_seconds,
        engine=engine,
    )
    prepared = prepare(model, likely_layout(boards, engine))
    check_context(prepared, options)
    with Store.open() as store:
        result = run(
            boards, prepared, options, [PROFILE], store, resume=Resume.NEVER, kind="profile"
        )
        written = write_traces(result, store, trace) if trace is not None else []
    if as_json:
        emit_json({**result.as_json(), "details": result.details()})
    else:
        for line in report(result, every_op=verbose):
            emit(visible(line))
    for path in written:
        say(f"wrote {path}; open it in https://ui.perfetto.dev")
    raise typer.Exit(result.exit_code)
