"""Does a run keep its speed? The sustained ratio of the last minutes over the early ones.

Judged where a run is long enough to heat up: the last five minutes over minutes 2 to 5 (the first
two belong to caches and governors). Below .95 it is drift.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

EARLY_S = (120.0, 300.0)
LATE_S = 300.0
MIN_RUN_S = EARLY_S[1] + LATE_S
MIN_RATIO = 0.95
_MIN_SAMPLES = 5  # busy samples in each part


@dataclasses.dataclass(frozen=True)
class Drift:
    """What a run's speed did. All None but `reason`: there is too little to tell."""

    ratio: float | None  # late over early
    early: float | None  # tokens/s
    late: float | None
    drifts: bool | None
    reason: str  # one sentence


def judge_drift(t_s: npt.ArrayLike, tokens_per_s: npt.ArrayLike) -> Drift:
    """Compares speed late with speed early. t_s (N,) seconds, tokens_per_s (N,).

    Samples that are not finite or not positive are idle ones and are left out; each part is stood
    for by its median, and needs five busy samples. Feed it a speed that does not depend on what was
    asked: in dialogues with growing context, tokens/s over what the context's length allows.
    Raises ValueError for arrays of different lengths.
    """
    t, speed = np.asarray(t_s, np.float64), np.asarray(tokens_per_s, np.float64)
    if t.shape != speed.shape or t.ndim != 1:
        raise ValueError(f"expected arrays of one length, found {t.shape} {speed.shape}")
    known = np.isfinite(t)
    if not known.any():
        return _too_little("there is no speed sample")
    start = float(t[known].min())
    seconds = float(t[known].max()) - start
    if seconds < MIN_RUN_S * 0.998:  # the last sample falls a second short of a full run
        return _too_little(f"{seconds:.0f} s are too short; {MIN_RUN_S:.0f} s are needed")
    busy = known & np.isfinite(speed) & (speed > 0)
    at = t - start
    early = speed[busy & (at >= EARLY_S[0]) & (at <= EARLY_S[1])]
    late = speed[busy & (at >= seconds - LATE_S)]
    if min(len(early), len(late)) < _MIN_SAMPLES:
        return _too_little(f"{len(early)} early and {len(late)} late busy samples are too few")
    early_speed, late_speed = float(np.median(early)), float(np.median(late))
    ratio = late_speed / early_speed
    reason = (
        f"the last {LATE_S / 60:.0f} minutes ran at {ratio:.1%} of minutes 2 to 5 "
        f"({late_speed:.2f} against {early_speed:.2f} tokens/s)"
    )
    return Drift(ratio, early_speed, late_speed, ratio < MIN_RATIO, reason)


def _too_little(reason: str) -> Drift:
    return Drift(None, None, None, None, reason)
