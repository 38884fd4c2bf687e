"""`harness nightly`: a night of bring-ups as one command for cron, or as a systemd timer."""

from __future__ import annotations

import enum
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.bringup import (
    BoardOption,
    ContextOption,
    EngineOption,
    ExecutorOption,
    FarmOption,
    JsonOption,
    KvOption,
    ModelOption,
    ResumeOption,
    StageOption,
    StallOption,
    TagOption,
    UnitOption,
    prepare,
    run,
    which,
)
from harness.cli.output import EXIT_TROUBLE, emit, emit_json, guard, say, visible
from harness.errors import HarnessError
from harness.farm.timer import NAME

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.farm.nightly import Report
    from harness.inventory import Board
    from harness.jobs.base import BringupOptions, Stage
    from harness.store import Store

# What the timer's service needs of the environment that it is installed from: places, no secrets.
PASSED_ON = ("HARNESS_HOME", "HARNESS_CACHE")

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Notify(enum.StrEnum):
    """When people are told."""

    ALWAYS = "always"
    CHANGES = "changes"  # something differs from last night, or the night was not good
    FINDINGS = "findings"  # the night was not good


@app.command()
@guard
def nightly(
    farm: FarmOption = Path("devices.yaml"),
    board: BoardOption = None,
    tag: TagOption = None,
    model: ModelOption = None,
    stage: StageOption = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="MINUTES", help="Of the stress stage; default: the board's, or 30."
        ),
    ] = None,
    context: ContextOption = None,
    curve_seconds: Annotated[
        float, typer.Option(min=10, metavar="SECONDS", help="Time for the curve stage.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    stall_seconds: StallOption = None,
    unit: UnitOption = None,
    executor: ExecutorOption = None,
    kv: KvOption = None,
    engine_option: EngineOption = None,
    notify: Annotated[
        Notify,
        typer.Option(help="When HARNESS_NOTIFY_URL is told, where it is set (apprise)."),
    ] = Notify.ALWAYS,
    recheck: Annotated[
        bool,
        typer.Option(
            help="First look whether boards that the harness set aside are well again; one that "
            "is takes part."
        ),
    ] = True,
    confirm: Annotated[
        bool,
        typer.Option(
            help="Settle what looks worse than the nights before: an A/B of a good night's engine "
            "against tonight's on that board, some 15 minutes; once more before it blames."
        ),
    ] = True,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
    install: Annotated[
        bool, typer.Option("--install", help="Do not run: install a systemd user timer that does.")
    ] = False,
    uninstall: Annotated[
        bool, typer.Option("--uninstall", help="Stop and remove the timer.")
    ] = False,
    at: Annotated[
        str, typer.Option(metavar="HH:MM", help="When the installed timer runs.")
    ] = "02:00",
    timer: Annotated[
        str, typer.Option(metavar="NAME", help="The timer's name; one for each set of boards.")
    ] = NAME,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --install: only print the units.")
    ] = False,
) -> None:
    """Bring a model up on all boards of a night, say what was found and what changed since last
    night, and tell people.

    Boards are taken in random order, each for itself: a sick one is named and costs the others
    nothing. Each night measures anew; --resume goes on with one that was stopped or killed. What
    is worse than five nights alike is a suspect, and counts only when two A/Bs of a good night's
    engine against tonight's confirm it: see `harness results alerts`.

    The timer's service reads HARNESS_NOTIFY_URL, and any password, from
    ~/.config/decode-harness/NAME.env; neither is ever written into a unit or a result.

    \b
    Examples
      harness nightly --tag nightly --minutes 30
      harness nightly --stage tiny --stage accuracy --json > night.json
      harness nightly --tag nightly --install --at 02:00
      harness nightly --install --dry-run
      harness nightly --uninstall
      0 2 * * *  cd ~/farm && harness nightly --tag nightly    (as a line of a crontab)

    Exit codes: 0 every board passed (or warned), 1 a finding on some board or a change for the
    worse that was confirmed, 2 wrong use, or trouble with boards and no finding.
    """
    from harness.farm.selection import bringup_options, choose_boards, choose_stages, engine_words

    if uninstall:
        if install or dry_run:
            raise HarnessError("--uninstall together with --install or --dry-run")
        _uninstall(timer)
        return
    if dry_run and not install:
        raise HarnessError("--dry-run", expected="it together with --install")
    engine = engine_words(engine_option or (), unit=unit, executor=executor, kv=kv)
    boards = choose_boards(farm, board or (), tag or ())
    stages = choose_stages(stage or ())
    options = bringup_options(
        stress_minutes=minutes,
        context=context,
        curve_seconds=curve_seconds,
        stall_seconds=stall_seconds,
        seed=seed,
        engine=engine,
    )
    if install:
        words = [*_repeated("--board", board), *_repeated("--tag", tag)]
        words += [*_repeated("--stage", stage), *_repeated("--engine-option", engine_option)]
        words += _given(
            {
                "--model": None if model is None else model.absolute(),
                "--minutes": minutes,
                "--context": context,
                "--curve-seconds": curve_seconds,
                "--seed": seed,
                "--stall-seconds": stall_seconds,
                "--unit": unit,
                "--executor": executor,
                "--kv": kv,
                "--notify": notify.value,
            }
        )
        words += [] if recheck else ["--no-recheck"]
        words += [] if confirm else ["--no-confirm"]
        _install(timer, farm, words, at, dry_run=dry_run)
        return
    told = _night(
        boards, model, options, stages, notify, recheck=recheck, confirm=confirm, resume=resume,
        as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(told.exit_code)


def _night(
    boards: Sequence[Board],
    model: Path | None,
    options: BringupOptions,
    stages: Sequence[Stage],
    when: Notify,
    *,
    recheck: bool,
    confirm: bool,
    resume: bool,
    as_json: bool,
) -> Report:
    from harness.deploy.kept import keep
    from harness.farm.nightly import report
    from harness.farm.notify import trouble
    from harness.farm.selection import check_context
    from harness.farm.series import KIND
    from harness.jobs.engines import likely_layout
    from harness.store import Store
    from harness.store.alerts import Alerts

    # Else a night would keep what a killed one had judged the night before.
    mode = which(resume, not resume)
    deaf = trouble()
    if deaf:
        say(f"nobody will be told: {deaf}")  # now, and not only in the morning
    began = time.monotonic()
    try:
        prepared = prepare(model, likely_layout(boards, options.engine))
        check_context(prepared, options)  # before a database is made
        with Store.open() as store:
            if recheck:
                _recheck(boards, store)
            build = keep()  # a later night may have to be compared with this engine
            result = run(boards, prepared, options, stages, store, resume=mode, kind=KIND)
            Alerts(store).record_build(result.id, build)
            if not result.interrupted:
                _settle(boards, prepared, options, store, result.id, confirm=confirm)
            told = report(store, result, time.monotonic() - began)
    except HarnessError as error:
        _tell(f"nightly: not run on {len(boards)} boards", [str(error)])
        raise
    if as_json:
        emit_json(told.as_json())
    else:
        for line in told.lines():
            emit(visible(line))
    changed = bool(told.changes.flips or told.changes.shifts)
    if when is Notify.ALWAYS or told.exit_code or (when is Notify.CHANGES and changed):
        _tell(told.title, told.lines())
    return told


def _settle(
    boards: Sequence[Board],
    model: PreparedModel,
    options: BringupOptions,
    store: Store,
    campaign: str,
    *,
    confirm: bool,
) -> None:
    """Settles what is worse than the nights before; the ledger keeps what became of it."""
    from harness.cli.care import check
    from harness.farm.confirming import Ab, BoardAb, settle
    from harness.farm.series import tonight
    from harness.farm.stopping import stop_on_signal

    nights = tonight(store, campaign)
    if not any(night.suspects for night in nights):
        return
    if not confirm:  # else they would become what later nights are held against
        none = Ab(why="no A/B was wanted (--no-confirm)")
        settle(nights, campaign, store, lambda *_: none, lambda board: None)
        return
    named = {board.name: board for board in boards}

    def note(text: str) -> None:
        say(visible(text))

    well: dict[str, bool] = {}
    for night in nights:  # before the A/Bs, and one after the other: each is a campaign
        if night.suspects and night.together.shifted and night.board in named:
            note(f"{night.board}: {night.together.share:.0%} of its series moved: is it well?")
            found = check([named[night.board]], store).results.get(night.board, {})
            outcomes = [item.outcome for item in found.values()]
            if outcomes:
                well[night.board] = all(one.lets_next_stage_run for one in outcomes)
    with stop_on_signal(note) as stop:
        command = ["harness", *sys.argv[1:]]
        ab = BoardAb(boards, model, options.engine, store, command, note, stop.is_set)
        settle(nights, campaign, store, ab, well.get, note)


def _recheck(boards: Sequence[Board], store: Store) -> None:
    """A board that was mended by day is measured again, without anybody's thinking of it."""
    from harness.cli.care import check, set_aside

    waiting = set_aside(store, boards)
    if waiting:
        say(f"are they well again? {', '.join(board.name for board in waiting)}")
        check(waiting, store)


def _tell(title: str, lines: Sequence[str]) -> None:
    """Tells people. Who cannot be reached loses a message, not the night's result."""
    from harness.farm.notify import send, targets

    if not targets():
        return
    try:
        count = send(title, "\n".join(visible(line) for line in lines))
    except HarnessError as error:
        say(f"nobody was told: {error}")
    else:
        say(f"told {count} target{'' if count == 1 else 's'}")


def _install(name: str, farm: Path, words: Sequence[str], at: str, *, dry_run: bool) -> None:
    from harness.farm import timer

    # -P: not from the working folder, where another checkout may lie.
    program = [sys.executable, "-P", "-m", "harness.cli.main", "nightly"]
    command = [*program, f"--farm={farm.absolute()}", *words]
    environment = {key: os.environ[key] for key in PASSED_ON if os.environ.get(key)}
    environment = {key: str(Path(value).absolute()) for key, value in environment.items()}
    files = timer.units(name, command, Path.cwd(), environment, at)
    for file, text in files.items():
        emit(f"# {timer.unit_folder() / file}\n{text}")
    if dry_run:
        say("nothing was written (--dry-run)")
        return
    done = timer.install(files, name)
    for line in done:
        say(line)
    say(
        f"the next run: systemctl --user list-timers {name}.timer; what it said: "
        f"journalctl --user -u {name}; `loginctl enable-linger` lets it run while nobody is "
        "logged in"
    )
    if any(line.startswith("not done") for line in done):
        raise typer.Exit(EXIT_TROUBLE)


def _uninstall(name: str) -> None:
    from harness.farm import timer

    for line in timer.uninstall(name):
        say(line)


def _repeated(option: str, values: Sequence[str] | None) -> list[str]:
    return [f"{option}={value}" for value in values or ()]


def _given(options: dict[str, object]) -> list[str]:
    """Options with their values, in a form that no value can be taken for an option."""
    return [f"{option}={value}" for option, value in options.items() if value is not None]
