"""Suspects of a night, settled: an A/B of a good night's engine against tonight's on that board.

Only that alerts. Where the engine is the one that was good, it is the board or what surrounds it;
where all series of a board moved, its health is checked. Everything is written into the ledger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from engine.options import EngineOptions
from harness.compare.arms import Arm
from harness.compare.measuring import Measure
from harness.compare.session import Orders, Report, compare_on_board
from harness.deploy.kept import build_hash, kept
from harness.errors import HarnessError
from harness.farm.series import DETECTOR, BoardTonight, Series
from harness.inventory import Engine
from harness.jobs.engines import EngineChoice
from harness.statistics.nights import Environment
from harness.statistics.pairs import WORSE
from harness.statistics.policy import Answer, Decided, asks_again, decide, needs_ab, settled
from harness.statistics.validity import INVALID
from harness.store.alerts import Alert, Alerts

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.store import RunRow, Store

SIDE_BY_SIDE = 8  # boards
REASON = "nightly A/B"
TOKENS, REPEATS = 32, 2
AT_START, PROMPT = 16, 128  # positions: an empty cache, a prompt
PREFILL_S = 30.0  # of one prompt: a deeper one would make the twenty visits take hours
CHECKED = "its health check"

AbFunction = Callable[["BoardTonight", Sequence[Series]], "Ab"]


@dataclasses.dataclass(frozen=True)
class Ab:
    """What an A/B said: metric of the comparison → answer. `reached` are the numbers of a night
    that it compared at least as deep in the context as the night measures them: others it can
    blame on the engine, but not clear it of. `why` there was no A/B, else ""."""

    answers: Mapping[str, Answer] = dataclasses.field(default_factory=dict)
    sentences: Mapping[str, str] = dataclasses.field(default_factory=dict)
    search_id: str | None = None
    reached: frozenset[str] = frozenset()
    why: str = ""


def settle(
    nights: Sequence[BoardTonight],
    campaign_id: str,
    store: Store,
    ab: AbFunction,
    healthy: Callable[[str], bool | None],
    note: Callable[[str], None] = lambda text: None,
) -> list[Alert]:
    """Decides about every suspect, and writes each into the ledger. `healthy` checks a board; None:
    it could not be checked. Raises nothing of one board's: another's are settled all the same."""
    waiting = [night for night in nights if night.suspects]
    if not waiting:
        return []
    with ThreadPoolExecutor(min(SIDE_BY_SIDE, len(waiting)), "confirming") as pool:
        found = list(pool.map(lambda night: _of_board(night, campaign_id, ab, healthy, note),
                              waiting))  # fmt: skip
    ledger = Alerts(store)
    alerts = [alert for some in found for alert in some]
    for alert in alerts:
        ledger.add(alert)
    return alerts


def _of_board(
    night: BoardTonight,
    campaign_id: str,
    ab: AbFunction,
    healthy: Callable[[str], bool | None],
    note: Callable[[str], None],
) -> list[Alert]:
    suspects = night.suspects
    asked = [one for one in suspects if one.metric.ab and needs_ab(night.looks[one.key])]
    results: dict[tuple[str, ...], Ab] = {}
    for group in dict.fromkeys(_group(night, one) for one in asked):
        mine = [one for one in asked if _group(night, one) == group]
        names = ", ".join(one.metric.words for one in mine)
        note(f"{night.board}: {names}: measuring the engine of a good night against tonight's")
        results[group] = _asked(ab, night, mine, note)
    well = healthy(night.board) if night.together.shifted else None
    return [
        _alert(night, one, campaign_id, results.get(_group(night, one)), well) for one in suspects
    ]


def _group(night: BoardTonight, one: Series) -> tuple[str, ...]:
    """What suspects share that one A/B can settle: their model, their parameters, and the engine
    that was good, since each series has segments of its own."""
    good = night.looks[one.key].good_night
    build = "" if good is None else one.points[good].night.build
    return one.key.model_hash, one.key.parameters, build


def _asked(
    ab: AbFunction, night: BoardTonight, suspects: Sequence[Series], note: Callable[[str], None]
) -> Ab:
    """An A/B, and another one where the first blames the engine."""
    first = ab(night, suspects)
    names = {one.metric.ab for one in suspects}
    if not asks_again(one.verdict for name, one in first.answers.items() if name in names):
        return first
    note(f"{night.board}: an A/B finds tonight's engine worse; once more before that is told")
    second = ab(night, suspects)
    answers, sentences = dict(first.answers), dict(first.sentences)
    for name, answer in first.answers.items():
        if answer.verdict == WORSE:
            answers[name] = settled(answer, second.answers.get(name))
            failed = second.why or "it was not told"
            once = f"one A/B found it worse ({first.sentences.get(name, '')}), another: {failed}"
            sentences[name] = second.sentences.get(name, once)
    reached = first.reached if second.why else first.reached & second.reached
    return Ab(answers, sentences, second.search_id or first.search_id, reached)


def _alert(
    night: BoardTonight, one: Series, campaign_id: str, ab: Ab | None, well: bool | None
) -> Alert:
    found = night.looks[one.key]
    tonight = one.points[-1]
    good = one.points[found.good_night] if found.good_night is not None else None
    name = one.metric.ab or ""
    answer = ab.answers.get(name) if ab is not None else None
    clears = answer is not None and answer.verdict != WORSE
    if ab is not None and clears and one.metric.name not in ab.reached:
        why = "it was compared less deep in the context than the night measures it"
        answer, ab = None, dataclasses.replace(ab, why=why)
    decided = decide(found, night.together, answer)
    return Alert(
        detector=DETECTOR,
        board=night.board,
        stage=one.metric.stage,
        metric=one.metric.name,
        series=one.key.hash,
        campaign_id=campaign_id,
        run_id=tonight.run_id,
        night=tonight.at,
        before=found.level,
        now=tonight.night.value,
        shift=found.shift,
        p=found.p,
        nights=found.nights,
        good_build=good.night.build if good is not None else None,
        build=tonight.night.build,
        decided=decided.value,
        told=_told(decided, one, night.together, ab, well),
        search_id=ab.search_id if ab is not None else None,
        right=decided.right,
    )


def _told(
    decided: Decided, one: Series, together: Environment, ab: Ab | None, well: bool | None
) -> str:
    checked = {True: f"; {CHECKED} passes", False: f"; {CHECKED} fails", None: ""}[well]
    said = ab.sentences.get(one.metric.ab or "", "") if ab is not None else ""
    if decided is Decided.CONFIRMED:
        if ab is None:
            return "the nights before gave exactly the same, so the engine is to blame"
        return f"two A/Bs confirm it: {said}"
    if decided is Decided.ENVIRONMENT:
        beside = f"; an A/B clears the engine: {said}" if said else ""
        return f"{together.share:.0%} of the board's series moved together{beside}{checked}"
    if decided is Decided.BOARD:
        return f"the same engine was good: the board changed, or what runs on it{checked}"
    if decided is Decided.REFUTED:
        return f"an A/B clears the engine: {said}"
    why = (ab.why if ab is not None else "") or said or "there was no A/B"
    beside = f"; {together.share:.0%} of the board's series moved together{checked}"
    return f"not decided: {why}{beside if together.shifted else ''}"


class BoardAb:
    """Runs A/Bs on real boards."""

    def __init__(
        self,
        boards: Sequence[Board],
        model: PreparedModel,
        asked: Engine,
        store: Store,
        command: Sequence[str],
        note: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:
        """`model` and `asked` are tonight's."""
        self._boards = {board.name: board for board in boards}
        self._model, self._asked, self._store = model, asked, store
        self._command, self._note, self._stop = command, note, stop
        self._build = build_hash()

    def __call__(self, night: BoardTonight, suspects: Sequence[Series]) -> Ab:
        first = suspects[0]
        look = night.looks[first.key]
        if look.good_night is None:
            return Ab(why="no night before it was good")
        if self._stop():
            return Ab(why="the night was stopped")
        good, new = first.points[look.good_night].night.build, first.points[-1].night.build
        if new != self._build:
            return Ab(why="the engine was changed since the night ran it")
        sources = kept(good)
        if sources is None:
            return Ab(why=f"the sources of the good engine ({good[:8]}) are not kept any more")
        row = self._store.run(first.points[-1].run_id)
        measure = measure_for(row, suspects)
        try:
            report = self._compared(night.board, suspects, row, measure, sources, good)
        except HarnessError as error:
            return Ab(why=str(error))
        return ab_of(report, reached(row, suspects, measure))

    def _compared(
        self,
        board: str,
        suspects: Sequence[Series],
        row: RunRow,
        measure: Measure,
        sources: Any,
        good: str,
    ) -> Report:
        own = self._boards[board]
        choice = choice_of(row)
        new = Arm("tonight", own, self._asked, self._model, self._build, choice=choice)
        old = dataclasses.replace(
            new, title="good night", build=good, sources=sources, source=f"engine {good[:8]}"
        )
        arms = {"A": old, "B": new}
        deciding = tuple(dict.fromkeys(one.metric.ab for one in suspects if one.metric.ab))
        orders = Orders(measure, deciding, reason=REASON)
        return compare_on_board(
            arms,
            orders,
            self._store,
            command=self._command,
            note=lambda text: self._note(f"{board}: {text}"),
            stop=self._stop,
        )


