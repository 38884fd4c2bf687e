"""A search among options on one board: leased, deployed, run by run, each trial kept."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.decode import program_of
from engine.package import Package
from engine.program.passes import QUANTISED, layer_of, pass_names
from harness.bisect.option_space import PLAIN_LAYOUT, Setting, Space
from harness.bisect.option_verdicts import Outcome, Question, Verdict
from harness.bisect.options import OptionSearch
from harness.bisect.ranking import Ranked, Ranking
from harness.bisect.trials import Result, Trial
from harness.errors import HarnessError
from harness.farm.deployed import on_board
from harness.farm.option_trials import Limits, OptionTrials
from harness.farm.runner import stop_virtual_boards
from harness.jobs.engines import layout_of
from harness.store.searches import Searches

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.deploy.models import PreparedModel
    from harness.farm.deployed import Deployed
    from harness.inventory import Board, Engine
    from harness.store import Store

KIND = "options"
MOST_TROUBLE = 5  # of the board, one after the other, in a ranking


@dataclasses.dataclass(frozen=True)
class Orders:
    """What is asked of a search. `rank`: only rank what each option costs."""

    limits: Limits
    delta: float = 0.01
    budget: int = 2000
    least_p: float = 0.05
    seed: int = 0
    signature: str | None = None
    rank: bool = False


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a search tells after each trial; `search` is None while options are ranked."""

    trials: int
    trial: Trial
    search: OptionSearch | None
    of: int | None = None  # trials in all, where that is known


@dataclasses.dataclass(frozen=True)
class Report:
    """The end of a search. `fails` and `passes` are commands that show it."""

    search_id: str
    board: str
    verdict: Verdict
    trials: int
    space: Space
    ranked: Ranked | None
    fails: str
    passes: str
    asked: Outcome = Outcome.NAMED  # GRADED where a ranking was asked for

    @property
    def exit_code(self) -> int:
        """0: named, or ranked as asked; 2: the board or the link; 1: any other end."""
        if self.verdict.outcome is Outcome.BOARD_LOST:
            return 2
        return 0 if self.verdict.outcome is self.asked else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "search": self.search_id,
            "board": self.board,
            "outcome": self.verdict.outcome.value,
            "sentence": self.verdict.sentence,
            "sets": [dataclasses.asdict(one) for one in self.verdict.sets],
            "disable": list(self.verdict.disable),
            "confidence": self.verdict.confidence,
            "suspects": list(self.verdict.suspects),
            "trials": self.trials,
            "options": {option.name: option.words for option in self.space.options},
            "ranking": ranking_json(self.ranked),
            "commands": {"fails": self.fails, "passes": self.passes},
        }


class Interrupted(HarnessError):
    """The user stopped it."""


def search_options(
    board: Board,
    model: PreparedModel,
    asked: Engine,
    store: Store,
    orders: Orders,
    *,
    command: Sequence[str],
    where: Sequence[str],
    tell: Callable[[Progress], None],
    stop: Callable[[], bool],
    fresh: bool = False,
) -> Report:
    """Holds the board and searches until there is an end. `where` are the words of a command that
    say which board and model it is about. Trials that an interrupted search with the same board,
    model, engine and orders left are told again instead of made.

    Raises HarnessError: the board is held or set aside, cannot be deployed to, or has too few
    options; Interrupted when `stop` says so.
    """
    try:
        with on_board(
            board, model, asked, store, "search among options", layouts=plain_layouts(model)
        ) as there:
            return _Search(there, store, orders, command, where, tell, stop, fresh).run()
    finally:
        stop_virtual_boards(store, [board])


def plain_layouts(model: PreparedModel) -> tuple[str, ...]:
    """The layout of weights that nobody arranged, if the model can be had in it: k-quants lie
    interleaved only."""
    return () if "_K" in model.scheme.upper() else (PLAIN_LAYOUT,)


def space_of(model: PreparedModel, engine: EngineOptions, pin: tuple[int, ...] | None) -> Space:
    """The options of an engine that runs this model so."""
    with Package.open(model.package) as package:
        program = program_of(package, dataclasses.replace(engine, fused=False, passes_off=()))
        layers = [
            layer_of(op)
            for op in program.ops
            if op.kind == "linear" and package.tensors[op.weights[0]].scheme in QUANTISED
        ]
    layout = layout_of(engine.unit)
    plain = (*plain_layouts(model), layout)[0]
    full = Setting(engine, pin, layout)
    return Space(full, list(dict.fromkeys(layers)), pass_names(), plain)


