"""The noisy threshold search: from which prefix of a list on does something fail?

A list has `n` elements; with the first m of them on, it fails for m ≥ k and not for m < k. What
fails, fails with an unknown probability p only, and what does not may fail all the same with the
background rate q. The posterior over k is exact under this model, for any answers so far:

- p is shared by all failing prefixes, up to a spread of its logarithm from prefix to prefix. Its
  prior is lognormal about the rate that was seen beforehand, on a grid, and higher near 1.
- q is shared by all others. Its prior is Beta, from trials that were made beforehand; it is never
  taken to be zero.

The next prefix to be tried is the one whose answer tells most about k (mutual information;
Burnashev and Zigangirov 1974 search noisily for a threshold, Ben-Or and Hassidim 2008 by its
posterior).
Deterministic failures cost about log2 n trials and a few more to be sure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import betaln, entr

Floats = npt.NDArray[np.float64]

SIGMA = 0.7  # of log p before the search: wider than three failures tell it (0.58)
SPREAD = 0.2  # of log p between prefixes
BACKGROUND = (0.5, 100.0)  # pseudo-counts of failures and passes: 0 to 2 %, before any trial
GRID = 41
MOST_P = 0.995  # no failure is taken to be certain
REPEAT_ODDS = 0.5  # a batch of passes moves the odds by at most e to this
MOST_REPEATS = 50
LEAST_BITS = 1e-7  # that a trial must be expected to tell
_Z, _W = np.polynomial.hermite_e.hermegauss(5)
_LOG_W = np.log(_W / _W.sum())


@dataclasses.dataclass(frozen=True)
class Found:
    """The threshold, with the asked confidence. `first` < `last`: it is one of these, and the
    prefixes between them cannot be tried. 0: fails with nothing on; n + 1: not with all on."""

    first: int
    last: int
    probability: float
    trials: int

    @property
    def k(self) -> int:
        """The smallest prefix that is known to fail."""
        return self.last


@dataclasses.dataclass(frozen=True)
class Inconclusive:
    """No name: the threshold lies in `first`..`last` with the asked confidence; `best` is the
    likeliest, and `probability` its own."""

    first: int
    last: int
    best: int
    probability: float
    trials: int
    reason: str


Move = int | Found | Inconclusive


class ThresholdSearch:
    """Ask and tell. Deterministic: the same answers lead to the same questions.

    n: length of the list.
    failures, trials: what was seen with everything on, before the search; the prior of p.
    background: failures and passes seen with nothing on, before the search; the prior of q, beside
        the pseudo-counts `background_prior`.
    delta: a threshold is named once its posterior is 1 - delta.
    budget: trials that may be told.
    weights: prior weight of each threshold 0 … n + 1; default: 1 … n alike, 0 and n + 1 never.
    allowed: prefixes 0 … n that can be tried; default: all. What lies between two of them is named
        together.
    Raises ValueError for arguments that do not fit these words.
    """

    def __init__(
        self,
        n: int,
        *,
        failures: int = 3,
        trials: int = 3,
        background: tuple[int, int] = (0, 0),
        delta: float = 0.01,
        budget: int = 10_000,
        weights: Sequence[float] | None = None,
        allowed: Collection[int] | None = None,
        sigma: float = SIGMA,
        spread: float = SPREAD,
        background_prior: tuple[float, float] = BACKGROUND,
    ) -> None:
        if n < 1 or not 0 < delta < 0.5 or budget < 0:
            raise ValueError(
                f"a search of {n} elements with delta {delta:g} and a budget of {budget}; expected "
                "at least 1 element, delta between 0 and 0.5, a budget from 0 on"
            )
        if not 0 <= failures <= trials:
            raise ValueError(f"{failures} failures in {trials} trials beforehand")
        self.n, self.delta, self.budget, self.trials = n, delta, budget, 0
        self._log_weights = _log_weights(n, weights)
        self._allowed = _allowed(n, allowed)
        self._group = np.cumsum(np.concatenate([[0], self._allowed]))  # of each threshold
        centre = np.log(min(MOST_P, max(failures, 0.5) / max(trials, 1)))
        low, high = centre - 4 * sigma, min(centre + 4 * sigma, np.log(MOST_P))
        self._log_p = np.linspace(low, high, GRID)
        # Failures that are all but certain are common: near 1 the density rises as Jeffreys' does.
        prior = -0.5 * ((self._log_p - centre) / sigma) ** 2 - 0.5 * np.log1p(-np.exp(self._log_p))
        self._prior = prior - _log_sum(prior)
        around = np.minimum(self._log_p[:, None] + spread * _Z, np.log(0.999))  # (grid, 5)
        self._log_fail, self._log_pass = around, np.log1p(-np.exp(around))
        self._a = background_prior[0] + background[0]
        self._b = background_prior[1] + background[1]
        self._told: dict[int, list[int]] = {}  # prefix → failures, passes
        self._state: _State | None = None

    def tell(self, m: int, failed: bool, repeats: int = 1) -> None:
        """The first `m` elements were on, and the result was this, `repeats` times.

        Any prefix may be told, asked for or not. Raises ValueError for one that does not exist.
        """
        if not 0 <= m <= self.n or repeats < 1:
            raise ValueError(f"prefix {m} told {repeats} times, expected 0 to {self.n} and once")
        self._told.setdefault(m, [0, 0])[0 if failed else 1] += repeats
        self.trials += repeats
        self._state = None

    def ask(self) -> Move:
        """The prefix to be tried next, or how the search ended."""
        posterior = self.posterior()
        groups = np.bincount(self._group, posterior)
        best = int(groups.argmax())
        if groups[best] >= 1 - self.delta:
            members = np.flatnonzero((self._group == best) & np.isfinite(self._log_weights))
            first, last = int(members[0]), int(members[-1])
            return Found(first, last, float(groups[best]), self.trials)
        if self.trials >= self.budget:
            return self._inconclusive(f"the budget of {self.budget} trials is spent")
        bits = np.where(self._allowed, self.information(), -1.0)
        if bits.max() < LEAST_BITS:
            return self._inconclusive(
                "failures with and without the culprit are equally frequent: no trial tells more"
            )
        return int(bits.argmax())

    def repeats(self, m: int) -> int:
        """How often `m` may be tried before asking again, ending with the first failure.

        So many passes move the odds of the thresholds by at most e^0.5; a failure tells more than
        that, and is told at once.
        """
        state = self._known()
        inside = np.arange(self.n + 2) <= m
        weight = float(state.posterior[inside].sum())
        if weight <= 0:
            return 1
        p = float((state.posterior * state.p)[inside].sum()) / weight
        most = min(MOST_REPEATS, self.budget - self.trials)
        return max(1, min(most, int(REPEAT_ODDS / p)))

    def posterior(self) -> Floats:
        """(n + 2,) the probability of each threshold 0 … n + 1."""
        return self._known().posterior

    def information(self) -> Floats:
        """(n + 1,) bits that one trial of each prefix is expected to tell about the threshold."""
        state, n = self._known(), self.n
        w, bad, good = state.posterior, state.p, state.q

        def expected(bad: Floats, good: Floats) -> Floats:
            below = np.cumsum(w * bad)[: n + 1]  # thresholds up to m: the prefix m fails
            above = np.cumsum((w * good)[::-1])[::-1][1:]
            return np.asarray(below + above, np.float64)

        told = _entropy(expected(bad, good)) - expected(_entropy(bad), _entropy(good))
        return np.asarray(np.maximum(told, 0.0) / np.log(2), np.float64)

    def interval(self) -> tuple[int, int]:
        """The shortest range of thresholds that holds 1 - delta of the posterior."""
        posterior = self.posterior()
        total = np.concatenate([[0.0], np.cumsum(posterior)])
        ends = np.searchsorted(total, total + (1 - self.delta) * (1 - 1e-12))
        starts = np.flatnonzero(ends <= self.n + 2)
        first = int(starts[(ends[starts] - starts).argmin()])
        return first, int(ends[first]) - 1

    @property
    def rate(self) -> float:
        """The probability p that is expected of a failing prefix."""
        state = self._known()
        return float((state.posterior * state.p).sum())

    def _inconclusive(self, reason: str) -> Inconclusive:
        posterior = self.posterior()
        best = int(posterior.argmax())
        first, last = self.interval()
        return Inconclusive(first, last, best, float(posterior[best]), self.trials, reason)

    def _known(self) -> _State:
        """What is known now. Thresholds between two tried prefixes are alike."""
        if self._state is not None:
            return self._state
        tried = sorted(self._told)
        counts = np.array([self._told[m] for m in tried], np.float64).reshape(-1, 2)
        rows = [self._row(failures, passes) for failures, passes in counts]
        # Class j: the first j tried prefixes do not fail, the others do.
        bad = np.zeros((len(tried) + 1, GRID))
        for j in range(len(tried) - 1, -1, -1):
            bad[j] = bad[j + 1] + rows[j]
        joint = self._prior + bad
        evidence = _log_sum(joint)
        p = (np.exp(joint - evidence[:, None]) * np.exp(self._log_p)).sum(axis=1)
        clean = np.vstack([np.zeros((1, 2)), np.cumsum(counts, axis=0)])
        a, b = self._a + clean[:, 0], self._b + clean[:, 1]
        evidence = evidence + betaln(a, b) - betaln(self._a, self._b)
        classes = np.searchsorted(np.array(tried, np.int64), np.arange(self.n + 2), side="left")
        log_posterior = self._log_weights + evidence[classes]
        posterior = np.exp(log_posterior - _log_sum(log_posterior))
        self._state = _State(posterior, p[classes], (a / (a + b))[classes])
        return self._state

    def _row(self, failures: float, passes: float) -> Floats:
        """(grid,) log-likelihood of one failing prefix's results, its own p averaged out."""
        each = _LOG_W + failures * self._log_fail + passes * self._log_pass
        return _log_sum(each)


