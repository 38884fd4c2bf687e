"""A race in words: which op completes after which one starts, and what should have kept them in
order."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.bisect.race import Outcome, Race, Verdict
from harness.bisect.trials import Result, Trial

MOST_LISTED = 8
ALL = "all"  # for a list of steps
_NAMES = ("first", "second", "hazard", "buffer", "as")  # of a pair that overlapped
# What the second op does to the first one's buffer, when it does not wait.
_DOES = {"RAW": "reads {buffer}", "WAR": "overwrites {buffer}", "WAW": "writes {buffer} as well"}


def missing_edge(race: Race, trials: Iterable[Trial], parts: Mapping[str, str]) -> str:
    """One sentence for people. `trials` are all of the search, `parts` each op's part of the board.

    The ops are those that overlapped in trials that failed with these steps alone; elsewhere more
    may overlap than matters.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for trial in trials:
        alone = trial.subject.get("on") == {"only": list(race.steps)}
        if trial.result is Result.FAIL and alone:
            told = [item for item in trial.evidence.get("overlaps", ()) if _is_pair(item)]
            # The first one that went wrong: what comes after it may be its consequence.
            for item in [item for item in told if item["first"] in race.steps][:1]:
                seen[tuple(str(item[name]) for name in _NAMES)] += 1
    if not seen:
        return (
            f"{_listed(race.steps)}: nothing that it declares to touch is touched too early; look "
            "for memory that it reads or writes without declaring it"
        )
    (first, second, hazard, buffer, other), _ = seen.most_common(1)[0]
    here, there = parts.get(first, "?"), parts.get(second, "?")
    if here == there:
        why = f"both belong on the {here} queue, which did not keep them in order"
    else:
        why = f"no event between {here} and {there} queue"
    does = _DOES.get(hazard, "touches {buffer}").format(buffer=f"`{buffer}`")
    if other != buffer:
        does += f" (`{other}` lies in the same memory)"
    return f"`{first}` completes after `{second}` starts, which {does}: {why}"


def _is_pair(item: Any) -> bool:
    """A board is not trusted: whatever it told, only this is put into words."""
    return isinstance(item, Mapping) and all(isinstance(item.get(name), str) for name in _NAMES)


def _listed(steps: Sequence[str]) -> str:
    if len(steps) > MOST_LISTED:
        return f"`{steps[0]}` to `{steps[-1]}` ({len(steps)} steps)"
    *most, last = [f"`{step}`" for step in steps]
    return f"{', '.join(most)} and {last}" if most else last


def sentence(race: Race, trials: Iterable[Trial], parts: Mapping[str, str]) -> str:
    """A named race with its numbers."""
    failed, tried = race.alone
    others, without = race.without
    late = f" with {_listed(race.delayed)} held back" if race.delayed else ""
    both = "together" if len(race.steps) > 1 else "alone"
    rest = f"; all others without it, {others} of {without}" if without else ""
    return (
        f"{missing_edge(race, trials, parts)}. Asynchronous {both}{late}, {_listed(race.steps)} "
        f"failed in {failed} of {tried} trials{rest}."
    )


def headline(verdict: Verdict, delta: float) -> str:
    """How a search ended, in one line."""
    if verdict.outcome is Outcome.NAMED:
        names = "; and ".join(_listed(race.steps) for race in verdict.races)
        kind = "a race" if len(verdict.races) == 1 else f"{len(verdict.races)} races"
        end = f" ({verdict.reason})" if verdict.reason else ""
        return f"{kind}: {names}{end}"
    if verdict.outcome is Outcome.STATIC:
        return f"{verdict.reason}: {verdict.findings[0]}"
    if verdict.outcome is Outcome.INCONCLUSIVE and verdict.interval:
        first, last = verdict.interval[0], verdict.interval[-1]
        return (
            f"inconclusive: {verdict.reason}; with {1 - delta:.0%} confidence it lies from {first} "
            f"to {last} ({len(verdict.interval)} steps)"
        )
    return f"{verdict.outcome.value}: {verdict.reason}"


def reproducing(race: Race, command: Sequence[str], steps: Sequence[str], failures: int = 3) -> str:
    """The command that makes it fail again. `command` are the options of the search that say where
    and with what, `steps` all that could be named."""
    failed, tried = race.alone
    trials = max(10, round(failures * tried / max(1, failed)))
    words = ["harness", "bisect", "race", *command, "--try", ",".join(race.steps)]
    if race.delayed:
        everything = set(race.delayed) == set(steps)
        words += ["--held-back", ALL if everything else ",".join(race.delayed)]
    return shlex.join([*words, "--trials", str(trials)])
