"""What changed since last night: outcomes that flipped, and speeds beyond what nights differ by.

A night is a campaign of the kind "nightly". A board's last night is the newest earlier one that it
took part in: farms may have several timers, each for some boards.

One night's numbers are compared with the nights before it, not with the repetitions within it:
those share the board's temperature, its clocks and where its memory happened to lie. Which of them
differ is the screen's word (harness.farm.series), what became of it the ledger's
(harness.farm.confirming): only what an A/B confirmed counts as slower.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import TYPE_CHECKING, Any

from harness.farm import series
from harness.farm.results import ABANDONED, INTERRUPTED
from harness.farm.series import KIND, METRIC
from harness.statistics.nights import LEAST_NIGHTS
from harness.statistics.policy import Decided
from harness.store.alerts import Alerts
from harness.verdicts import Outcome

if TYPE_CHECKING:
    import pandas as pd

    from harness.store import Store

NIGHTS = 30  # whose outcomes are looked back at
GOOD = (Outcome.PASS.value, Outcome.WARN.value)
SAID = {
    Decided.CONFIRMED: "worse, confirmed",
    Decided.REFUTED: "suspected, refuted",
    Decided.ENVIRONMENT: "environment",
    Decided.BOARD: "the board",
    Decided.UNDECIDED: "suspected",
}


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
    """A number that differs from the `nights` before by more than they differ among each other.

    Values are in the metric's unit. `decided` is what became of a worse one, "" of one that nobody
    looked into; `told` says how that was decided.
    """

    board: str
    stage: str
    metric: str
    before: float  # the level of the nights before
    now: float
    nights: int
    worse: bool
    decided: str = ""
    told: str = ""

    @property
    def confirmed(self) -> bool:
        return self.decided == Decided.CONFIRMED

    def __str__(self) -> str:
        metric = METRIC[self.metric]
        change = f"{self.before:.4g} → {self.now:.4g} {metric.unit}"
        change = f"{change} ({self.now / self.before - 1:+.1%})"
        text = f"{self.board} {self.stage}: {metric.words} {change}"
        if self.told:
            return f"{text}; {self.told}"
        return f"{text}, more than the {self.nights} nights before differ by"


@dataclasses.dataclass(frozen=True)
class Changes:
    """`since`: when the newest night that was compared with began, None where there is none."""

    since: datetime.datetime | None
    flips: tuple[Flip, ...]
    shifts: tuple[Shift, ...]
    new: tuple[str, ...]  # boards that no night before had
    absent: tuple[str, ...]  # boards that last night had and this one was not asked for
    untold: tuple[str, ...]  # boards with too few nights behind them to tell a change of speed
    noisier: tuple[str, ...] = ()  # sentences, of boards whose nights scatter more than they did

    @property
    def confirmed(self) -> tuple[Shift, ...]:
        """What got worse and was confirmed: slower, more memory, further from the reference."""
        return tuple(shift for shift in self.shifts if shift.confirmed)

    def lines(self) -> list[str]:
        """For people, the worst first."""
        if self.since is None:
            return ["no night before this one to compare with"]
        told = []
        for direction in ("worse", "other", "better"):
            name = {"other": "otherwise"}.get(direction, direction)
            told += [f"  {name}: {flip}" for flip in self.flips if flip.direction == direction]
        for shift in sorted(self.shifts, key=lambda one: not one.confirmed):
            name = (
                "better" if not shift.worse else SAID[Decided(shift.decided or Decided.UNDECIDED)]
            )
            told.append(f"  {name}: {shift}")
        told += [f"  noisier: {text}" for text in self.noisier]
        told += [f"  new: {name}" for name in self.new]
        told += [f"  not asked tonight: {name}" for name in self.absent]
        if self.untold:
            told.append(
                f"  speed not compared, under {LEAST_NIGHTS} nights alike before this one: "
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
            "shifts": [dataclasses.asdict(shift) for shift in self.shifts],
            "noisier": list(self.noisier),
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
    shifts, untold, noisier = _shifts(store, campaign_id)
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
        tuple(noisier),
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


def _shifts(store: Store, campaign_id: str) -> tuple[list[Shift], list[str], list[str]]:
    """(what differs, boards whose nights are too few to tell, what is said of noisy boards)."""
    decided = {alert.series: alert for alert in Alerts(store).all(campaign=campaign_id)}
    found: list[Shift] = []
    untold, noisier = [], []
    for night in series.tonight(store, campaign_id):
        if night.untold:
            untold.append(night.board)
        if night.noise.grew and night.noise.ratio is not None:
            noisier.append(
                f"{night.board}: nights scatter {night.noise.ratio:.1f} times as much as they did; "
                f"run `harness boards health {night.board}`"
            )
        for one in (*night.suspects, *night.improved):
            look, now = night.looks[one.key], one.points[-1].night.value
            if look.level is None or now is None:
                continue
            alert = decided.get(one.key.hash)
            found.append(
                Shift(
                    night.board,
                    one.metric.stage,
                    one.metric.name,
                    look.level,
                    now,
                    look.nights,
                    bool(look.suspect),
                    alert.decided if alert is not None else "",
                    alert.told if alert is not None else "",
                )
            )
    return found, sorted(untold), noisier
