"""Series of nights: each number of each board over its nights, and what tonight's is against them.

A series has board, stage, model, quantisation and parameters the same. Three fresh processes a
night would cost three loads of the model; what stands for them is the curve stage, one process that
visits each length in three shuffled sweeps: its median over the sweeps is the night's value, and
what processes differ by is part of what nights differ by, which the screen is held against.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.boards.care import EVENT
from harness.statistics.nights import Environment, NoiseFloor, noise_floor
from harness.statistics.policy import (
    Decided,
    Look,
    Night,
    NoiseGrowth,
    floors_of,
    look,
    moved_together,
    noise_growth,
)
from harness.statistics.validity import UNKNOWN, VALID
from harness.store import numbers
from harness.store.alerts import Alert, Alerts
from harness.store.models import BoardEventRow
from harness.store.numbers import NightRow

if TYPE_CHECKING:
    from harness.store import Store

KIND = "nightly"  # of campaigns
NIGHTS = 60  # that are looked back at
DETECTOR = "screen"


@dataclasses.dataclass(frozen=True)
class Metric:
    """`column` is of NightRow; a rate (tokens/s) is turned into a time. `ab` is the metric of
    a comparison that stands for it, None for a number that is computed, not measured."""

    name: str
    column: str
    stage: str
    words: str
    unit: str
    rate: bool = False
    ab: str | None = None

    def value(self, found: float | None) -> float | None:
        if found is None or not found > 0:
            return None
        return 1e3 / found if self.rate else float(found)


METRICS = (
    Metric("tpot_start", "speed_start", "curve", "time per token on an empty cache", "ms", True,
           "tpot_s"),
    Metric("tpot_middle", "speed_middle", "curve", "time per token halfway", "ms", True, "tpot_s"),
    Metric("tpot_end", "speed_end", "curve", "time per token at the end of the context", "ms",
           True, "tpot_s"),
    Metric("ttft", "ttft_s", "curve", "time to the first token", "s", False, "ttft_s"),
    Metric("rss", "rss_mb", "curve", "peak memory", "MiB", False, "rss_mb"),
    Metric("kl", "mean_kl", "accuracy", "mean KL against the reference", "nats"),
)  # fmt: skip
METRIC = {one.name: one for one in METRICS}


@dataclasses.dataclass(frozen=True)
class Key:
    """What all nights of a series have alike."""

    board: str
    metric: str
    model_hash: str
    quant_hash: str
    parameters: str  # as JSON

    @property
    def hash(self) -> str:
        return hashlib.sha256("\0".join(dataclasses.astuple(self)).encode()).hexdigest()


class Point(NamedTuple):
    """A night of a series."""

    night: Night
    run_id: str
    campaign_id: str
    at: datetime.datetime
    outcome: str


@dataclasses.dataclass(frozen=True)
class Series:
    """`begin` is where its segment begins, `apart` the nights that are kept out of the baseline.
    `begins` are the places of all segments, with why each began."""

    key: Key
    model: str
    scheme: str
    points: tuple[Point, ...]
    begins: tuple[tuple[int, str], ...]
    apart: frozenset[int]

    @property
    def metric(self) -> Metric:
        return METRIC[self.key.metric]

    @property
    def nights(self) -> list[Night]:
        return [point.night for point in self.points]

    @property
    def begin(self) -> int:
        return self.begins[-1][0]

    @property
    def look(self) -> Look:
        """The newest night against its segment."""
        computed = self.metric.ab is None
        return look(self.nights, self.begin, self.apart, computed=computed)

    @property
    def floor(self) -> NoiseFloor:
        usable = [night for night in self.nights if night.usable]
        return noise_floor([n.value or 0.0 for n in usable], [n.build for n in usable])


@dataclasses.dataclass(frozen=True)
class BoardTonight:
    """What a night says of one board. `series` are those that tonight has a value for."""

    board: str
    series: tuple[Series, ...]
    looks: Mapping[Key, Look]
    together: Environment
    noise: NoiseGrowth

    @property
    def suspects(self) -> list[Series]:
        return [one for one in self.series if self.looks[one.key].suspect]

    @property
    def improved(self) -> list[Series]:
        return [one for one in self.series if self.looks[one.key].improved]

    @property
    def untold(self) -> bool:
        """Whether no speed can be compared yet."""
        timed = [self.looks[one.key] for one in self.series if one.metric.rate]
        return bool(timed) and all(found.suspect is None for found in timed)


def all_series(
    store: Store, *, board: str | None = None, newest: int = NIGHTS, without: str | None = None
) -> list[Series]:
    """Every series of the newest nights, by board and metric. `without` is a campaign whose own
    alerts are not looked at: it is the one that is judged."""
    # A campaign counts once for each board, stage and model: its last attempt.
    rows = {
        (row.campaign_id, row.board, row.stage, row.model_hash): row
        for row in numbers.nights(store, KIND, newest, board)
    }
    alerts: dict[str, list[Alert]] = {}
    for alert in Alerts(store).all(board):
        if alert.campaign_id != without:
            alerts.setdefault(alert.series, []).append(alert)
    events = declared(store, board)
    groups: dict[tuple[str, str, str, str, str], list[NightRow]] = {}
    for row in rows.values():
        alike = (row.board, row.stage, row.model_hash or "", row.quant_hash or "", row.parameters)
        groups.setdefault(alike, []).append(row)
    found: dict[Key, list[Point]] = {}
    named: dict[Key, NightRow] = {}
    for (name, stage, model, quant, parameters), alike_rows in groups.items():
        for metric in METRICS:
            if metric.stage == stage:
                key = Key(name, metric.name, model, quant, _canonical(parameters))
                found.setdefault(key, []).extend(_points(alike_rows, metric))
                named[key] = alike_rows[-1]
    return [
        _series(key, named[key], points, _alerts_of(key, alerts), events.get(key.board, ()))
        for key, points in sorted(found.items(), key=lambda item: dataclasses.astuple(item[0]))
        if any(point.night.value is not None for point in points)
    ]


def _alerts_of(key: Key, alerts: Mapping[str, Sequence[Alert]]) -> list[Alert]:
    """A series' own, and those that confirmed a change of what its A/B measures: a slower token is
    a change at every depth, whichever the screen saw."""
    found = list(alerts.get(key.hash, ()))
    for other in METRICS:
        if other.name != key.metric and other.ab is not None and other.ab == METRIC[key.metric].ab:
            beside = dataclasses.replace(key, metric=other.name)
            found += [
                alert for alert in alerts.get(beside.hash, ()) if alert.decided == Decided.CONFIRMED
            ]
    return found


@functools.lru_cache(maxsize=4096)
def _canonical(parameters: str) -> str:
    """The same parameters as the same text, whatever their order."""
    return json.dumps(json.loads(parameters or "{}"), sort_keys=True)


def _points(rows: Sequence[NightRow], metric: Metric) -> list[Point]:
    # Memory does not depend on clocks, and neither do results.
    timed = metric.ab in ("tpot_s", "ttft_s")
    return [
        Point(
            Night(
                metric.value(getattr(row, metric.column)),
                row.build,
                not timed or row.clocks is None or row.clocks.startswith((VALID, UNKNOWN)),
            ),
            row.run_id,
            row.campaign_id,
            row.at,
            row.outcome,
        )
        for row in rows
    ]


def _series(
    key: Key,
    newest: NightRow,
    points: list[Point],
    alerts: Sequence[Alert],
    events: Sequence[tuple[datetime.datetime, str]],
) -> Series:
    points.sort(key=lambda point: point.at)  # parameters may have been written in several orders
    times = [point.at for point in points]
    begins = {0: "the first night"}
    for at, told in events:
        place = bisect.bisect_left(times, at)
        if place < len(points):
            begins[place] = told
    apart = set()
    for alert in alerts:
        place = bisect.bisect_left(times, alert.night)
        if place >= len(points) or times[place] != alert.night:
            continue
        decided = Decided(alert.decided)
        if decided is Decided.CONFIRMED:
            begins[place] = alert.told
        elif decided.apart:
            apart.add(place)
    model, scheme = newest.model_name or "", newest.scheme or ""
    return Series(
        key, model, scheme, tuple(points), tuple(sorted(begins.items())), frozenset(apart)
    )


def declared(
    store: Store, board: str | None = None
) -> dict[str, list[tuple[datetime.datetime, str]]]:
    """Board → events that somebody declared, the oldest first."""
    import sqlalchemy as sa

    query = sa.select(BoardEventRow).where(BoardEventRow.kind == EVENT).order_by(BoardEventRow.id)
    if board is not None:
        query = query.where(BoardEventRow.board == board)
    found: dict[str, list[tuple[datetime.datetime, str]]] = {}
    with store.database.reading() as session:
        for row in session.scalars(query):
            found.setdefault(row.board, []).append((row.at, row.told))
    return found


def tonight(store: Store, campaign_id: str) -> list[BoardTonight]:
    """Each board's series of that night against the nights before it."""
    at = store.campaign(campaign_id).started_at
    boards: dict[str, list[Series]] = {}
    for one in all_series(store, without=campaign_id):
        points = tuple(point for point in one.points if point.at <= at)
        if not points or points[-1].campaign_id != campaign_id:
            continue
        begins = tuple(row for row in one.begins if row[0] < len(points))
        boards.setdefault(one.key.board, []).append(
            dataclasses.replace(one, points=points, begins=begins)
        )
    return [of_board(board, found) for board, found in sorted(boards.items())]


def of_board(board: str, series: Sequence[Series]) -> BoardTonight:
    """Looks at the newest night of each series of one board."""
    looks = {one.key: one.look for one in series}
    timed = [one for one in series if one.metric.stage == "curve"]
    floors = floors_of({one.key.hash: one.nights for one in series})
    together = moved_together({one.key.hash: looks[one.key] for one in timed}, floors)
    return BoardTonight(board, tuple(series), looks, together, growth(series))


def growth(series: Sequence[Series]) -> NoiseGrowth:
    """Whether one board became noisier, by those of its series that have most nights."""
    timed = [one for one in series if one.metric.stage == "curve"]
    longest = max((len(one.points) for one in timed), default=0)
    return noise_growth([one.nights for one in timed if len(one.points) == longest])
