"""Ranking what each option costs, where a loss is graded: many options, each a little.

Every option is left out of all, and taken alone: 2 N + 2 runs. A set of culprits would be a wrong
answer there, because which option crosses a limit depends on the order in which they are added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from harness.bisect.trials import Result, Trial

ALONE = 0.5  # of the whole loss: a single option that explains this much alone is no graded loss


@dataclasses.dataclass(frozen=True)
class Effect:
    """What one option costs, in the unit of the loss. None: that run could not be made.

    `left_out`: by how much the loss falls without it; `alone`: by how much it rises with it alone.
    """

    name: str
    left_out: float | None
    alone: float | None

    @property
    def mean(self) -> float | None:
        """Of both sides, or the one that there is."""
        known = [value for value in (self.left_out, self.alone) if value is not None]
        return sum(known) / len(known) if known else None


@dataclasses.dataclass(frozen=True)
class Ranked:
    """The end of a ranking: the loss with nothing and with everything, the largest effect first."""

    none: float | None
    all: float | None
    effects: tuple[Effect, ...]

    @property
    def graded(self) -> bool:
        """Whether no single option explains half of the loss."""
        first = self.effects[0].mean if self.effects else None
        if first is None or self.all is None or self.none is None:
            return True
        return first < ALONE * (self.all - self.none)

    def share(self, effect: Effect) -> float | None:
        """Of the whole loss; None where there is none."""
        if self.all is None or self.none is None or effect.mean is None:
            return None
        return effect.mean / (self.all - self.none) if self.all > self.none else None


class Ranking:
    """Asks for the loss with sets of options. The same answers give the same questions.

    `on` of each option are the options that are on when it is taken alone, `off` those that are on
    when it is left out: with what it needs, and without what needs it.
    """

    phase = "ranking"

    def __init__(
        self,
        names: Sequence[str],
        on: Mapping[str, frozenset[str]],
        off: Mapping[str, frozenset[str]],
    ) -> None:
        self._names, self._on, self._off = tuple(names), dict(on), dict(off)
        wanted = [frozenset(), frozenset(names)]
        for name in names:
            wanted += [off[name], on[name]]
        self._questions = tuple(dict.fromkeys(wanted))  # two options may ask the same
        self._losses: dict[frozenset[str], float | None] = {}

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def done(self) -> int:
        return len(self._losses)

    def ask(self) -> frozenset[str] | Ranked:
        """The next set of options to run with, or the end."""
        for question in self._questions:
            if question not in self._losses:
                return question
        return self._ranked()

    def tell(self, options: frozenset[str], trial: Trial) -> None:
        """The loss that was measured with `options`. INFRA is asked again; a trial without a value
        leaves its place empty."""
        if trial.result is not Result.INFRA and options in self._questions:
            self._losses[options] = trial.value

    def _ranked(self) -> Ranked:
        none, everything = self._losses[frozenset()], self._losses[frozenset(self._names)]
        effects = [
            Effect(
                name,
                _difference(everything, self._losses[self._off[name]]),
                _difference(self._losses[self._on[name]], self._base(name)),
            )
            for name in self._names
        ]
        order = sorted(effects, key=lambda effect: -(effect.mean or 0.0))
        return Ranked(none, everything, tuple(order))

    def _base(self, name: str) -> float | None:
        """The loss with what an option needs, without itself."""
        return self._losses.get(self._on[name] - {name}, self._losses[frozenset()])


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
