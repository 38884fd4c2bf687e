"""`harness bringup`: the four stages on boards side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.output import console, emit_json, guard, say
from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.farm.results import CampaignResult
    from harness.farm.runner import Resume
    from harness.inventory import Board
    from harness.jobs.base import BringupOptions, Stage
    from harness.store import Store

app = typer.Typer(rich_markup_mode=None, add_completion=False)

FarmOption = Annotated[Path, typer.Option("--farm", help="The file that describes the boards.")]
BoardOption = Annotated[
    list[str] | None,
    typer.Option("--board", "-b", help="Only this board; may be given again.", metavar="NAME"),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", "-t", metavar="TAG", help="Only boards with this tag; again: with all."),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        help="A GGUF file, or a safetensors file or folder. Without it: the demonstration model, "
        "SmolLM2-135M-Instruct, fetched once.",
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--board-env",
        metavar="BOARD:KEY=VALUE",
        help="An environment variable of the engine on one board; may be given again.",
    ),
]
UnitOption = Annotated[
    str | None,
    typer.Option(
        "--unit",
        metavar="NAME",
        help="What executes the ops: native, packed (numpy), reference; default: the board's "
        "entry, else native where a compiler is found.",
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", metavar="NAME", help="sync, async or compiled (native only)."),
]
KvOption = Annotated[
    str | None,
    typer.Option("--kv", metavar="SCHEME", help="Precision of the KV cache: f32, f16, int8, int4."),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        metavar="NAME=VALUE",
        help="Any other option of the engine, such as fused=no, huge_pages=yes, threads=2, "
        "activations=float or passes_off=qkv,residual; may be given again.",
    ),
]
StallOption = Annotated[
    float | None,
    typer.Option(
        "--stall-seconds",
        min=5,
        metavar="SECONDS",
        help="End an engine that has said nothing for so long, and show where it stands; default: "
        "more than the slowest board takes, stage by stage.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Also continue a bring-up that was stopped by Ctrl-C.")
]
FreshOption = Annotated[
    bool, typer.Option("--fresh", help="Start anew, even if a bring-up was interrupted.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
StageOption = Annotated[
    list[str] | None,
    typer.Option("--stage", help="Only this stage; may be given again.", metavar="NAME"),
]
ContextOption = Annotated[
    int | None,
    typer.Option(min=64, help="Designed context, in positions; default: the model's, ≤ 2048."),
]


@app.command()
@guard
def bringup(
    farm: FarmOption = Path("devices.yaml"),
    board: BoardOption = None,
    tag: TagOption = None,
    model: ModelOption = None,
    stage: StageOption = None,
    stress_minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="MINUTES",
            help="Length of the stress stage; default: the board's, or 30.",
        ),
    ] = None,
    context: ContextOption = None,
    curve_seconds: Annotated[
        float,
        typer.Option(
            min=10,
            metavar="SECONDS",
            help="Time for the curve stage; slow boards need more to reach a long context.",
        ),
    ] = 60.0,
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
    """Bring a model up on boards: tiny, accuracy, curve and stress, side by side.

    A board stops at the first stage that does not pass; the others carry on. A bring-up whose
    harness was killed is continued by the same command: stages that were judged are kept, and a
    run that is still on its board is followed or collected, not repeated.

    \b
    Examples
      harness bringup --board rk3588-01 --model model.gguf
      harness bringup --tag nightly --stress-minutes 30
      harness bringup --stage tiny --stage accuracy --json > result.json
      harness bringup --board pi4-01 --unit native --kv int8 --engine-option huge_pages=yes
      harness bringup --board-env virt-2:ENGINE_FAULT=scale:1.02@L07.ffn.down

    Exit codes: 0 every stage passed (or warned), 1 a finding, 2 wrong use or infrastructure.
    """
    from harness.farm.selection import (
        bringup_options,
        choose_boards,
        choose_stages,
        engine_words,
    )

    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    boards = choose_boards(farm, board or (), tag or (), board_env or ())
    stages = choose_stages(stage or ())
    options = bringup_options(
        stress_minutes=stress_minutes,
        context=context,
        curve_seconds=curve_seconds,
        seed=seed,
        stall_seconds=stall_seconds,
        engine=engine,
    )
    raise typer.Exit(
        run_and_report(
            boards, model, options, stages, resume=which(resume, fresh), as_json=as_json
        ).exit_code
    )


def which(resume: bool, fresh: bool) -> Resume:
    """What --resume and --fresh mean together."""
    from harness.farm.runner import Resume

    if resume and fresh:
        raise HarnessError("--resume together with --fresh", expected="at most one of them")
    return Resume.ALSO_STOPPED if resume else Resume.NEVER if fresh else Resume.CRASHED


def run_and_report(
    boards: Sequence[Board],
    model: Path | None,
    options: BringupOptions,
    stages: Sequence[Stage],
    *,
    resume: Resume,
    as_json: bool,
    kind: str = "bringup",
) -> CampaignResult:
    """Runs a campaign with progress on stderr, and prints its result on stdout."""
    from harness.cli.summary import print_summary
    from harness.farm.selection import check_context
    from harness.jobs.engines import likely_layout
    from harness.store import Store

    prepared = prepare(model, likely_layout(boards, options.engine))
    check_context(prepared, options)  # before a database is made
    with Store.open() as store:
        result = run(boards, prepared, options, stages, store, resume=resume, kind=kind)
    if as_json:
        emit_json(result.as_json())
    else:
        print_summary(result)
        say("`harness dashboard build` makes pages of the stored results")
    return result


def run(
    boards: Sequence[Board],
    model: PreparedModel,
    options: BringupOptions,
    stages: Sequence[Stage],
    store: Store,
    *,
    resume: Resume,
    kind: str = "bringup",
) -> CampaignResult:
    """One campaign, with progress for people and an orderly end on Ctrl-C."""
    from harness.farm.progress import reporter_for
    from harness.farm.runner import bringup as run_bringup
    from harness.farm.stopping import stop_on_signal

    reporter = reporter_for(console())
    with stop_on_signal(reporter.note) as stop:
        return run_bringup(
            boards,
            model,
            options,
            store,
            reporter,
            stop=stop,
            stages=stages,
            resume=resume,
            kind=kind,
        )


def prepare(model: Path | None, layout: str = "blocked") -> PreparedModel:
    """The package of `model`, or of the demonstration model, with progress."""
    from harness.deploy.models import demo_model, prepare_model

    if model is None:
        with step("fetching the demonstration model") as begun:
            model = demo_model(begun)
    with step(f"packing {model.name}") as begun:
        return prepare_model(model, progress=begun, layout=layout)


@contextlib.contextmanager
def step(text: str) -> Iterator[Callable[[int, int], None]]:
    """A step that may take a while: a spinner on a terminal, a line elsewhere; neither before its
    work has begun, of which the step is told as progress. What is cached is no work."""
    told = False
    with contextlib.ExitStack() as shown:

        def begun(done: int, total: int) -> None:
            nonlocal told
            del done, total
            if told:
                return
            told = True
            if console().is_terminal:
                shown.enter_context(console().status(text))
            else:
                say(text)

        yield begun
