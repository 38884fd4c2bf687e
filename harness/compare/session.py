"""A comparison from its orders to its verdict; pairs are kept as they are made, so that the same
command goes on with one that was interrupted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.bisect.board_trials import Stopped, run_folder
from harness.bisect.trials import Result, Trial
from harness.compare.arms import Arm, difference
from harness.compare.judging import METRICS, Judgement, Pair, Visit, judge, words
from harness.compare.measuring import Broken, Measure, Visits
from harness.compare.planning import KIND, noise_of, pairs_of, plan_json, planned, pooled
from harness.errors import BoardError
from harness.farm.deployed import on_board
from harness.jobs.engines import layout_of, wants_native
from harness.statistics.pairs import MOST_PAIRS, PAIRS, order
from harness.statistics.validity import INVALID, UNKNOWN, Validity
from harness.store.searches import Searches

if TYPE_CHECKING:
    from harness.statistics.pairs import Plan
    from harness.store import Store

TRIES = 3  # of a pair: the board was lost, or the two did not begin alike
COOL_S = 30.0  # before a pair is made again
EFFECT = 0.02  # that is planned for
USUAL = Measure()


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a user asked for. `deciding` are the metrics that the verdict is about."""

    measure: Measure = USUAL
    deciding: tuple[str, ...] = tuple(METRICS)
    pairs: int = PAIRS
    most: int = MOST_PAIRS
    effect: float = EFFECT
    reason: str = "compare"


@dataclasses.dataclass(frozen=True)
class Progress:
    """`pairs` of `of` are made; `judgement` is what they say by now, None before the first."""

    pairs: int
    of: int
    text: str
    judgement: Judgement | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    search_id: str
    board: str
    arms: Mapping[str, Arm]
    judgement: Judgement
    pairs: tuple[Pair, ...]
    plans: Mapping[str, Plan]
    deciding: tuple[str, ...]
    difference: tuple[tuple[str, str, str], ...]

    @property
    def headline(self) -> str:
        found = self.judgement
        if found.verdict == INVALID:
            return f"not judged: {found.reason}"
        worst = next(name for name in self.deciding if found.metrics[name].verdict == found.verdict)
        return words(found, worst)

    @property
    def exit_code(self) -> int:
        return 0 if self.judgement.good else 1

    def as_json(self) -> dict[str, Any]:
        found = self.judgement
        return {
            "comparison": self.search_id,
            "board": self.board,
            "verdict": found.verdict,
            "headline": self.headline,
            "arms": {letter: {"title": arm.title} for letter, arm in self.arms.items()},
            "pairs": len(self.pairs),
            "clocks": {"state": found.clocks.state, "reason": found.clocks.reason},
            "difference": [list(row) for row in self.difference],
            **self.details(),
        }

    def details(self) -> dict[str, Any]:
        """What pages show, beside the pairs themselves."""
        found = self.judgement
        metrics = {
            name: {**dataclasses.asdict(one), "sentence": one.sentence}
            for name, one in found.metrics.items()
        }
        return {
            "deciding": list(self.deciding),
            "metrics": {name: _finite(one) for name, one in metrics.items()},
            "plan": plan_json(self.plans),
        }


def compare_on_board(
    arms: Mapping[str, Arm],
    orders: Orders,
    store: Store,
    *,
    command: Sequence[str],
    tell: Callable[[Progress], None] = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    fresh: bool = False,
) -> Report:
    """Holds the board and measures A and B in turns until there is a verdict.

    Raises HarnessError: the board is held, set aside or lost; Stopped when `stop` says so. Pairs
    are kept all the same.
    """
    from harness.farm.runner import stop_virtual_boards

    a, b = arms["A"], arms["B"]
    board = a.board
    # One deployment serves both: native code is there if one of them wants it.
    leading = b if wants_native(b.board, b.engine) and not wants_native(a.board, a.engine) else a
    mixed = wants_native(a.board, a.engine) != wants_native(b.board, b.engine)
    others = [arm.model for arm in (a, b) if arm.model.sha256 != leading.model.sha256]
    layouts = [layout_of("packed")] if mixed else []
    try:
        with (
            run_folder() as folder,
            on_board(
                board,
                leading.model,
                leading.engine,
                store,
                orders.reason,
                sources=a.sources,
                layouts=layouts,
                others=others,
            ) as there,
        ):
            visits = Visits(there, arms, orders.measure, folder, stop)
            return Session(arms, orders, store, command, tell, note, stop, fresh).run(visits)
    finally:
        stop_virtual_boards(store, [board])


