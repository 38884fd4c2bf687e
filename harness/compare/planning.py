"""Before anything is measured: what can be told on this board, in how many pairs and minutes.

A board's noise is known from what was measured there already: pairs of earlier comparisons without
what they have in common, or nights that ran the same engine twice.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scipy import stats

from harness.compare.judging import METRICS, Pair, Visit, scatter
from harness.errors import HarnessError
from harness.farm.series import all_series
from harness.statistics.pairs import MARGIN, Plan, plan
from harness.store.searches import Searches

if TYPE_CHECKING:
    from harness.bisect.trials import Trial
    from harness.store import Store

KIND = "compare"
LOOKED_AT = 12  # of the newest comparisons of a board
LEAST = 6  # pairs, before their scatter is believed
LEAST_SD = 5e-4  # of a log ratio: counters round


@dataclasses.dataclass(frozen=True)
class Noise:
    """`sd` of a pair's log ratio; `seconds` that a pair took, None where nobody measured one."""

    sd: float
    pairs: int
    source: str
    seconds: float | None = None


def noise_of(store: Store, board: str, metric: str, model: str | None = None) -> Noise | None:
    """What pairs of this metric scatter by on the board (with that model, where it was compared
    there), None when nobody knows."""
    searches = Searches(store)
    rows = [row for row in searches.newest(KIND) if row.board == board][:LOOKED_AT]
    same = [row for row in rows if model and model in (row.options or {}).get("packages", ())]
    for chosen in (same, rows):
        found = pooled([pairs_of(searches.trials(row.id)) for row in chosen], metric)
        if found is not None:
            return found
    return _of_nights(store, board, metric)


def _of_nights(store: Store, board: str, metric: str) -> Noise | None:
    """From nights that ran the same engine and model. They are a day apart and the visits of a pair
    are not, so a plan from them errs on the long side."""
    floors = [one.floor for one in all_series(store, board=board) if one.metric.ab == metric]
    known = [(floor.sd, floor.pairs) for floor in floors if floor.sd is not None]
    known = [(sd, pairs) for sd, pairs in known if pairs >= LEAST]
    if not known:
        return None
    sd = statistics.median(sd for sd, _ in known) * math.sqrt(2)  # a pair has two visits
    return Noise(max(LEAST_SD, sd), max(pairs for _, pairs in known), "nights of one engine")


def pooled(comparisons: Sequence[Sequence[Pair]], metric: str) -> Noise | None:
    """The robust scatter of pairs of several comparisons; None for fewer than 6 pairs."""
    logs = [value for pairs in comparisons for value in scatter(pairs, metric)]
    if len(logs) < LEAST:
        return None
    # A median was taken from each comparison, which costs it a degree of freedom.
    freedom = max(1, len(logs) - sum(bool(pairs) for pairs in comparisons))
    spread = statistics.median(map(abs, logs)) / float(stats.norm.ppf(0.75))
    sd = max(LEAST_SD, spread * math.sqrt(len(logs) / freedom))
    seconds = [pair.a.seconds + pair.b.seconds for pairs in comparisons for pair in pairs]
    took = statistics.median(seconds) if seconds else None
    return Noise(sd, len(logs), "earlier pairs on this board", took)


def planned(
    store: Store, board: str, effect: float, deciding: Iterable[str], model: str | None = None
) -> dict[str, Plan]:
    """Metric → plan, for those whose noise is known. Raises HarnessError for an effect that is
    none."""
    if effect <= MARGIN:
        raise HarnessError(
            f"an effect of {effect:.1%}", expected=f"more than {MARGIN:.0%}: a smaller one is none"
        )
    found = {}
    for name in deciding:
        noise = noise_of(store, board, name, model)
        if noise is not None:
            found[name] = plan(effect, noise.sd, seconds_per_pair=noise.seconds)
    return found


def plan_lines(plans: Mapping[str, Plan], deciding: Sequence[str], board: str) -> list[str]:
    """For people, a line for each metric."""
    lines = []
    for name in deciding:
        found = plans.get(name)
        if found is None:
            told = f"the noise of {board} is not known yet: the first comparison there measures it"
        else:
            told = found.sentence
        lines.append(f"{METRICS[name].words}: {told}")
    return lines


def pairs_of(trials: Sequence[Trial]) -> list[Pair]:
    """The pairs that count, in the order in which they were made."""
    halves: dict[int, dict[str, Visit]] = {}
    for trial in trials:
        if not trial.result.counts:
            continue
        visit = Visit.from_json(trial.evidence, trial.seconds or 0.0, trial.run or "")
        halves.setdefault(int(trial.subject["pair"]), {})[str(trial.subject["arm"])] = visit
    return [
        Pair(halves[number]["A"], halves[number]["B"])
        for number in sorted(halves)
        if set(halves[number]) == {"A", "B"}
    ]


def plan_json(plans: Mapping[str, Plan]) -> dict[str, Any]:
    return {
        name: {**dataclasses.asdict(found), "sentence": found.sentence}
        for name, found in plans.items()
    }
