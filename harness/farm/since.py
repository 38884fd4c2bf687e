"""What changed since last night: outcomes that flipped, and speeds beyond what nights differ by.

A night is a campaign of the kind "nightly". A board's last night is the newest earlier one that it
took part in: farms may have several timers, each for some boards.

One night's speed is compared with the nights before it, not with the repetitions within it: those
share the board's temperature, its clocks and where its memory happened to lie. Whether it differs
is asked of `harness.statistics.changes`: a step that tonight alone stands behind has to be as
sure as any other.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.farm.results import ABANDONED, INTERRUPTED
from harness.verdicts import Outcome

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import Store

KIND = "nightly"  # of campaigns
NIGHTS = 30  # that are looked back at
FEWEST_NIGHTS = 5  # tonight's included: with fewer nobody knows what nights differ by
ROUNDING = 0.002  # of a speed: a difference that is none, however steady the nights were
GOOD = (Outcome.PASS.value, Outcome.WARN.value)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A check that holds a speed. `better`: +1 where more is better, −1 where less is."""

    check: str
    words: str
    better: int


METRICS = (
    Metric("tokens_per_s_at_end", "tokens/s at the end of the context", +1),
    Metric("ttft_s", "seconds to the first token", -1),
)


@dataclasses.dataclass(frozen=True)
class Flip:
    """Another outcome than last night. One of trouble has its kind: "error (board-lost)"."""

    board: str
    stage: str
    before: str
    now: str
    headline: str

    @property
    def direction(self) -> str:
        """ "worse", "better" or "other" (from one trouble to another)."""
        good = [outcome in GOOD for outcome in (self.before, self.now)]
        return {(True, False): "worse", (False, True): "better"}.get((good[0], good[1]), "other")

    def __str__(self) -> str:
        said = f": {self.headline}" if self.now not in GOOD else ""
        return f"{self.board} {self.stage}: {self.before} → {self.now}{said}"


@dataclasses.dataclass(frozen=True)
class Shift:
    """A speed that differs from the `nights` before by more than they differ among each other."""

    board: str
    stage: str
    metric: str
    before: float  # the level of the nights before
    now: float
    nights: int
    slower: bool

    def __str__(self) -> str:
        words = next(item.words for item in METRICS if item.check == self.metric)
        change = f"{self.before:.4g} → {self.now:.4g} ({self.now / self.before - 1:+.1%})"
        return (
            f"{self.board} {self.stage}: {words} {change}, more than the {self.nights} nights "
            "before differ by"
        )


@dataclasses.dataclass(frozen=True)
class Changes:
    """`since`: when the newest night that was compared with began, None where there is none."""

    since: datetime.datetime | None
    flips: tuple[Flip, ...]
    shifts: tuple[Shift, ...]
    new: tuple[str, ...]  # boards that no night before had
    absent: tuple[str, ...]  # boards that last night had and this one was not asked for
    untold: tuple[str, ...]  # boards with too few nights behind them to tell a change of speed

    @property
    def slower(self) -> tuple[Shift, ...]:
        return tuple(shift for shift in self.shifts if shift.slower)

    def lines(self) -> list[str]:
        """For people, the worst first."""
        if self.since is None:
            return ["no night before this one to compare with"]
        told = []
        for direction in ("worse", "other", "better"):
            name = {"other": "otherwise"}.get(direction, direction)
            told += [f"  {name}: {flip}" for flip in self.flips if flip.direction == direction]
        told += [f"  slower: {shift}" for shift in self.shifts if shift.slower]
        told += [f"  faster: {shift}" for shift in self.shifts if not shift.slower]
        told += [f"  new: {name}" for name in self.new]
        told += [f"  not asked tonight: {name}" for name in self.absent]
        if self.untold:
            told.append(
                f"  speed not compared, under {FEWEST_NIGHTS} nights alike: "
                + ", ".join(self.untold)
            )
        head = f"since last night ({self.since.astimezone():%Y-%m-%d %H:%M})"
        return [f"{head}:", *told] if told else [f"{head}: nothing"]

    def as_json(self) -> dict[str, Any]:
        return {
            "since": None if self.since is None else self.since.isoformat(),
            "flips": [
                {**dataclasses.asdict(flip), "direction": flip.direction} for flip in self.flips
            ],
            "speeds": [dataclasses.asdict(shift) for shift in self.shifts],
            "new_boards": list(self.new),
            "absent_boards": list(self.absent),
            "too_few_nights": list(self.untold),
        }


