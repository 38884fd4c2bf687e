"""`harness plan`: does a model fit a board, how fast at most, which scheme to try first?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.bringup import FarmOption, JsonOption, ModelOption, step
from harness.cli.output import EXIT_FINDING, EXIT_GOOD, emit, emit_json, guard, visible
from harness.errors import HarnessError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

MOST_CONTEXT = 2048  # by default, as in a bring-up


@app.command()
@guard
def plan(
    model: ModelOption = None,
    board: Annotated[
        str | None,
        typer.Option(
            "--board", "-b", metavar="NAME", help="A board of devices.yaml, or one that ran before."
        ),
    ] = None,
    farm: FarmOption = Path("devices.yaml"),
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Designed context, in positions; default: the model's, ≤ 2048."),
    ] = None,
    memory_mb: Annotated[
        float | None,
        typer.Option(min=1, metavar="MIB", help="Memory of a board that is not there yet."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="GB/S", help="Its read rate, instead of a measured one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell, before anything is sent, whether a model fits a board, how fast it can be at most, and
    which scheme to try first.

    Memory is what the board told when it was last used, or tells now; the read rate is the newest
    that a latency curve or a profile measured there. Speeds are ceilings: what memory allows. For a
    board that is not there yet both are given.

    \b
    Examples
      harness plan --board rk3588-01 --model model.gguf
      harness plan --board rk3588-01 --model model.gguf --context 4096
      harness plan --model model.gguf --memory-mb 4096 --bandwidth 12.8
      harness plan --board pi4-01 --model model.gguf --json

    Exit codes: 0 something fits, 1 nothing does, 2 wrong use or infrastructure.
    """
    from harness.farm import planned
    from harness.planning import make_plan
    from harness.store import Store

    if model is None:
        from harness.deploy.models import demo_model

        with step("fetching the demonstration model") as begun:
            model = demo_model(begun)
    described = planned.describe_model(model)
    hp = described.hyperparameters
    if context is not None and context > hp.context:
        raise HarnessError(
            f"a context of {context}",
            expected=f"at most {hp.context}, which the model {described.name} was made for",
        )
    with Store.open() as store:
        known = planned.gather(
            store,
            described.name,
            board=board,
            farm=farm,
            memory_mb=memory_mb,
            bandwidth=bandwidth,
        )
    found = make_plan(
        hp,
        known.limits,
        context=context or min(hp.context, MOST_CONTEXT),
        bandwidth_gb_s=known.bandwidth_gb_s,
        floor=known.floor,
        own=described.own,
    )
    if as_json:
        emit_json(planned.as_json(described.name, known, found))
    else:
        for line in planned.report(described.name, known, found):
            emit(visible(line))
    raise typer.Exit(EXIT_GOOD if found.choice is not None else EXIT_FINDING)