@dataclasses.dataclass(frozen=True)
class _State:
    """Of each threshold: its probability, and p and q expected if it is the one."""

    posterior: Floats
    p: Floats
    q: Floats


def _log_sum(values: Floats) -> Floats:
    """Log of the sum of exponentials along the last axis; scipy's takes a millisecond to begin."""
    return np.asarray(np.logaddexp.reduce(values, axis=-1), np.float64)


def _entropy(probability: Floats) -> Floats:
    """Of one answer, in nats."""
    clipped = np.clip(probability, 0.0, 1.0)
    return np.asarray(entr(clipped) + entr(1 - clipped), np.float64)


def _log_weights(n: int, weights: Sequence[float] | None) -> Floats:
    values = np.array([0.0, *[1.0] * n, 0.0] if weights is None else weights, np.float64)
    if values.shape != (n + 2,) or not np.isfinite(values).all() or values.min() < 0:
        raise ValueError(f"weights of thresholds 0 to {n + 1}: expected {n + 2} numbers from 0 on")
    if not values.sum() > 0:
        raise ValueError("every threshold has the weight 0")
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(values / values.sum()), np.float64)


def _allowed(n: int, allowed: Collection[int] | None) -> npt.NDArray[np.bool_]:
    if allowed is None:
        return np.ones(n + 1, np.bool_)
    odd = sorted(m for m in allowed if not 0 <= m <= n)
    if odd:
        raise ValueError(f"prefix {odd[0]} cannot be tried, expected 0 to {n}")
    return np.isin(np.arange(n + 1), np.array(sorted(allowed), np.int64))