class _Search:
    def __init__(
        self,
        there: Deployed,
        store: Store,
        orders: Orders,
        command: Sequence[str],
        where: Sequence[str],
        tell: Callable[[Progress], None],
        stop: Callable[[], bool],
        fresh: bool,
    ) -> None:
        self._there, self._orders, self._tell, self._stop = there, orders, tell, stop
        self._where = where
        choice = there.engine
        self.space = space_of(there.model, choice.options, choice.pin)
        if not len(self.space):
            raise HarnessError(
                f"board {there.board.name} runs the plainest engine that there is",
                expected="at least one option to search among",
                remedy="ask for what fails: --unit, --kv, --engine-option",
            )
        self._trials = OptionTrials(there, self.space, orders.limits, seed=orders.seed, stop=stop)
        self._searches = Searches(store)
        described = self._described()
        found = None if fresh else self._searches.interrupted(KIND, there.board.name, described)
        self._told = self._searches.trials(found) if found else []
        self.id = found or self._searches.begin(KIND, there.board.name, command, described)
        self._count = 0
        self._posteriors: Sequence[Mapping[str, float]] = ()  # of each search for a member

    def _described(self) -> dict[str, Any]:
        """What makes two searches the same."""
        there, full = self._there, self.space.full
        return {
            "model": there.model.sha256,
            "engine": full.engine.to_mapping(),
            "pin": list(full.pin) if full.pin is not None else None,
            "sources": there.engine_hash,
            "environment": dict(there.board.environment),
            "orders": dataclasses.asdict(self._orders),
        }

    def run(self) -> Report:
        orders = self._orders
        ranked = None
        if orders.rank:
            ranked = self._rank()
            verdict = _rank_verdict(ranked)
        else:
            search = OptionSearch(
                self.space,
                delta=orders.delta,
                budget=orders.budget,
                least_p=orders.least_p,
                signature=orders.signature,
            )
            verdict = self._ask(search)
            if verdict.outcome is Outcome.GRADED:
                ranked = self._rank()
            self._posteriors = search.posteriors
        report = self._report(verdict, ranked)
        if verdict.outcome is not Outcome.BOARD_LOST:  # which the same command goes on with
            self._searches.finish(
                self.id,
                verdict.outcome.value,
                verdict.sentence,
                culprits=verdict.names,
                confidence=verdict.confidence,
                details=self._details(report),
            )
        return report

    def _ask(self, search: OptionSearch) -> Verdict:
        while not isinstance(move := search.ask(), Verdict):
            trial = self._trial(move)
            search.tell(trial)
            self._tell(Progress(self._count, trial, search))
        return move

    def _rank(self) -> Ranked:
        names = self.space.names
        ranking = Ranking(
            names,
            {name: self.space.closed([name]) for name in names},
            {name: self.space.without([name]) for name in names},
        )
        trouble = 0
        while not isinstance(move := ranking.ask(), Ranked):
            trial = self._trial(Question(Ranking.phase, move))
            ranking.tell(move, trial)
            trouble = trouble + 1 if trial.result is Result.INFRA else 0
            if trouble == MOST_TROUBLE:
                raise HarnessError(
                    f"{trouble} times in a row the board could not be asked: {trial.signature}",
                    where=f"board {self._there.board.name}",
                    remedy="the same command goes on with the trials that were made",
                )
            self._tell(Progress(self._count, trial, None, len(ranking)))
        return move

    def _trial(self, question: Question) -> Trial:
        """The next stored one, if it answers this question; else a new one, which is stored."""
        self._count += 1
        on = [name for name in self.space.names if name in question.options]
        if self._told:
            stored = self._told.pop(0)
            if stored.phase == question.phase and stored.subject.get("on") == on:
                return stored
            self._told = []  # another order of questions: from here on everything is made anew
        if self._stop():
            raise Interrupted("stopped; the same command goes on with the trials that were made")
        try:
            trial = self._trials.make(question)
        except HarnessError as error:
            if not self._stop():
                raise
            raise Interrupted(
                "stopped; the same command goes on with the trials that were made"
            ) from error
        self._searches.add(self.id, trial)
        return trial

    def _report(self, verdict: Verdict, ranked: Ranked | None) -> Report:
        on = self.space.closed([n for one in verdict.sets[:1] for n in one.options])
        fails = self._command(self.space.setting(on)) if verdict.sets else ""
        off = self.space.without(verdict.disable)
        passes = self._command(self.space.setting(off)) if verdict.disable else ""
        name = self._there.board.name
        asked = Outcome.GRADED if self._orders.rank else Outcome.NAMED
        count = self._count
        return Report(self.id, name, verdict, count, self.space, ranked, fails, passes, asked)

    def _command(self, setting: Setting) -> str:
        return " ".join([shlex.join(["harness", "align", *self._where]), *setting.words()])

    def _details(self, report: Report) -> dict[str, Any]:
        told = report.as_json()
        kept = ("sets", "disable", "suspects", "options", "ranking", "commands")
        details = {name: told[name] for name in kept}
        posterior = self._posteriors[0] if self._posteriors else {}
        shown = [{"name": name, "probability": share} for name, share in posterior.items()]
        return {**details, "posterior": shown, "command": report.fails}


def ranking_json(ranked: Ranked | None) -> dict[str, Any] | None:
    """What each option costs, for programs and pages."""
    if ranked is None:
        return None
    return {
        "none": ranked.none,
        "all": ranked.all,
        "graded": ranked.graded,
        "effects": [
            {**dataclasses.asdict(effect), "mean": effect.mean, "share": ranked.share(effect)}
            for effect in ranked.effects
        ],
    }


def _rank_verdict(ranked: Ranked) -> Verdict:
    first = ranked.effects[0]
    share = ranked.share(first)
    if ranked.all is None or ranked.none is None or share is None:
        return Verdict(
            Outcome.INCONCLUSIVE, "there is no loss to rank: all options on lose no more than none"
        )
    told = (
        f"{first.name} costs most: {share:.0%} of a mean KL of {ranked.all:.2g} nats with all "
        f"options on, {ranked.none:.2g} with none"
    )
    return Verdict(Outcome.GRADED, told, suspects=tuple(e.name for e in ranked.effects[:5]))
