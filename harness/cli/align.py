"""`harness align`: which op goes wrong first, and what that does to logits and text."""

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
    prepare,
    run,
    which,
)
from harness.cli.output import emit, emit_json, guard, visible

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@guard
def align(
    farm: FarmOption = Path("devices.yaml"),
    board: BoardOption = None,
    tag: TagOption = None,
    model: ModelOption = None,
    prompts: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Texts whose logits are compared, and over which intervals are drawn.",
        ),
    ] = 4,
    positions: Annotated[
        int, typer.Option(min=16, max=512, help="Positions of each of these texts.")
    ] = 96,
    text_tokens: Annotated[
        int, typer.Option(min=1, max=2000, help="Tokens to generate and to compare.")
    ] = 300,
    rows: Annotated[
        int, typer.Option(min=3, max=64, help="Positions at which every op is compared.")
    ] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    stall_seconds: StallOption = None,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    board_env: EnvOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the worst ops, with all their numbers.")
    ] = False,
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare every op of the engine on a board with the reference, and name the first bad one.

    Each op is fed the reference's own inputs, as a decode step (local) and as a prefill, and is
    compared in float64; its error may be three times that of a naive implementation with the same
    quantisation. Only these two name an op. Then the engine runs on its own (free), which shows
    how errors drift; logits and a text of hundreds of tokens follow.

    \b
    Examples
      harness align --board rk3588-01 --model model.gguf
      harness align --board pi4-01 --kv int8 --engine-option passes_off=qkv -v
      harness align --board virt-2 --board-env virt-2:ENGINE_FAULT=swap-heads:1@L07.attn.mix

    Exit codes: 0 nothing to blame, 1 a finding, 2 wrong use or infrastructure.
    """
    from harness.farm.alignment_report import report
    from harness.farm.selection import (
        bringup_options,
        check_context,
        choose_boards,
        choose_stages,
        engine_words,
    )
    from harness.jobs.engines import likely_layout
    from harness.store import Store

    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    boards = choose_boards(farm, board or (), tag or (), board_env or ())
    options = bringup_options(
        accuracy_prompts=prompts,
        accuracy_positions=positions,
        accuracy_tokens=text_tokens,
        accuracy_rows=rows,
        seed=seed,
        stall_seconds=stall_seconds,
        engine=engine,
    )
    prepared = prepare(model, likely_layout(boards, engine))
    check_context(prepared, options)
    with Store.open() as store:
        result = run(
            boards,
            prepared,
            options,
            choose_stages(["accuracy"]),
            store,
            resume=which(resume, fresh),
            kind="align",
        )
    if as_json:
        emit_json({**result.as_json(), "details": result.details()})
    else:
        for line in report(result, worst=12 if verbose else 0):
            emit(visible(line))
    raise typer.Exit(result.exit_code)
