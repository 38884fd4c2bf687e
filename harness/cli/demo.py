"""`harness demo`: the whole product on this machine, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.bringup import (
    FarmOption,
    FreshOption,
    JsonOption,
    ResumeOption,
    prepare,
    run,
    which,
)
from harness.cli.output import emit, emit_json, guard, say, visible
from harness.errors import HarnessError

# Three boards share this machine's processor here, and the curve must reach its end in a minute.
DEMO_CONTEXT = 1024  # positions
PROFILE_S = 8.0  # for each board

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@guard
def demo(
    farm: FarmOption = Path("devices.yaml"),
    stress_minutes: Annotated[
        float, typer.Option(min=0.1, help="Length of the stress stage.")
    ] = 1.0,
    resume: ResumeOption = False,
    fresh: FreshOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring SmolLM2-135M-Instruct up on the virtual boards of devices.yaml, and show it.

    Fetches the model once (93 MB), starts the boards, runs all four stages on all of them side by
    side with a short stress stage. Then profiles one board after the other, since boards that share
    a processor cannot tell what limits them while the others compute, and builds the dashboard.
    Exits 0 only if all of them passed.
    """
    from dashboards.site import build_site
    from harness.cli.summary import print_summary
    from harness.farm.runner import Resume
    from harness.farm.selection import bringup_options, check_context, choose_boards, choose_stages
    from harness.jobs.engines import likely_layout
    from harness.jobs.profile import PROFILE
    from harness.paths import state_dir
    from harness.store import Store

    boards = [board for board in choose_boards(farm, (), ()) if board.virtual is not None]
    if not boards:
        raise HarnessError(
            "no virtual board",
            where=str(farm),
            expected="at least one board with 'virtual: {}'",
            remedy="run `harness bringup` for boards of hardware",
        )
    options = bringup_options(stress_minutes=stress_minutes, context=DEMO_CONTEXT)
    model = prepare(None, likely_layout(boards, options.engine))
    check_context(model, options)
    with Store.open() as store:
        result = run(boards, model, options, choose_stages(()), store, resume=which(resume, fresh))
        if not as_json:
            print_summary(result)
        alone = bringup_options(context=DEMO_CONTEXT, profile_seconds=PROFILE_S)
        profiles = []
        for board in boards if result.exit_code == 0 else ():
            one = run([board], model, alone, [PROFILE], store, resume=Resume.NEVER, kind="profile")
            profiles.append(one)
            if not as_json:
                for item in (item for row in one.results.values() for item in row.values()):
                    emit(visible(f"{item.board}: {item.verdict.headline}"))
        page = build_site(store, state_dir() / "dashboard")
    if as_json:
        told = [one.as_json() for one in profiles]
        emit_json({**result.as_json(), "profiles": told, "dashboard": str(page)})
    else:
        emit(f"dashboard: {page}")
        say("the real length of the stress stage: harness bringup --stress-minutes 30")
    raise typer.Exit(max(one.exit_code for one in (result, *profiles)))
