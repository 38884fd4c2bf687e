"""A search for a revision from its command to its outcome: boards, trials kept as they come, a
search that was interrupted gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bisect import performance, revisions
from harness.bisect.board_trials import BoardTrials, run_folder
from harness.bisect.hunt import Build, Finding, Hunt, Make, Search, Standing
from harness.bisect.hunted import ACCURACY_NAME, CRASH, NEW_TOKENS, Hunted, hunted
from harness.bisect.lines import Line, Outcome
from harness.bisect.pytest_trials import PytestTrials
from harness.bisect.trials import Result, Trial
from harness.errors import HarnessError
from harness.farm.deployed import on_board
from harness.inventory.engine import Engine
from harness.jobs.base import BringupOptions
from harness.store.searches import Searches

if TYPE_CHECKING:
    from harness.bisect.history import History, Revision
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.store import Store

KIND = "revision"
BUDGETS = {False: 400, True: 150}  # trials, visits
KNOWN_RATE = 0.75  # of the rate that was seen already: on another line it may be somewhat lower


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a user asked for. `what` is crash, accuracy, tpot, rss, or a test as pytest names it."""

    what: str
    board: Board
    farm: Path
    model: PreparedModel | None = None  # None for a test, which has its own
    model_path: Path | None = None
    engine: Engine = dataclasses.field(default_factory=Engine)
    confidence: float = 0.99
    least_rate: float | None = None  # None: as the kind has it
    budget: int | None = None  # None: BUDGETS
    tokens: int | None = None  # None: as many as the kind generates
    repeats: int | None = None  # of a visit; None: as many as take its time
    any_failure: bool = False

    @property
    def is_test(self) -> bool:
        return is_test(self.what)

    def kind(self) -> Hunted:
        """Raises HarnessError for what is neither a kind nor a test."""
        return hunted(self.what, tokens=self.tokens or NEW_TOKENS, repeats=self.repeats)

    def stage_options(self) -> BringupOptions:
        """For the stage that is run, where one is."""
        options = BringupOptions(engine=self.engine)
        if self.tokens is None:
            return options
        return options.model_copy(update={"accuracy_tokens": self.tokens})

    @property
    def measures(self) -> bool:
        return not self.is_test and self.kind().measures

    def as_options(self) -> dict[str, Any]:
        """Everything that decides what the search does."""
        return {
            "what": self.what,
            "model": self.model.sha256 if self.model is not None else str(self.model_path),
            "engine": self.engine.model_dump(mode="json"),
            "confidence": self.confidence,
            "least_rate": self.least_rate,
            "budget": self.budget,
            "tokens": self.tokens,
            "repeats": self.repeats,
            "any_failure": self.any_failure,
            "environment": dict(self.board.environment),
        }


def is_test(what: str) -> bool:
    """Whether `--what` names a test: a file, with or without the test in it."""
    return "::" in what or what.endswith(".py")


def uses_tiny_model(what: str) -> bool:
    """Whether a hunt needs no more than the two-layer model, unless another is named."""
    return what in (CRASH, ACCURACY_NAME)


@dataclasses.dataclass(frozen=True)
class Watchers:
    """Who hears how a search goes: `standing` after each trial, `tell` what is done now; `stop`
    says when to end."""

    standing: Callable[[Standing], None] = lambda standing: None
    tell: Callable[[str], None] = lambda text: None
    note: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False


def search(
    wanted: Wanted,
    history: History,
    good: Revision,
    bad: Revision,
    store: Store,
    command: Sequence[str],
    watch: Watchers,
    *,
    fresh: bool = False,
) -> tuple[str, Finding]:
    """(id of the search, its finding). One that was interrupted is gone on with, unless `fresh`.

    Raises HarnessError; the trials are kept all the same.
    """
    history.line(good, bad)  # revisions that make no line are told before a board is touched
    searches = Searches(store)
    options = {**wanted.as_options(), "good": good.hash, "bad": bad.hash, "path": history.path}
    search_id = None if fresh else searches.interrupted(KIND, wanted.board.name, options)
    if search_id is None:
        search_id = searches.begin(KIND, wanted.board.name, command, options)
    kept = searches.trials(search_id)
    if kept:
        watch.note(f"going on with search {search_id[:8]}, of which {len(kept)} trials are kept")

    def keep(trial: Trial) -> None:
        searches.add(search_id, trial)

    with trials_of(wanted, store, watch, keep) as make:
        hunt = Hunt(history, Replayed(kept, make, keep), search_maker(wanted), watch.standing)
        finding = hunt.run(good, bad)
    named = finding.outcome in (Outcome.NAMED, Outcome.RANGE)
    searches.finish(
        search_id,
        finding.outcome.value,
        finding.headline,
        culprits=[one.name for one in finding.culprits] if named else (),
        confidence=finding.confidence,
        details={**finding.details, "notes": list(finding.notes)},
    )
    return search_id, finding


