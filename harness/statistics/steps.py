"""Steps and kinks in a curve of time per token (TPOT) against sequence length.

With x the length and u_c(x) = 1 at and behind a change point c, else 0, the models of a curve are

    affine      y = a + b·x
    kink        y = a + b·x + e·(x − k)·u_k(x)
    step        y = a + b·x + Σ d_j·u_j(x)
    step+kink   y = a + b·x + e·(x − k)·u_k(x) + Σ d_j·u_j(x)

fitted to the median over the sweeps at each length, every change with at least three points on
both sides. The one with the lowest BIC wins, and anything but affine must be lower by more than 10;
which steps count at all is told in harness.statistics.changes. (A rule such as "adjacent points
more than 5 % apart" fires on half of all clean curves.)

A step of the clock is told from a step of the engine by *when* it happens. Within one length the
sweeps differ only by time, so throttling shows there, and nothing that depends on length does:
ln y = level of its length + Σ g_j·[t ≥ s_j], under the same rules. It is divided out before the
curve is fitted. A jump that then remains in every sweep at the same length is the engine's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.jobs.details import CurveFit, CurveJump
from harness.statistics.changes import MIN_DELTA_BIC, MIN_SIDE, Array, Fit, Problem, steps_at

_ROUNDING = 1e-6  # relative: residuals below are no noise
_MIN_THROTTLED = 6  # points: fewer in a row are outliers, not a state of the clock


def fit_curve(
    lengths: npt.ArrayLike,
    tpots: npt.ArrayLike,
    sweeps: npt.ArrayLike,
    started_s: npt.ArrayLike,
) -> CurveFit:
    """Fits one curve and names its jumps. All arguments have one value per measured point, (N,).

    `lengths` in positions, `tpots` in milliseconds, `sweeps` the number of the sweep, `started_s`
    in seconds since the run began. `fitted` and the coefficients describe the curve with throttling
    divided out; `slope_us_per_position` and `intercept_ms` its part before the first change.
    A jump's cause is "engine" (in every sweep at this length), "throttling" (from `started_s` on;
    `length` is what was measured then) or "unclear" (a single sweep cannot tell the two apart; or
    most sweeps show it, but not all).

    Raises ValueError for arrays of different lengths, non-finite or non-positive times, or fewer
    than two different lengths.
    """
    x, y = np.asarray(lengths, np.float64), np.asarray(tpots, np.float64)  # (N,), (N,)
    sweep, t = np.asarray(sweeps), np.asarray(started_s, np.float64)  # (N,), (N,)
    if not (x.shape == y.shape == sweep.shape == t.shape) or x.ndim != 1:
        raise ValueError(
            f"expected four arrays of one length, found {x.shape} {y.shape} {sweep.shape} {t.shape}"
        )
    if not (np.isfinite(y).all() and (y > 0).all() and np.isfinite(t).all()):
        raise ValueError("times per token must be finite and positive, their starts finite")
    levels, group = np.unique(x, return_inverse=True)  # (n,), (N,)
    if len(levels) < 2:
        raise ValueError(f"a curve needs at least two different lengths, found {len(levels)}")

    jumps, factor = _throttling(x, y, t, group)
    y = y / factor
    medians = np.array([np.median(y[group == index]) for index in range(len(levels))])  # (n,)
    affine = Curve(levels, medians, None)
    curve, fit = _choose(affine)
    while fit.places:
        causes = [curve.cause(fit, index, x, y, sweep) for index in range(len(fit.places))]
        if "noise" not in causes:
            break
        # Few sweeps show it: an outlier of one or two of them that reached the median.
        places = tuple(p for p, cause in zip(fit.places, causes, strict=True) if cause != "noise")
        fit = curve.problem.pruned(curve.problem.fit(places))
    straight = affine.problem.fit(())
    if straight.bic - curve.bic(fit) <= MIN_DELTA_BIC:
        curve, fit = affine, straight
    for index, place in enumerate(fit.places):
        cause = curve.cause(fit, index, x, y, sweep)
        ratio = curve.problem.relative(fit, index)
        length = int(levels[curve.changes[place]])
        jumps.append(CurveJump(length=length, ratio=ratio, cause=cause))
    return CurveFit(
        model=("step+kink" if fit.places else "kink")
        if curve.kink is not None
        else ("step" if fit.places else "affine"),
        delta_bic=straight.bic - curve.bic(fit),
        intercept_ms=float(fit.coefficients[0]),
        slope_us_per_position=float(fit.coefficients[1]) / float(levels[-1]) * 1e3,
        fitted=tuple((int(a), float(b)) for a, b in zip(levels, fit.fitted, strict=True)),
        jumps=tuple(sorted(jumps, key=lambda jump: jump.length)),
    )


class Curve:
    """One curve with or without a kink, in which steps are looked for.

    x (n,) ascending lengths, y (n,) milliseconds, `kink` the index of its first point behind.
    """

    def __init__(self, x: Array, y: Array, kink: int | None) -> None:
        self.x, self.y, self.kink = x, y, kink
        self.changes = np.arange(MIN_SIDE, max(len(x) - MIN_SIDE + 1, MIN_SIDE))
        if len(x) < 2 * MIN_SIDE + 2:  # too few points for a model with a change
            self.changes = self.changes[:0]
        columns = [np.ones_like(x), x / x[-1]]  # scaled: well conditioned
        if kink is not None:
            columns.append(np.maximum(x - x[kink], 0) / x[-1])
        self.problem = Problem(
            y=y,
            base=np.stack(columns, axis=1),
            candidates=steps_at(x, x[self.changes]),
            relative=self._relative,
            free=len(x),
            noise_floor=float(np.mean(y)) * _ROUNDING,
            rivals=() if len(x) < 4 else (_powers(x, 2), _powers(x, 3)),
        )

    def bic(self, fit: Fit) -> float:
        """Like the fit's, with the kink's place as a parameter unless a step shares it."""
        if self.kink is None or self.kink in self.changes[list(fit.places)]:
            return fit.bic
        return fit.bic + math.log(len(self.x))

    def _relative(self, fit: Fit, index: int) -> float:
        height = float(fit.coefficients[self.problem.base.shape[1] + index])
        after = float(fit.fitted[self.changes[fit.places[index]]])
        return after / (after - height) if after > height else math.inf

    def cause(self, fit: Fit, index: int, x: Array, y: Array, sweep: npt.NDArray[Any]) -> str:
        """engine | unclear | noise: how many sweeps, fitted alone, show at least half the step."""
        base, wanted = self.problem.base, self.problem.relative(fit, index) - 1
        steps = self.problem.candidates[list(fit.places)].T
        design = np.concatenate([base, steps], axis=1)[np.searchsorted(self.x, x)]  # (N, k)
        place = self.changes[fit.places[index]]
        before = fit.fitted[place] - fit.coefficients[base.shape[1] + index]
        shown = []
        for name in np.unique(sweep):
            own = sweep == name
            if np.linalg.matrix_rank(design[own]) < design.shape[1]:
                continue  # this sweep lacks the lengths that would tell
            height = np.linalg.lstsq(design[own], y[own], rcond=None)[0][base.shape[1] + index]
            shown.append(bool(height / before / wanted >= 0.5))
        if len(shown) < 2:
            return "unclear"
        if all(shown):
            return "engine"
        return "unclear" if sum(shown) * 2 > len(shown) else "noise"


def _choose(affine: Curve) -> tuple[Curve, Fit]:
    """The curve and its steps with the lowest BIC, among those without a kink and with the best."""
    x, y = affine.x, affine.y
    stepped = affine.problem.search()
    options = [(affine, affine.problem.fit(())), (affine, stepped)]
    if len(affine.changes):
        starts = {_best_kink(affine, ()), _best_kink(affine, stepped.places)}
        # A step may hide the kink that it shares its place with.
        starts |= {int(affine.changes[place]) for place in stepped.places}
        for kink in sorted(starts):
            bent = Curve(x, y, kink)
            options.append((bent, bent.problem.fit(())))
            options.append((bent, bent.problem.search()))
    return min(options, key=lambda option: option[0].bic(option[1]))


def _powers(x: Array, highest: int) -> Array:
    return np.stack([(x / x[-1]) ** power for power in range(highest + 1)], axis=1)


def _best_kink(affine: Curve, places: tuple[int, ...]) -> int:
    """Where a kink beside these steps lowers the residual most."""
    problem, x = affine.problem, affine.x
    q, _ = np.linalg.qr(np.concatenate([problem.base, problem.candidates[list(places)].T], axis=1))
    kinks = np.maximum(x - x[affine.changes][:, None], 0)  # (C, n)
    left = kinks - (kinks @ q) @ q.T
    gain = (left @ affine.y) ** 2 / np.maximum(np.sum(left**2, axis=1), 1e-12)  # (C,)
    return int(affine.changes[np.argmax(gain)])


def _throttling(
    x: Array, y: Array, t: Array, group: npt.NDArray[Any]
) -> tuple[list[CurveJump], Array]:
    """Steps in time within the lengths, and the factor (N,) by which they slowed each point."""
    n, levels = len(y), int(group.max()) + 1
    order = np.argsort(t, kind="stable")
    starts = order[_MIN_THROTTLED : max(n - _MIN_THROTTLED + 1, _MIN_THROTTLED)]
    if n - levels < 2 * MIN_SIDE + 2 or len(starts) == 0:
        return [], np.ones(n)
    base = (group[:, None] == np.arange(levels)).astype(np.float64)  # (N, levels)
    drift = (t - t.min()) / max(float(np.ptp(t)), 1e-9)  # (N,)
    problem = Problem(
        y=np.log(y),
        base=base,
        candidates=steps_at(t, t[starts]),
        relative=lambda fit, index: math.exp(float(fit.coefficients[levels + index])),
        free=n - levels,
        noise_floor=_ROUNDING,
        rivals=(np.concatenate([base, drift[:, None]], axis=1),),
        gap=_MIN_THROTTLED,
        most=4,
    )
    fit = problem.search()
    heights = fit.coefficients[levels:]  # (steps,)
    jumps = [
        CurveJump(
            length=int(x[starts[place]]),
            ratio=math.exp(height),
            cause="throttling",
            started_s=float(t[starts[place]]),
        )
        for place, height in zip(fit.places, heights, strict=True)
    ]
    return jumps, np.exp(
        heights @ problem.candidates[list(fit.places)] if fit.places else np.zeros(n)
    )