class Session:
    """What is made of visits, wherever they come from."""

    def __init__(
        self,
        arms: Mapping[str, Arm],
        orders: Orders,
        store: Store,
        command: Sequence[str],
        tell: Callable[[Progress], None],
        note: Callable[[str], None],
        stop: Callable[[], bool],
        fresh: bool,
        *,
        pause_s: float = COOL_S,
    ) -> None:
        self._arms, self._orders, self._tell, self._stop = arms, orders, tell, stop
        self._note, self._pause_s = note, pause_s
        self._board = arms["A"].board
        self._searches = Searches(store)
        model = arms["A"].model.sha256
        self._plans = planned(store, self._board.name, orders.effect, orders.deciding, model)
        self._noise = {
            name: noise.sd
            for name in METRICS
            if (noise := noise_of(store, self._board.name, name, model)) is not None
        }
        options = {
            "arms": {letter: arm.config() for letter, arm in arms.items()},
            "packages": [arm.model.sha256 for arm in arms.values()],
            "measure": dataclasses.asdict(orders.measure),
            "pairs": [orders.pairs, orders.most],
            "deciding": list(orders.deciding),
        }
        found = None if fresh else self._searches.interrupted(KIND, self._board.name, options)
        self.pairs = pairs_of(self._searches.trials(found)) if found else []
        if found:
            note(f"going on with comparison {found[:8]}: {len(self.pairs)} pairs are kept")
        self.id = found or self._searches.begin(KIND, self._board.name, command, options)

    def run(self, visit: Callable[[str], Visit]) -> Report:
        """Raises BoardError when the board stays in the way, Stopped on Ctrl-C."""
        first, most = self._orders.pairs, self._orders.most
        # One that went on for a second look is not looked at again on the way there.
        target, spoilt = (most if len(self.pairs) > first else first), None
        try:
            while spoilt is None:
                if len(self.pairs) >= target:
                    if target >= most or not self._judge().more:
                        break
                    target = most
                    self._note(f"not decided: up to {target} pairs")
                spoilt = self._pair(visit, target)
        except Broken as error:
            spoilt = error.found
        judgement = self._judge()
        if spoilt is not None:
            clocks = Validity(UNKNOWN, "not asked")
            judgement = Judgement(INVALID, judgement.metrics, clocks, 0, spoilt)
        return self._finished(judgement, visit)

    def _judge(self) -> Judgement:
        virtual = self._board.virtual is not None
        return judge(self.pairs, self._orders.deciding, virtual=virtual)

    def _pair(self, visit: Callable[[str], Visit], target: int) -> str | None:
        """Makes the next pair; why that cannot be, None when it was made."""
        number = len(self.pairs)
        letters = order(number + 1)[-2:]
        why = ""
        for left in range(TRIES - 1, -1, -1):
            try:
                pair = self._made(visit, letters, number, target)
            except BoardError as error:
                if self._stop() or left == 0:
                    raise
                why = f"{error.kind}: {error.found}"
            else:
                gate = pair.gate
                good = gate.state != INVALID
                self._keep(number, pair, Result.PASS if good else Result.INFRA)
                if good:
                    self.pairs.append(pair)
                    self._tell(Progress(len(self.pairs), target, "judging", self._judge()))
                    return None
                why = gate.reason
            self._note(f"pair {number + 1} does not count ({why}); it is made again")
            self._wait()
        return f"pair {number + 1} could not be made in {TRIES} tries: {why}"

    def _made(self, visit: Callable[[str], Visit], letters: str, number: int, target: int) -> Pair:
        found = {}
        for letter in letters:
            self._check()
            self._tell(Progress(number, target, f"pair {number + 1}, {letter}", None))
            try:
                found[letter] = visit(letter)
            except BoardError:
                self._check()  # a run that was ended because of it
                raise
        self._check()
        return Pair(found["A"], found["B"])

    def _keep(self, number: int, pair: Pair, result: Result) -> None:
        for letter, one in (("A", pair.a), ("B", pair.b)):
            trial = Trial(
                "pairs",
                {"pair": number, "arm": letter},
                result,
                value=one.metrics.get(self._orders.deciding[0]),
                seconds=one.seconds,
                run=one.run,
                evidence=one.as_json(),
            )
            self._searches.add(self.id, trial)

    def _finished(self, judgement: Judgement, visit: Callable[[str], Visit]) -> Report:
        resolved = getattr(visit, "config", {})
        config = {
            letter: resolved.get(letter) or arm.config() for letter, arm in self._arms.items()
        }
        rows = tuple(difference(config["A"], config["B"]))
        report = Report(
            self.id,
            self._board.name,
            self._arms,
            judgement,
            tuple(self.pairs),
            self._plans,
            self._orders.deciding,
            rows,
        )
        told = report.as_json()
        details = {name: told[name] for name in ("arms", "clocks", "difference", "deciding",
                                                 "metrics", "plan")}  # fmt: skip
        details["measure"] = dataclasses.asdict(self._orders.measure)
        # Of a board that nobody measured before, the pairs themselves tell the noise.
        own = {name: pooled([self.pairs], name) for name in METRICS}
        details["noise"] = {
            **{name: found.sd for name, found in own.items() if found is not None},
            **self._noise,
        }
        details["pairs"] = [
            {"a": dict(pair.a.metrics), "b": dict(pair.b.metrics)} for pair in self.pairs
        ]
        self._searches.finish(self.id, judgement.verdict, report.headline, details=details)
        return report

    def _wait(self) -> None:
        end = time.monotonic() + self._pause_s
        while time.monotonic() < end:
            self._check()
            time.sleep(0.2)

    def _check(self) -> None:
        if self._stop():
            raise Stopped


def _finite(found: Mapping[str, Any]) -> dict[str, Any]:
    """Without the infinities of an interval that too few pairs leave open: JSON has none."""
    return {
        name: None if value in (float("inf"), float("-inf")) else value
        for name, value in found.items()
    }