def search_maker(
    wanted: Wanted,
) -> Callable[[Line, str | None, float | None], Search]:
    """What makes the search of a line; see `Hunt`."""
    budget = wanted.budget or BUDGETS[wanted.measures]
    if wanted.measures:
        kind = wanted.kind()
        measured = performance.Settings(wanted.confidence, kind.least, kind.between, budget)
        return lambda line, signature, rate: performance.PerformanceSearch(line, measured)
    # The same engine computes the same bits, so wrong results come again.
    usual = revisions.SURE_RATE if wanted.what == ACCURACY_NAME else revisions.LEAST_RATE
    least = wanted.least_rate or usual

    def failing(line: Line, signature: str | None, rate: float | None) -> Search:
        rare = least if rate is None else max(least, KNOWN_RATE * rate)
        failures = revisions.FAILURES if signature is None else 1
        settings = revisions.Settings(1.0 - wanted.confidence, rare, budget, failures)
        return revisions.FailureSearch(line, settings, signature)

    return failing


@contextlib.contextmanager
def trials_of(
    wanted: Wanted, store: Store, watch: Watchers, keep: Callable[[Trial], None]
) -> Iterator[Make]:
    """What makes trials, with the board held while it is needed."""
    from harness.farm.runner import stop_virtual_boards

    with contextlib.ExitStack() as stack:
        stack.callback(stop_virtual_boards, store, [wanted.board])
        folder = stack.enter_context(run_folder())
        if wanted.is_test:
            yield PytestTrials(
                wanted.what,
                wanted.board.name,
                wanted.farm,
                folder,
                model=wanted.model_path,
                stop=watch.stop,
                tell=watch.tell,
                keep=keep,
            )
            return
        if wanted.model is None:
            raise HarnessError("no model", expected="one for what runs on the board")
        watch.tell(f"preparing {wanted.board.name}")
        there = stack.enter_context(
            on_board(wanted.board, wanted.model, wanted.engine, store, f"bisect {wanted.what}")
        )
        yield BoardTrials(
            there,
            wanted.engine,
            wanted.kind(),
            wanted.stage_options(),
            folder,
            any_failure=wanted.any_failure,
            stop=watch.stop,
            tell=watch.tell,
            keep=keep,
        )


class Replayed:
    """Gives the stored trials again, in their order, and then makes new ones, which it keeps.

    The searches ask the same questions after the same answers. When something else is asked for,
    the rest of what is stored belongs to another course and is left out.
    """

    def __init__(self, stored: Sequence[Trial], make: Make, keep: Callable[[Trial], None]) -> None:
        self._stored = [trial for trial in stored if trial.result is not Result.INFRA]
        self._make, self._keep = make, keep

    def __call__(self, phase: str, build: Build) -> Trial:
        if self._stored:
            trial = self._stored.pop(0)
            if trial.phase == phase and dict(trial.subject) == dict(build.subject):
                return trial
            self._stored.clear()
        trial = self._make(phase, build)
        self._keep(trial)
        return trial


def working_tree(path: Path) -> Build:
    """The engine as it lies in a folder, committed or not: what `git bisect run` checked out.

    Raises HarnessError when no engine is there.
    """
    if not (path / "__init__.py").is_file():
        raise HarnessError(
            "no engine there",
            where=str(path),
            remedy="name the repository with --repo and the engine's folder with --engine-path",
        )
    return Build("the working tree", {"folder": str(path)}, lambda: path)


def verdict_of(trial: Trial, limit: float | None) -> Result:
    """Whether a trial of --this is good. A measurement is bad above `limit`, in its unit."""
    if trial.evidence.get("untestable"):
        return Result.OTHER
    if limit is None or trial.result is not Result.PASS:
        return trial.result
    if trial.value is None:
        return Result.OTHER
    return Result.FAIL if trial.value > limit else Result.PASS


def as_json(search_id: str, finding: Finding, good: Revision, bad: Revision) -> dict[str, Any]:
    """The whole finding for a program."""

    def plain(one: Revision) -> Mapping[str, Any]:
        return {"hash": one.hash, "short": one.short, "subject": one.subject}

    return {
        "search": search_id,
        "good": plain(good),
        "bad": plain(bad),
        "outcome": finding.outcome.value,
        "headline": finding.headline,
        "culprits": [plain(one) for one in finding.culprits],
        "confidence": finding.confidence,
        "trials": finding.trials,
        "notes": list(finding.notes),
        "details": dict(finding.details),
    }