def changes(store: Store, campaign_id: str) -> Changes:
    """How the night `campaign_id` differs from the last, board by board."""
    frame = store.frames.verdicts(KIND, NIGHTS)
    # A campaign counts once for each board and stage: its last attempt.
    last = frame.groupby(["campaign_id", "board", "stage"], sort=False).tail(1)
    tonight = last[last["campaign_id"] == campaign_id]
    earlier = last[last["campaign_id"] != campaign_id]
    if len(tonight):
        earlier = earlier[earlier["campaign_at"] < tonight["campaign_at"].iloc[0]]
    flips, new, compared = [], [], []
    for board, rows in tonight.groupby("board", sort=True):
        before = earlier[earlier["board"] == board]
        if before.empty:
            new.append(str(board))
            continue
        before = before[before["campaign_id"] == before["campaign_id"].iloc[-1]]
        compared.append(before["campaign_at"].iloc[-1])
        flips += _flips(before, rows)
    shifts, untold = _shifts(store, earlier, tonight)
    absent: set[str] = set()
    if compared:
        newest = earlier[earlier["campaign_at"] == max(compared)]
        absent = {str(name) for name in newest["board"]} - {str(name) for name in tonight["board"]}
    return Changes(
        max(compared).to_pydatetime() if compared else None,
        tuple(flips),
        tuple(shifts),
        tuple(new) if compared else (),
        tuple(sorted(absent)),
        tuple(untold) if compared else (),
    )


def _flips(before: pd.DataFrame, now: pd.DataFrame) -> list[Flip]:
    """Of one board. What an earlier stage of the same night blocked says nothing of its own."""
    known = {row.stage: row for row in before.itertuples()}
    found = []
    for row in now.itertuples():
        old = known.get(row.stage)
        if old is None or _unsaid(old) or _unsaid(row):
            continue
        names = _name(old), _name(row)
        blocked = Outcome.BLOCKED.value
        if names[0] == names[1] or names[1] == blocked:
            continue
        if names[0] == blocked and names[1] in GOOD:  # the stage that had blocked it tells
            continue
        found.append(Flip(str(row.board), str(row.stage), *names, str(row.headline or "")))
    return found


def _unsaid(row: Any) -> bool:
    return row.error_kind in (INTERRUPTED, ABANDONED)


def _name(row: Any) -> str:
    return f"{row.outcome} ({row.error_kind})" if row.error_kind else str(row.outcome)


def _shifts(
    store: Store, earlier: pd.DataFrame, tonight: pd.DataFrame
) -> tuple[list[Shift], list[str]]:
    """(changes of speed, boards whose nights are too few to tell), over nights that ran alike."""
    found: list[Shift] = []
    untold: set[str] = set()
    for metric in METRICS:
        history = store.frames.history(metric.check)
        speeds = dict(zip(history["run_id"], history["measured"], strict=True))
        for row in tonight.itertuples():
            now = speeds.get(row.run_id)
            if now is None:
                continue
            before = [
                speeds[item.run_id]
                for item in earlier[earlier["board"] == row.board].itertuples()
                if item.run_id in speeds and _conditions(item) == _conditions(row)
            ]
            values = [value for value in (*before, now) if value > 0 and math.isfinite(value)]
            if len(values) < FEWEST_NIGHTS:
                untold.add(str(row.board))
                continue
            level = level_before(values)
            if level is not None:
                slower = (now - level) * metric.better < 0
                where = str(row.board), str(row.stage), metric.check
                found.append(Shift(*where, level, now, len(values) - 1, slower))
    return found, sorted(untold)


def _conditions(row: Any) -> tuple[Any, ...]:
    """What two nights must have alike for their speeds to be compared."""
    return row.stage, row.model_hash, row.parameters


def level_before(values: Sequence[float]) -> float | None:
    """The level that the last of `values` (n,), all positive, departs from; None where it stays
    within what the others differ by. They may have had steps of their own."""
    import numpy as np

    from harness.statistics.changes import MIN_SIDE, Problem, steps_at

    y = np.log(np.asarray(values, np.float64))
    n = len(y)
    if n <= MIN_SIDE:
        return None
    index = np.arange(n)
    places = index[MIN_SIDE:]  # the last stands alone behind its step; before one there are three
    problem = Problem(
        y=y,
        base=np.ones((n, 1)),
        candidates=steps_at(index, places),
        relative=lambda fit, step: math.exp(fit.coefficients[1 + step]),
        free=n,
        noise_floor=ROUNDING,
    )
    fit = problem.search()
    if not fit.places or places[fit.places[-1]] != n - 1:
        return None
    return math.exp(float(fit.fitted[n - 2]))
