"""Level changes in a noisy sequence: how many, where, and whether each of them can be believed.

The model is y = base·coefficients + Σ d_j·[index ≥ c_j] + noise, by least squares. Change points
are added one at a time, always the one that lowers the residual most, and after each the others
are moved to where they fit best beside it; the number with the lowest BIC stays (G. Schwarz,
"Estimating the dimension of a model", Ann. Statist. 6, 1978; a step counts as two parameters, its
height and its place). Then each step must earn its place beside the others, or it goes: it lowers
the BIC by more than 10 ("very strong" in R. Kass and A. Raftery, "Bayes factors", JASA 90, 1995),
is at least 3 % high, and more than 4 standard errors, since searching for the place inflates
height / standard error. Last, all steps together must beat each smooth rival (a bend, a drift) by
the same 10: steps can imitate a smooth curve well, and a curve steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

MIN_SIDE = 3  # points on each side of a change
MIN_DELTA_BIC = 10.0
MIN_JUMP = 0.03
MIN_STANDARD_ERRORS = 4.0

Array = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Least squares of y on base and steps."""

    places: tuple[int, ...]  # candidate index of each step, ascending
    coefficients: Array  # (base columns + steps,)
    fitted: Array  # (n,)
    rss: float
    bic: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """What steps are looked for in. `free` is the number of values that the noise is judged by:
    n, less what nuisance columns of the base (a level per group) use up.
    """

    y: Array  # (n,)
    base: Array  # (n, k), full column rank
    candidates: Array  # (C, n): the step at each place
    relative: Callable[[Fit, int], float]  # ratio of after to before for step number i of a fit
    free: int
    noise_floor: float  # residual per value that is rounding: exact data must not win any test
    rivals: tuple[Array, ...] = ()  # (n, k'): bases that may explain y without any step
    gap: int = MIN_SIDE  # candidates between two steps
    most: int = 7  # steps

    @property
    def parameters(self) -> int:
        return int(self.base.shape[1]) - (len(self.y) - self.free)

    def fit(self, places: tuple[int, ...]) -> Fit:
        design = np.concatenate([self.base, self.candidates[list(places)].T], axis=1)
        coefficients = np.linalg.lstsq(design, self.y, rcond=None)[0]
        fitted = design @ coefficients
        rss = float(np.sum((self.y - fitted) ** 2))
        return Fit(places, coefficients, fitted, rss, self._bic(rss, len(places)))

    def search(self) -> Fit:
        """The steps that can be believed; no places if there are none."""
        q, _ = np.linalg.qr(self.base)
        places: tuple[int, ...] = ()
        best = self.fit(())
        for _ in range(self.most):
            added = self._best_place(q, places)
            if added is None:
                break
            places = self._settled(q, (*places, added))
            grown = self.fit(places)
            if grown.bic < best.bic:
                best = grown
        best = self.pruned(best)
        smooth = min(
            (self._bic_of(rival) for rival in self.rivals), default=best.bic + 2 * MIN_DELTA_BIC
        )
        return best if smooth - best.bic > MIN_DELTA_BIC else self.fit(())

    def _bic_of(self, base: Array) -> float:
        rss = float(np.sum((self.y - base @ np.linalg.lstsq(base, self.y, rcond=None)[0]) ** 2))
        more = int(base.shape[1]) - int(self.base.shape[1])
        return self._bic(rss, 0) + more * math.log(len(self.y))

    def pruned(self, fit: Fit) -> Fit:
        """Takes away the least convincing step until each of the rest is convincing."""
        while fit.places:
            strength = [self._strength(fit, index) for index in range(len(fit.places))]
            weakest = int(np.argmin(strength))
            if strength[weakest] > 1:
                return fit
            fit = self.fit(fit.places[:weakest] + fit.places[weakest + 1 :])
        return fit

    def _strength(self, fit: Fit, index: int) -> float:
        """Above 1 if the step passes all conditions: the smallest of its margins."""
        without = self.fit(fit.places[:index] + fit.places[index + 1 :])
        design = np.concatenate([self.base, self.candidates[list(fit.places)].T], axis=1)
        column = self.base.shape[1] + index
        others = np.delete(design, column, axis=1)
        own = design[:, column]
        own = own - others @ np.linalg.lstsq(others, own, rcond=None)[0]
        spare = max(self.free - self.parameters - len(fit.places), 1)
        floor = len(self.y) * self.noise_floor**2
        error = math.sqrt(max(fit.rss, floor) / spare / float(np.sum(own**2)))
        return min(
            (without.bic - fit.bic) / MIN_DELTA_BIC,
            # A step of exactly the limit is one; the others must exceed theirs.
            abs(self.relative(fit, index) - 1) / MIN_JUMP * (1 + 1e-9),
            abs(float(fit.coefficients[column])) / error / MIN_STANDARD_ERRORS,
        )

    def _settled(self, q: Array, places: tuple[int, ...]) -> tuple[int, ...]:
        """Moves each step to its best place beside the others, until none moves."""
        current = list(places)
        for _ in range(4):
            before = list(current)
            for index in range(len(current)):
                others = tuple(current[:index] + current[index + 1 :])
                moved = self._best_place(q, others)
                if moved is not None:
                    current[index] = moved
            if current == before:
                break
        return tuple(sorted(current))

    def _best_place(self, q: Array, places: tuple[int, ...]) -> int | None:
        """Where one more step lowers the residual most; None if there is no room for it."""
        if places:
            more = self.candidates[list(places)].T
            more = more - q @ (q.T @ more)
            q = np.concatenate([q, np.linalg.qr(more)[0]], axis=1)
        residual = self.y - q @ (q.T @ self.y)  # (n,)
        left = self.candidates - (self.candidates @ q) @ q.T  # (C, n)
        power = np.sum(left**2, axis=1)  # (C,)
        room = power > 1e-9
        for place in places:
            room &= np.abs(np.arange(len(power)) - place) >= self.gap
        if not room.any():
            return None
        gain = np.where(room, (left @ residual) ** 2 / np.where(room, power, 1.0), -1.0)
        return int(np.argmax(gain))

    def _bic(self, rss: float, steps: int) -> float:
        n = self.free
        per_value = max(rss, len(self.y) * self.noise_floor**2) / n
        return n * math.log(per_value) + (self.parameters + 2 * steps) * math.log(len(self.y))


def steps_at(values: npt.NDArray[Any], places: npt.NDArray[Any]) -> Array:
    """(C, n): 1 where values ≥ the place, else 0. values (n,), places (C,)."""
    return (values >= places[:, None]).astype(np.float64)
