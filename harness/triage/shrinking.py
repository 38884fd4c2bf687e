"""Making a crash smaller while it stays the same one: which recipe is tried next, and what is kept.

Pure: `ask` gives the next trial, `tell` takes its answer, so that a search goes on from its stored
trials. In this order: tokens, new tokens, layers, options, shape. A smaller recipe is kept when it
shows the same crash at least as often as min(1/3, the original's rate) asks for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping
from typing import Any

FIRST_TRIES = 3  # of the recipe as it came
LAST_TRIES = 5  # of the smallest one: what "k of n" is counted by
LEAST_RATE = 1 / 3

# What an option is set to where it can be done without: the plainest way to run.
PLAIN: tuple[tuple[str, Any], ...] = (
    ("threads", 1),
    ("huge_pages", False),
    ("keep", None),
    ("executor", "sync"),
    ("fused", False),
    ("kv_layout", "numpy"),
    ("activations", "float"),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is run. `layers` None: all; `piece` None: the whole prompt in one step. `options` are
    fields of engine.options.EngineOptions."""

    tokens: tuple[int, ...]
    max_new: int
    layers: int | None
    piece: int | None
    options: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(raw: Mapping[str, Any]) -> Recipe:
        """From `to_json`. Raises KeyError or TypeError for anything else."""
        return Recipe(
            tuple(int(token) for token in raw["tokens"]),
            int(raw["max_new"]),
            raw["layers"],
            raw["piece"],
            tuple(sorted((str(key), _frozen(value)) for key, value in raw["options"].items())),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": list(self.tokens),
            "max_new": self.max_new,
            "layers": self.layers,
            "piece": self.piece,
            "options": {key: _thawed(value) for key, value in self.options},
        }

    def __str__(self) -> str:
        layers = "all layers" if self.layers is None else f"{self.layers} layer(s)"
        pieces = "" if self.piece is None else f" in pieces of {self.piece}"
        plain = {**dict(PLAIN), "kv": "f32"}
        told = [
            f"{key}={value}"
            for key, value in self.options
            if value not in (None, False, ()) and value != plain.get(key)
        ]
        words = f"{len(self.tokens)} token(s){pieces}, {self.max_new} new, {layers}"
        return f"{words}; {', '.join(told)}" if told else words


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class Shrinker:
    """`ask` returns a recipe to try once, None when all is known; `tell` takes whether it crashed.

    Afterwards `best` is the smallest recipe that shows it, `shown` of `tried` times, and `needs`
    the options that it does not come without; `found` is False when not even the first recipe
    showed it. `layers` are the model's.
    """

    def __init__(self, first: Recipe, layers: int) -> None:
        self.best, self.found = first, False
        self.rate = 0.0  # of the first recipe
        self.shown = self.tried = 0
        self.needs: list[str] = []  # options without which it does not come, "executor=async"
        self._layers = layers
        self._questions = self._search()
        self._asked: Recipe | None = next(self._questions)

    def ask(self) -> Recipe | None:
        return self._asked

    def tell(self, came: bool) -> None:
        """The answer to what `ask` gave. Raises RuntimeError when nothing was asked."""
        if self._asked is None:
            raise RuntimeError("nothing was asked")
        try:
            self._asked = self._questions.send(came)
        except StopIteration:
            self._asked = None

    def _search(self) -> Generator[Recipe, bool, None]:
        came = 0
        for _ in range(FIRST_TRIES):
            came += yield self.best
        self.rate = came / FIRST_TRIES
        if not came:
            self.tried = FIRST_TRIES
            return
        self.found = True
        for smaller in (self._tokens, self._new, self._fewer_layers, self._options, self._shape):
            yield from smaller()
        for _ in range(LAST_TRIES):
            self.shown += yield self.best
            self.tried += 1

    def _keeps(self, recipe: Recipe) -> Generator[Recipe, bool, bool]:
        """Whether a recipe shows the crash often enough; it is the best one then."""
        least = min(LEAST_RATE, self.rate)
        needed = 1 if self.rate == 1 else 2
        tries, came = math.ceil(needed / least), 0
        for number in range(tries):
            came += yield recipe
            if came >= needed:
                self.best = recipe
                return True
            if came + tries - number - 1 < needed:
                break
        return False

    def _tokens(self) -> Generator[Recipe, bool, None]:
        """The fewest tokens of the prompt: by halves, as if more of them never helped less."""
        low, high = 1, len(self.best.tokens)
        while low < high:
            middle = (low + high) // 2
            change = dataclasses.replace(self.best, tokens=self.best.tokens[:middle])
            if (yield from self._keeps(change)):
                high = middle
            else:
                low = middle + 1

    def _new(self) -> Generator[Recipe, bool, None]:
        low, high = 0, self.best.max_new
        while low < high:
            middle = (low + high) // 2
            if (yield from self._keeps(dataclasses.replace(self.best, max_new=middle))):
                high = middle
            else:
                low = middle + 1

    def _fewer_layers(self) -> Generator[Recipe, bool, None]:
        low, high = 1, self.best.layers or self._layers
        while low < high:
            middle = (low + high) // 2
            if (yield from self._keeps(dataclasses.replace(self.best, layers=middle))):
                high = middle
            else:
                low = middle + 1

    def _options(self) -> Generator[Recipe, bool, None]:
        for name, plain in PLAIN:
            options = dict(self.best.options)
            if options.get(name, plain) == plain:
                continue
            options[name] = plain
            if name == "kv_layout":
                options["kv"] = "f32"  # plain arrays hold nothing else
            before = dict(self.best.options)[name]
            changed = dataclasses.replace(self.best, options=tuple(sorted(options.items())))
            if not (yield from self._keeps(changed)):
                self.needs.append(f"{name}={before}")

    def _shape(self) -> Generator[Recipe, bool, None]:
        if len(self.best.tokens) > 1:
            yield from self._keeps(dataclasses.replace(self.best, piece=1))
