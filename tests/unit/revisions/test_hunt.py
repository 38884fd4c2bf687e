"""The whole hunt over real histories, with trials that only look at the exported sources."""

from __future__ import annotations

import math
from collections.abc import Mapping

from harness.bisect import performance, revisions
from harness.bisect.history import History
from harness.bisect.hunt import Build, Finding, Hunt, Standing
from harness.bisect.lines import Line, Outcome
from harness.bisect.session import Replayed
from harness.bisect.trials import Result, Trial
from tests.planted.repos import Repo

ENGINE = "engine/__init__.py"


class Reading:
    """Trials decided by words in the sources: `bug` fails, `broken` does not build, `slow` takes 30
    % longer."""

    def __init__(self, *, measures: bool = False) -> None:
        self.made: list[Trial] = []
        self._measures = measures

    def __call__(self, phase: str, build: Build) -> Trial:
        texts = [path.read_text() for path in sorted(build.sources().rglob("*.py"))]
        words = " ".join(texts).split()
        evidence: dict[str, object] = {}
        failed = False
        if "broken" in words:
            evidence["untestable"] = "does not compile"
        elif self._measures:
            base = 0.02 * (1.3 if "slow" in words else 1.0)
            luck = 1.0 + 0.002 * math.sin(17.0 * len(self.made))
            evidence["values"] = [base * luck, base * luck * 1.001]
        else:
            failed = "bug" in words
        result = Result.OTHER if "untestable" in evidence else Result.PASS
        trial = Trial(
            phase, build.subject, Result.FAIL if failed else result,
            signature="bug" if failed else None, evidence=evidence,
        )  # fmt: skip
        self.made.append(trial)
        return trial


def make_search(line: Line, signature: str | None, rate: float | None) -> revisions.FailureSearch:
    del rate
    return revisions.FailureSearch(line, signature=signature)


def measure(line: Line, signature: str | None, rate: float | None) -> performance.PerformanceSearch:
    del signature, rate
    return performance.PerformanceSearch(line)


def hunted(repo: Repo, good: str) -> tuple[Finding, Reading]:
    history, reading = History(repo.folder), Reading()
    hunt = Hunt(history, reading, make_search)
    return hunt.run(history.revision(good), history.revision("main")), reading


def commits(repo: Repo, files: Mapping[str, str | None], count: int = 3) -> None:
    """`files`, and then some that change nothing of it."""
    repo.commit("Plant", files)
    for at in range(count):
        repo.commit(f"After {at}", {f"engine/after_{at}.py": "x = 1\n"})


def begin(repo: Repo, count: int = 4) -> str:
    first = repo.commit("Begin", {ENGINE: "x = 0\n"})
    for at in range(count):
        repo.commit(f"Before {at}", {f"engine/before_{at}.py": "x = 1\n"})
    return first


def test_a_planted_bug_is_named_and_a_revert_repairs_it(repo: Repo) -> None:
    good = begin(repo)
    commits(repo, {"engine/fault.py": "bug = 1\n"})
    finding, reading = hunted(repo, good)
    assert finding.outcome is Outcome.NAMED
    assert [one.subject for one in finding.culprits] == ["Plant"]
    assert finding.confidence is not None
    assert finding.confidence >= 0.99
    assert any("a revert repairs it" in note for note in finding.notes)
    assert finding.trials == len(reading.made) <= 20


def test_a_bug_that_came_in_with_a_merge_is_named_inside_of_it(repo: Repo) -> None:
    good = begin(repo, 2)
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Aside", {"engine/aside.py": "x = 1\n"})
    repo.commit("Plant", {"engine/fault.py": "bug = 1\n"})
    repo.commit("Aside still", {"engine/aside.py": "x = 2\n"})
    repo.git("checkout", "--quiet", "main")
    repo.commit("Meanwhile", {"engine/meanwhile.py": "x = 1\n"})
    repo.merge("side", "Merge side")
    repo.commit("After", {"engine/after.py": "x = 1\n"})
    finding, _ = hunted(repo, good)
    assert finding.outcome is Outcome.NAMED
    assert [one.subject for one in finding.culprits] == ["Plant"]
    assert any("Merge side" in note for note in finding.notes)
    assert len(finding.details["levels"]) == 2


