"""How commands talk: results on stdout, everything else on stderr, one message per error.

Exit codes: 0 good, 1 a finding (a stage failed), 2 wrong use or infrastructure.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import typer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

EXIT_GOOD = 0
EXIT_FINDING = 1
EXIT_TROUBLE = 2


@functools.cache
def console() -> Console:
    """The console for people: stderr, so that stdout holds nothing but the result."""
    from rich.console import Console  # 60 ms that `--help` need not pay

    return Console(stderr=True, highlight=False, emoji=False)  # ":ab:" is text


def say(text: str, style: str | None = None) -> None:
    """One line for people on stderr. `text` is shown as it stands: no markup is read from it."""
    console().print(text, style=style, markup=False, soft_wrap=True)


def emit(text: str) -> None:
    """One line of the result on stdout."""
    typer.echo(text)


def emit_json(value: Any) -> None:
    """The whole result on stdout as one JSON document. Values that JSON lacks become strings."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=_plain)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    """Records as objects, collections as lists, everything else (paths, times) as text."""
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    item = getattr(value, "item", None)  # numpy scalars
    if callable(item):
        return item()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


def complain(message: str) -> None:
    """An error for people on stderr, with control characters of a board's text made visible."""
    say("error: " + visible(message), style="bold red")


def visible(text: str) -> str:
    """`text` with every control character but newline and tab escaped, safe for a terminal."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else ascii(character)[1:-1]
        for character in text
    )


@contextmanager
def _guard() -> Iterator[None]:
    from engine.formats.checkpoint import FormatError
    from engine.records import RecordError
    from harness.errors import HarnessError

    try:
        yield
    except (HarnessError, FormatError, RecordError) as error:
        complain(str(error))
        raise typer.Exit(EXIT_TROUBLE) from error
    except KeyboardInterrupt as error:
        complain("interrupted")
        raise typer.Exit(EXIT_TROUBLE) from error


@overload
def guard() -> AbstractContextManager[None]: ...


@overload
def guard(function: Callable[P, R]) -> Callable[P, R]: ...


def guard(
    function: Callable[P, R] | None = None,
) -> Callable[P, R] | AbstractContextManager[None]:
    """Turns an error that a user can mend into one message and exit code 2.

    Use it as a decorator of a command (`@guard`) or around a block (`with guard():`). Any other
    exception is a defect of ours and keeps its traceback.
    """
    if function is None:
        return _guard()

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with _guard():
            return function(*args, **kwargs)

    return guarded
