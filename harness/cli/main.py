"""The `harness` command: one module per noun, imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from harness.cli.output import guard


class Noun(NamedTuple):
    module: str  # offers `app`, a Typer
    help: str


NOUNS = {
    "demo": Noun("harness.cli.demo", "Bring a real model up on three virtual boards, in minutes."),
    "bringup": Noun("harness.cli.bringup", "Run the four bring-up stages on boards side by side."),
    "stress": Noun("harness.cli.stress", "Run only the stress stage, at its real length."),
    "nightly": Noun(
        "harness.cli.nightly", "A night over all boards, for cron or a timer: what changed?"
    ),
    "align": Noun(
        "harness.cli.align", "Compare every op with the reference, and name the first bad one."
    ),
    "compare": Noun(
        "harness.cli.compare", "Is B better than A on this board? In turns, with a verdict."
    ),
    "threads": Noun(
        "harness.cli.threads", "Measure in how many threads and on which cores boards are fastest."
    ),
    "profile": Noun(
        "harness.cli.profile", "Time every op of a token, and say what limits a board's speed."
    ),
    "plan": Noun(
        "harness.cli.plan", "Does a model fit a board, how fast at most, which scheme to try first?"
    ),
    "boards": Noun(
        "harness.cli.boards", "List, probe, enrol, check, switch boards; say why one is out."
    ),
    "bisect": Noun(
        "harness.cli.bisect", "Name what is to blame for a failure: a race, an option, a commit."
    ),
    "triage": Noun(
        "harness.cli.triage", "Explain crashes: class, instruction, signature, how to see it again."
    ),
    "report": Noun(
        "harness.cli.report", "Is a board accepted, line by line? One file to mail, or JSON."
    ),
    "results": Noun("harness.cli.results", "Show stored results; export them as CSV or JSON."),
    "dashboard": Noun("harness.cli.dashboard", "Build or serve the dashboard of stored results."),
}

MANUAL = """Bring up, test and profile LLM decode on a farm of edge boards over SSH.

Boards are described in devices.yaml; the one in the repository describes three virtual boards, so
that every command works on a machine without hardware.

\b
First steps
  harness demo                              three virtual boards, all stages, a dashboard
  harness boards list                       the boards of devices.yaml
  harness boards probe rk3588-01            what a board is: cores, memory, Python, folders
  harness boards enrol rk3588-01            pin a board's host key in devices.yaml

\b
Bring a model up
  harness bringup --model model.gguf --board rk3588-01
  harness bringup --model model.gguf --tag nightly --stress-minutes 30
  harness bringup --stage tiny --stage accuracy --json > result.json
  harness stress --board rk3588-01          30 minutes of growing dialogues
  harness align --board rk3588-01           which op goes wrong first
  harness threads --board rk3588-01         how many threads, on which cores
  harness plan --board rk3588-01 --model model.gguf   does it fit, how fast at most
  harness profile --board rk3588-01         what limits it; --trace FILE opens in Perfetto
  harness compare kv=f16 kv=int8 --board rk3588-01   is B better than A?
  harness nightly --tag nightly             every board, and what changed since last night

\b
Name the culprit
  harness triage last                       the newest crash: its class and its instruction
  harness bisect race --board rk3588-01     the async steps that race, and the missing event
  harness bisect options --board pi4-01     the options that make it fail
  harness bisect revision v1.4 HEAD --what accuracy --board rk3588-01

\b
Look at results
  harness results show                      the newest outcome of each board and stage
  harness results alerts                    what nights suspected, and what became of it
  harness report --board rk3588-01          the acceptance report; --out writes one file to mail
  harness results export runs.csv           or .json, .parquet
  harness dashboard build                   static pages that open from file://

\b
Exit codes
  0  every stage passed, if need be with warnings
  1  a finding: a stage failed, or could not be judged
  2  wrong use or infrastructure: a typo, an unreachable board, a full disk

Results go to stdout (--json for programs), progress and messages to stderr. State is kept in
.harness/ of the current folder, or in $HARNESS_HOME; downloads in the user's cache folder, or in
$HARNESS_CACHE.
"""


class LazyGroup(TyperGroup):
    """Commands known by name and one line of help; a module is imported when its command runs.

    `harness --help` thus answers in a fraction of a second, without pandas or paramiko.
    """

    _listing = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, noun in NOUNS.items():
            self.add_command(TyperCommand(name, help=noun.help))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | TyperGroup | None:  # type: ignore[override]  # typer's own class of its vendored click
        if self._listing or cmd_name not in NOUNS:
            return super().get_command(ctx, cmd_name)  # type: ignore[return-value]  # one of the two
        command = typer.main.get_command(importlib.import_module(NOUNS[cmd_name].module).app)
        command.name = cmd_name
        return command  # type: ignore[return-value]  # always one of the two

    def format_help(self, ctx: typer.Context, formatter: object) -> None:  # type: ignore[override]  # the same
        self._listing = True
        try:
            super().format_help(ctx, formatter)  # type: ignore[arg-type]  # the same
        finally:
            self._listing = False

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # the same
        with guard():
            return super().invoke(ctx)


app = typer.Typer(
    cls=LazyGroup,
    help=MANUAL,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"harness {version('decode-harness')}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Options of the whole command; the manual is the group's help."""


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="harness")


if __name__ == "__main__":
    main()
