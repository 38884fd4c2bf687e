"""What A and B are: a few words each, over what both have in common.

kv=int8  threads=2        options of the engine, as --engine-option takes them
model=q8.gguf             another model, or the same in another scheme
rev=v1.4                  the engine of a revision; rev=. is the one that is checked out
engine=3f2a91bc           an engine that a night kept, by the first characters of its hash
env=KEY=VALUE             a variable of the engine's environment
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board, Engine
    from harness.jobs.engines import EngineChoice

AS_IT_IS = "."


@dataclasses.dataclass(frozen=True)
class Words:
    """What was said of one arm, sorted."""

    options: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    model: str | None = None
    revision: str | None = None
    engine: str | None = None

    @property
    def source(self) -> str | None:
        """Which engine it is, in a word; None: this checkout's."""
        if self.revision is not None and self.revision != AS_IT_IS:
            return f"rev={self.revision}"
        return f"engine={self.engine}" if self.engine is not None else None


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the two, ready to run. `board` has its environment; `sources` is the folder of
    another engine than this checkout's; `choice` says how it runs where that was decided already.
    `build` names the content of the engine."""

    title: str
    board: Board
    engine: Engine
    model: PreparedModel
    build: str
    sources: Path | None = None
    choice: EngineChoice | None = None
    source: str = "this checkout"

    def config(self) -> dict[str, Any]:
        """Everything that tells it from another, in plain JSON."""
        found: dict[str, Any] = {
            "engine": self.source,
            "build": self.build,
            "model": self.model.name,
            "scheme": self.model.scheme,
            "package": self.model.sha256,
        }
        options = self.choice.options.to_mapping() if self.choice else self.engine.asked
        found |= {f"option {name}": value for name, value in sorted(options.items())}
        found |= {f"env {name}": value for name, value in sorted(self.board.environment.items())}
        return found


def parse(letter: str, text: str) -> Words:
    """Raises HarnessError for words that say two things, or nothing that is known here."""
    options: list[str] = []
    environment: list[str] = []
    single: dict[str, str] = {}
    try:
        pieces = shlex.split(text)
    except ValueError as error:
        raise HarnessError(
            f"{letter}: {text!r}: {error}", expected="words as in a shell"
        ) from error
    for piece in pieces:
        name, equals, value = piece.partition("=")
        if piece == AS_IT_IS:
            continue
        if not equals or not name or not value:
            raise HarnessError(
                f"{letter}: {piece!r}",
                expected=f"NAME=VALUE, such as kv=int8, rev=v1.4 or model=FILE; {AS_IT_IS!r} alone "
                "is the engine as it is",
            )
        if name == "env":
            environment.append(value)
        elif name in ("model", "rev", "engine"):
            if name in single:
                raise HarnessError(f"{letter}: {name}= twice", expected="once")
            single[name] = value
        else:
            options.append(piece)
    if "rev" in single and "engine" in single:
        raise HarnessError(f"{letter}: rev= and engine=", expected="one of them")
    return Words(
        tuple(options), tuple(environment), single.get("model"), single.get("rev"),
        single.get("engine"),
    )  # fmt: skip


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, of A, of B) of two `config`s where they differ; "–" where one says nothing."""
    names = dict.fromkeys([*a, *b])
    return [
        (name, _word(a.get(name)), _word(b.get(name)))
        for name in names
        if a.get(name) != b.get(name)
    ]


def _word(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def titles(texts: Sequence[str]) -> list[str]:
    """What to call the arms: what was said of them, or "as it is"."""
    return [" ".join(text.split()) if text.strip() not in ("", AS_IT_IS) else "as it is"
            for text in texts]  # fmt: skip