def ab_of(report: Report, reached: frozenset[str]) -> Ab:
    """What an A/B's report says of each metric; an invalid one says nothing."""
    found = report.judgement
    if found.verdict == INVALID:
        return Ab(search_id=report.search_id, why=report.headline)
    return Ab(
        {name: Answer(one.verdict, one.high - 1) for name, one in found.metrics.items()},
        {name: one.sentence for name, one in found.metrics.items()},
        report.search_id,
        reached,
    )


def choice_of(row: RunRow) -> EngineChoice | None:
    """How a run's engine ran, for another to run alike; None where it did not tell."""
    told = row.engine or {}
    options = told.get("engine")
    if not isinstance(options, Mapping):
        return None
    cpus = told.get("cpus")
    pin = tuple(int(cpu) for cpu in cpus) if isinstance(cpus, (list, tuple)) and cpus else None
    return EngineChoice(EngineOptions.from_mapping(dict(options)), pin)


def measure_for(row: RunRow, suspects: Sequence[Series]) -> Measure:
    """As deep in the context as the suspects are measured, as far as a prompt takes 30 s; a slower
    board is compared less deep, where an engine's slowdown shows as well."""
    details = row.details or {}
    deepest = _context(row) - TOKENS - 1
    depth = max(_depth(one.metric.name, row) for one in suspects)
    rate = float(details.get("prefill_tokens_per_s") or 0.0)
    if rate > 0:
        depth = min(depth, max(AT_START, int(rate * PREFILL_S)))
    return Measure(max(1, min(depth, deepest)), TOKENS, REPEATS)


def reached(row: RunRow, suspects: Sequence[Series], measure: Measure) -> frozenset[str]:
    """The numbers that are compared at least as deep as a night measures them. Deeper is well
    enough: what an engine loses at the start is a part of what it loses later."""
    names = {one.metric.name for one in suspects}
    return frozenset(name for name in names if measure.depth >= _depth(name, row))


def _depth(metric: str, row: RunRow) -> int:
    """Positions in the cache at which a night measures it."""
    context = _context(row)
    depths = {
        "tpot_start": AT_START,
        "tpot_middle": context // 2,
        "tpot_end": context - TOKENS - 1,
    }
    return max(1, min(depths.get(metric, PROMPT), context - TOKENS - 1))


def _context(row: RunRow) -> int:
    return int((row.details or {}).get("context") or PROMPT)
