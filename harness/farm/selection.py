"""What a user asked for, checked: boards with extra environment, stages, options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.credentials import has_password
from harness.errors import HarnessError
from harness.inventory import Engine, load_farm
from harness.inventory.scalars import Refused, is_secret_name

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.jobs.base import BringupOptions, Stage


def choose_boards(
    farm: Path, names: Sequence[str], tags: Sequence[str], environment: Sequence[str] = ()
) -> list[Board]:
    """The boards of the file `farm` that were asked for. `environment`: `BOARD:KEY=VALUE` each.

    Raises HarnessError for an unknown board or tag, for what is no assignment, for a fault that the
    engine would not know how to plant, and for a variable whose name says that it is a secret (the
    same rule as in devices.yaml). No message repeats a value that may be a secret.
    """
    boards = load_farm(farm).select(names, tags)
    added: dict[str, dict[str, str]] = {}
    for text in environment:
        name, key, value = _assignment(text)
        if name not in (board.name for board in boards):
            raise HarnessError(
                f"--board-env {name}:{key} is for {name!r}, which takes no part",
                expected="one of " + ", ".join(board.name for board in boards),
            )
        added.setdefault(name, {})[key] = value
    chosen = [
        board.model_copy(update={"environment": {**board.environment, **added[board.name]}})
        if board.name in added
        else board
        for board in boards
    ]
    for board in chosen:
        _check_faults(board)
    return chosen


def _check_faults(board: Board) -> None:
    """The engine refuses these too, but on the board, where it would look like its own failure."""
    fault = board.environment.get("ENGINE_FAULT")
    if not fault:
        return
    from engine.units.faulty import parse  # numpy, only where a fault is asked for

    try:
        parse(fault)
    except ValueError as error:
        raise HarnessError(
            str(error),
            where=f"environment of board {board.name}",
            remedy="correct it in devices.yaml or in --board-env",
        ) from error


def _assignment(text: str) -> tuple[str, str, str]:
    name, colon, rest = text.partition(":")
    key, equals, value = rest.partition("=")
    if not (name and colon and equals) or not key.isidentifier() or not key.isascii():
        # A value may be a secret that was meant for elsewhere: it is not repeated.
        shown = text.partition("=")[0] + ("=…" if "=" in text else "")
        raise HarnessError(f"--board-env {shown!r}", expected="BOARD:KEY=VALUE")
    if is_secret_name(key) or has_password(value):
        why = "the name says that its value is a secret"
        if has_password(value):
            why = "its value is a URL with a password in it"
        raise HarnessError(
            f"--board-env {name}:{key}: {why}",
            expected="no secrets: the command is stored with its results",
            remedy="keep it in a file on the board, and give the engine that file's path",
        )
    return name, key, value


def choose_stages(names: Sequence[str]) -> list[Stage]:
    """The stages by name, in the order that a bring-up runs them; all for none."""
    from harness.jobs import stages

    known = stages()
    for name in names:
        if name not in [stage.name for stage in known]:
            near = difflib.get_close_matches(name, [stage.name for stage in known], 1)
            raise HarnessError(
                f"no stage {name!r}",
                expected="one of " + ", ".join(stage.name for stage in known),
                remedy=f"did you mean {near[0]!r}?" if near else "",
            )
    return [stage for stage in known if not names or stage.name in names]


def check_context(model: PreparedModel, options: BringupOptions) -> None:
    """Raises HarnessError for a designed context that the model was not made for."""
    largest = model.hyperparameters.context
    if options.context is not None and options.context > largest:
        raise HarnessError(
            f"a context of {options.context}",
            expected=f"at most {largest}, which the model {model.name} was made for",
            remedy="choose a shorter --context, or leave it out",
        )


def engine_words(
    words: Sequence[str],
    *,
    unit: str | None = None,
    executor: str | None = None,
    kv: str | None = None,
) -> Engine:
    """What the command line asks of the engine; `words` are NAME=VALUE each, a list as A,B.

    Raises HarnessError naming the option.
    """
    said: dict[str, tuple[str, Any]] = {}  # option → (how it was written, value)
    for name, value in (("unit", unit), ("executor", executor), ("kv", kv)):
        if value is not None:
            said[name] = (f"--{name} {value}", value)
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise HarnessError(f"--engine-option {word}", expected="NAME=VALUE, such as kv=int8")
        if name in said:
            raise HarnessError(
                f"--engine-option {word} beside {said[name][0]}", expected="one of them"
            )
        parts = [part for part in text.split(",") if part]
        listed = name in ("passes_off", "float_layers")
        said[name] = (f"--engine-option {word}", parts if listed else text)
    try:
        return Engine.model_validate({name: value for name, (_, value) in said.items()})
    except ValidationError as error:
        raise _engine_error(
            error, {name: written for name, (written, _) in said.items()}
        ) from error


def _engine_error(error: ValidationError, written: Mapping[str, str]) -> HarnessError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    where = written.get(name) or " ".join(written.values())
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, Refused):
        return HarnessError(cause.found, where=where, expected=cause.expected, remedy=cause.remedy)
    known = list(Engine.model_fields)
    near = difflib.get_close_matches(name, known, 1)
    return HarnessError(
        f"no engine option {name!r}",
        where=where,
        expected="one of " + ", ".join(known),
        remedy=f"did you mean {near[0]!r}?" if near else "",
    )


def bringup_options(**values: Any) -> BringupOptions:
    """Options of a bring-up. Raises HarnessError naming the one that is out of range."""
    from harness.jobs.base import BringupOptions

    try:
        return BringupOptions(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise HarnessError(
            f"{name}: found {first.get('input')!r}", expected=first["msg"]
        ) from error
