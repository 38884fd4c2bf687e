"""Cases → a row for each kind and contestant, with the scores that targets speak of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from harness.statistics.bootstrap import wilson
from tests.planted.cases import OURS, Case, Target


@dataclasses.dataclass(frozen=True)
class Score:
    """Shares are of the `cases` of one kind; runs are trials per case."""

    kind: str
    contestant: str
    cases: int
    exact: float
    superset: float
    wrong: float
    wrong_high: float
    inconclusive: float
    runs_mean: float
    runs_p95: float
    claimed: float | None  # mean confidence stated with a name …
    observed: float | None  # … and the share of those names that were right


@dataclasses.dataclass(frozen=True)
class Judged:
    """A target with what was measured; None when no case of its kind was run."""

    target: Target
    value: float | None

    @property
    def met(self) -> bool:
        return self.value is not None and self.target.met(self.value)


def scores(cases: Sequence[Case]) -> list[Score]:
    """In the order in which kinds and contestants first came."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.kind, case.contestant), []).append(case)
    return [_score(kind, contestant, group) for (kind, contestant), group in groups.items()]


def judge(targets: Sequence[Target], rows: Sequence[Score]) -> list[Judged]:
    ours = {row.kind: row for row in rows if row.contestant == OURS}
    return [
        Judged(item, getattr(ours[item.kind], item.score) if item.kind in ours else None)
        for item in targets
    ]


def _score(kind: str, contestant: str, cases: Sequence[Case]) -> Score:
    count = len(cases)
    share = {
        verdict: sum(case.verdict == verdict for case in cases) / count
        for verdict in ("exact", "superset", "wrong", "inconclusive", "clean")
    }
    wrong = sum(case.verdict == "wrong" for case in cases)
    runs = np.array([case.runs for case in cases], dtype=float)
    stated = [case for case in cases if case.claimed is not None and case.named]
    return Score(
        kind=kind,
        contestant=contestant,
        cases=count,
        # Nothing blamed is the exact answer to a clean control.
        exact=share["exact"] + share["clean"],
        superset=share["superset"],
        wrong=share["wrong"],
        wrong_high=wilson(wrong, count)[1],
        inconclusive=share["inconclusive"],
        runs_mean=float(runs.mean()),
        runs_p95=float(np.quantile(runs, 0.95)),
        claimed=float(np.mean([case.claimed for case in stated])) if stated else None,
        observed=float(np.mean([case.named == case.truth for case in stated])) if stated else None,
    )
