"""Options and arguments that the commands of `harness boards` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FarmOption = Annotated[Path, typer.Option("--farm", help="The file that describes the boards.")]
TagOption = Annotated[
    list[str] | None,
    typer.Option("--tag", "-t", metavar="TAG", help="Only boards with this tag; again: with all."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
NamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="Boards; all without a name.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A board of the farm.")]
DEVICES = Path("devices.yaml")