def test_a_merge_of_two_sides_that_are_well_is_named_itself(repo: Repo) -> None:
    good = begin(repo, 2)
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Aside", {"engine/aside.py": "x = 1\n"})
    repo.git("checkout", "--quiet", "main")
    repo.commit("Meanwhile", {"engine/meanwhile.py": "x = 1\n"})
    repo.git("merge", "--quiet", "--no-ff", "--no-commit", "side")
    merge = repo.commit("Merge side, by hand", {"engine/hand.py": "bug = 1\n"})
    finding, _ = hunted(repo, good)
    assert [one.hash for one in finding.culprits] == [merge]
    assert any("the merge's own changes" in note for note in finding.notes)


def test_a_commit_that_does_not_build_is_named_with_the_next_one(repo: Repo) -> None:
    good = begin(repo)
    repo.commit("Break the build", {"engine/half.py": "broken = 1\n"})
    commits(repo, {"engine/half.py": "x = 1\n", "engine/fault.py": "bug = 1\n"})
    finding, _ = hunted(repo, good)
    assert finding.outcome is Outcome.RANGE
    assert [one.subject for one in finding.culprits] == ["Break the build", "Plant"]


def test_commits_that_change_no_engine_are_never_tried(repo: Repo) -> None:
    good = begin(repo, 1)
    for at in range(5):
        repo.commit(f"Text {at}", {"README.md": f"{at}\n"})
    commits(repo, {"engine/fault.py": "bug = 1\n"}, 1)
    finding, reading = hunted(repo, good)
    assert [one.subject for one in finding.culprits] == ["Plant"]
    assert len({trial.subject["build"] for trial in reading.made if "build" in trial.subject}) <= 4


def test_a_revert_that_does_not_repair_says_so(repo: Repo) -> None:
    good = begin(repo)
    repo.commit("Plant", {"engine/fault.py": "bug = 1\n"})
    repo.commit("Plant another", {"engine/fault_too.py": "bug = 2\n"})
    repo.commit("After", {"engine/after.py": "x = 1\n"})
    finding, _ = hunted(repo, good)
    assert [one.subject for one in finding.culprits] == ["Plant"]
    assert any("not the only cause" in note for note in finding.notes)


def test_a_slower_commit_is_named_with_what_it_costs(repo: Repo) -> None:
    good = begin(repo, 6)
    commits(repo, {"engine/fault.py": "slow = 1\n"}, 6)
    history, reading = History(repo.folder), Reading(measures=True)
    hunt = Hunt(history, reading, measure)
    finding = hunt.run(history.revision(good), history.revision("main"))
    assert finding.outcome is Outcome.NAMED
    assert [one.subject for one in finding.culprits] == ["Plant"]
    assert "+3" in finding.headline
    assert any("a revert repairs it" in note for note in finding.notes)


def test_stored_trials_take_the_place_of_new_ones(repo: Repo) -> None:
    good = begin(repo)
    commits(repo, {"engine/fault.py": "bug = 1\n"})
    history = History(repo.folder)
    ends = history.revision(good), history.revision("main")
    whole = Reading()
    expected = Hunt(history, whole, make_search).run(*ends)
    kept: list[Trial] = []
    rest = Reading()
    lost = Trial("search", {"revision": "?"}, Result.INFRA)  # decides nothing, and is passed over
    stored = [*whole.made[:3], lost, *whole.made[3:7]]
    again = Hunt(history, Replayed(stored, rest, kept.append), make_search).run(*ends)
    assert again == expected
    assert kept == rest.made == whole.made[7:]


def test_stored_trials_of_another_course_are_left_out(repo: Repo) -> None:
    good = begin(repo)
    commits(repo, {"engine/fault.py": "bug = 1\n"})
    history, reading = History(repo.folder), Reading()
    foreign = [Trial("bad", {"revision": "elsewhere", "build": "x"}, Result.PASS)] * 3
    hunt = Hunt(history, Replayed(foreign, reading, lambda trial: None), make_search)
    finding = hunt.run(history.revision(good), history.revision("main"))
    assert [one.subject for one in finding.culprits] == ["Plant"]


def test_whoever_watches_sees_the_suspects_after_each_trial(repo: Repo) -> None:
    good = begin(repo)
    commits(repo, {"engine/fault.py": "bug = 1\n"})
    history, seen = History(repo.folder), list[Standing]()
    hunt = Hunt(history, Reading(), make_search, seen.append)
    finding = hunt.run(history.revision(good), history.revision("main"))
    last = seen[-1].posterior
    assert max(last, key=lambda name: last[name]) == finding.culprits[0].hash
    assert seen[0].posterior == {}
    assert all(abs(sum(one.posterior.values()) - 1) < 1e-6 for one in seen if one.posterior)
