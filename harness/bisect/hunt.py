"""The whole search for a revision: along the line, down into merges, and a revert to prove it.

Deciding is left to FailureSearch and PerformanceSearch; trying is left to whoever calls. So the
same hunt runs on a board, on stored trials, and against a simulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.bisect import performance, revisions
from harness.bisect.history import Revision
from harness.bisect.lines import Answer, Line, Outcome, Question
from harness.bisect.trials import Result, Trial

FRESH = ("verify", "revert")  # phases whose trials must be new
MOST_REVERTED = 10  # trials of the bad revision without the culprit
GAIN = 0.5  # of the loss that a revert has to give back, to say that it repairs


class Commits(Protocol):
    """What of a history the hunt needs; harness.bisect.history.History has it."""

    def revisions(self, hashes: Sequence[str]) -> list[Revision]: ...
    def line(self, good: Revision, bad: Revision) -> list[Revision]: ...
    def fork_point(self, one: Revision, other: Revision) -> Revision | None: ...
    def export(self, revision: Revision) -> Path: ...
    def reverted(self, culprit: Revision, head: Revision) -> Path | None: ...


@dataclasses.dataclass(frozen=True)
class Build:
    """What a trial is made of. `subject` is its name in plain JSON, `sources()` its engine's
    folder."""

    name: str
    subject: Mapping[str, Any]
    sources: Callable[[], Path]


# Makes a trial of a build. One that cannot be tested is OTHER, with `untestable` in its evidence;
# of a measurement, `values` there are the repeats of the visit. Trouble of the board is raised.
Make = Callable[[str, Build], Trial]


@dataclasses.dataclass(frozen=True)
class Standing:
    """What is known while a hunt goes on."""

    phase: str
    trying: Revision | None
    trials: int
    posterior: Mapping[str, float]  # hash of a revision → the probability that it is to blame
    revisions: Sequence[Revision]  # the line that is searched now


@dataclasses.dataclass(frozen=True)
class Finding:
    """How a hunt ended. `culprits` are to blame: one when it is NAMED, one of them when it is a
    RANGE or INCONCLUSIVE."""

    outcome: Outcome
    headline: str
    culprits: tuple[Revision, ...]
    confidence: float | None
    trials: int
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Search = revisions.FailureSearch | performance.PerformanceSearch


class Hunt:
    """One search. `search_of(line, signature, rate)` makes the search of a line: of the failure and
    of how often a bad revision shows it, where that is known from another line."""

    def __init__(
        self,
        commits: Commits,
        make: Make,
        search_of: Callable[[Line, str | None, float | None], Search],
        watch: Callable[[Standing], None] = lambda standing: None,
    ) -> None:
        self._commits, self._make, self._search_of = commits, make, search_of
        self._watch = watch
        self.trials = 0
        self._notes: list[str] = []
        self._levels: list[dict[str, Any]] = []
        self._made: dict[str, list[Trial]] = {}  # by build, of every line so far

    def run(self, good: Revision, bad: Revision) -> Finding:
        """Raises HarnessError for revisions that make no line, and what trying raises."""
        found, culprits, search = self._level(good, bad, None)
        confidence = found.confidence
        sentence = found.sentence
        while found.outcome is Outcome.NAMED and culprits[0].is_merge:
            deeper = self._below(culprits[0], search)
            if deeper is None:
                break
            found, culprits, search = deeper
            sentence = found.sentence
            confidence = _product(confidence, found.confidence)
        if found.outcome is Outcome.NAMED:
            self._revert(culprits[0], bad, search)
        named = " or ".join(one.name for one in culprits[:3])
        named += f" or {len(culprits) - 3} more" if len(culprits) > 3 else ""
        headline = f"{named}: {sentence}" if named else sentence
        details = {"levels": self._levels, "signature": getattr(search, "signature", None)}
        return Finding(
            found.outcome,
            headline,
            tuple(culprits),
            confidence,
            self.trials,
            tuple(self._notes),
            {**details, **found.details},
        )

    # --- one line -----------------------------------------------------------------------------

    def _level(
        self, good: Revision, bad: Revision, above: Search | None
    ) -> tuple[Answer, list[Revision], Search]:
        """`above` is the search of the line that led to this one."""
        chain = self._commits.line(good, bad)
        line = Line([one.build or f"none of {one.hash}" for one in chain])
        for at, one in enumerate(chain):
            if not one.build:
                line.exclude(at)
        failing = above if isinstance(above, revisions.FailureSearch) else None
        search = self._search_of(
            line, failing.signature if failing else None, failing.rate if failing else None
        )
        pool = {build: list(trials) for build, trials in self._made.items()}
        while isinstance(asked := search.ask(), Question):
            self._show(asked, chain, search)
            self._try(asked, chain[asked.position], search, pool)
        self._show(None, chain, search)
        self._levels.append(
            {
                "revisions": [
                    {"hash": one.hash, "short": one.short, "subject": one.name.partition(" ")[2],
                     "testable": line.testable(at)}
                    for at, one in enumerate(chain)
                ],
                "posterior": posterior_of(search),
                "outcome": asked.outcome.value,
                "sentence": asked.sentence,
            }
        )  # fmt: skip
        return asked, [chain[at] for at in asked.positions], search

    def _try(
        self,
        question: Question,
        revision: Revision,
        search: Search,
        pool: Mapping[str, list[Trial]],
    ) -> None:
        """Tells the search a trial of another line with the same build, or else a new one."""
        pooled = pool.get(revision.build) if question.phase not in FRESH else None
        if pooled:
            trial = pooled.pop(0)
        else:
            trial = self._trial(question.phase, _build_of(self._commits, revision))
            self._made.setdefault(revision.build, []).append(trial)
        if trial.evidence.get("untestable"):
            search.untestable(question.position)
        elif isinstance(search, performance.PerformanceSearch):
            search.tell(question, values_of(trial))
        else:
            search.tell(question, trial.result, trial.signature)

    def _trial(self, phase: str, build: Build) -> Trial:
        trial = self._make(phase, build)
        self.trials += 1
        return trial

    def _show(self, question: Question | None, chain: Sequence[Revision], search: Search) -> None:
        known = posterior_of(search)
        self._watch(
            Standing(
                phase=question.phase if question else "done",
                trying=chain[question.position] if question else None,
                trials=self.trials,
                posterior={chain[int(at)].hash: share for at, share in known.items()},
                revisions=chain,
            )
        )

    # --- merges -------------------------------------------------------------------------------

    def _below(
        self, merge: Revision, search: Search
    ) -> tuple[Answer, list[Revision], Search] | None:
        """The search among what a merge brought in; None when the merge itself is to blame, or
        when it cannot be told."""
        first, *others = self._commits.revisions(merge.parents)
        for other in others:
            fork = self._commits.fork_point(first, other)
            if fork is None or fork.hash == other.hash:
                continue
            answer, culprits, inner = self._level(fork, other, search)
            if answer.outcome in (Outcome.NAMED, Outcome.RANGE, Outcome.ENVIRONMENT):
                self._notes.append(f"it came in with the merge {merge.name}")
                return answer, culprits, inner
            if answer.outcome is Outcome.SAME_BUILD or answer.outcome is Outcome.BAD_PASSES:
                continue
            self._notes.append(
                f"what the merge brought in from {other.name} could not be told apart "
                f"({answer.outcome}: {answer.sentence}); the merge as a whole is named"
            )
            return None
        self._notes.append(
            "it is a merge, and what was merged does not fail by itself: the merge's own changes, "
            "or both sides together, are to blame"
        )
        return None

    # --- reverting ----------------------------------------------------------------------------

    def _revert(self, culprit: Revision, bad: Revision, search: Search) -> None:
        """Whether the bad revision is repaired by taking the culprit out of it."""
        if culprit.hash == bad.hash:
            return  # its parent was tried, which is the same
        sources = self._commits.reverted(culprit, bad)
        if sources is None:
            self._notes.append(
                f"it does not come out of {bad.name} cleanly, so no revert was tried"
            )
            return
        without = Build(
            f"{bad.short} without {culprit.short}",
            {"revision": bad.hash, "without": culprit.hash},
            lambda: sources,
        )
        if isinstance(search, performance.PerformanceSearch):
            self._revert_measured(without, _build_of(self._commits, bad), search)
            return
        rate = min(0.9, float(search.rate))
        wanted = min(MOST_REVERTED, max(2, math.ceil(math.log(0.01) / math.log1p(-rate))))
        for _ in range(wanted):
            trial = self._trial("revert", without)
            if trial.evidence.get("untestable"):
                self._notes.append(f"{without.name} cannot be tested")
                return
            if trial.result is Result.FAIL and trial.signature == search.signature:
                self._notes.append(f"{without.name} still fails: it is not the only cause")
                return
            if trial.result is not Result.PASS:
                self._notes.append(f"{without.name} fails in another way: {trial.signature}")
                return
        self._notes.append(f"{without.name} passes {wanted} of {wanted}: a revert repairs it")

    def _revert_measured(
        self, without: Build, bad: Build, search: performance.PerformanceSearch
    ) -> None:
        logs: dict[bool, list[float]] = {False: [], True: []}
        for side in (True, False, False, True):
            trial = self._trial("revert", without if side else bad)
            if trial.evidence.get("untestable"):
                self._notes.append(f"{without.name} cannot be measured")
                return
            values = sorted(values_of(trial))
            logs[side].append(math.log(values[len(values) // 2]))
        gained = math.expm1(sum(logs[True]) / 2 - sum(logs[False]) / 2)
        lost = search.effect
        repaired = -gained >= GAIN * lost / (1.0 + lost)
        self._notes.append(
            f"{without.name} is {gained:+.1%} against {bad.name}: "
            + ("a revert repairs it" if repaired else "a revert does not give it back")
        )


def posterior_of(search: Search) -> dict[str, float]:
    """Position, as text, → the probability that it is to blame; candidates that no trial tells
    apart share theirs."""
    found = (
        search.shares()
        if isinstance(search, performance.PerformanceSearch)
        else (search.posterior())
    )
    return {str(at): share for at, share in found.items()}


def values_of(trial: Trial) -> list[float]:
    """The repeats of a visit; its one value where none were kept."""
    values = trial.evidence.get("values") or ([] if trial.value is None else [trial.value])
    return [float(value) for value in values]


def _build_of(commits: Commits, revision: Revision) -> Build:
    subject = {"revision": revision.hash, "build": revision.build}
    return Build(revision.name, subject, lambda: commits.export(revision))


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other
