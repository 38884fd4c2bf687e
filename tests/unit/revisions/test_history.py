"""Histories as git has them, and what is wrong with some."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.bisect.history import History
from harness.errors import HarnessError
from tests.planted.repos import Repo

ENGINE = "engine/__init__.py"


def chain(repo: Repo, count: int) -> list[str]:
    return [repo.commit(f"Step {at}", {ENGINE: f"STEP = {at}\n"}) for at in range(count)]


def test_a_line_runs_from_good_to_bad_and_names_what_it_meets(repo: Repo) -> None:
    hashes = chain(repo, 4)
    history = History(repo.folder)
    line = history.line(history.revision(hashes[0]), history.revision("HEAD"))
    assert [one.hash for one in line] == hashes
    assert line[1].name == f"{line[1].short} Step 1"
    assert hashes[1].startswith(line[1].short)
    assert len({one.build for one in line}) == 4


def test_a_merge_is_one_step_of_the_line(repo: Repo) -> None:
    first = chain(repo, 2)
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Aside", {"engine/aside.py": "A = 1\n"})
    repo.git("checkout", "--quiet", "main")
    repo.commit("Meanwhile", {ENGINE: "STEP = 9\n"})
    merge = repo.merge("side", "Merge side")
    history = History(repo.folder)
    line = history.line(history.revision(first[1]), history.revision("main"))
    assert [one.subject for one in line] == ["Step 1", "Meanwhile", "Merge side"]
    assert line[-1].is_merge
    main, side = history.revisions(line[-1].parents)
    fork = history.fork_point(main, side)
    assert fork is not None
    assert fork.hash == first[1]
    assert [one.subject for one in history.line(fork, side)] == ["Step 1", "Aside"]
    assert line[-1].hash == merge


def test_revisions_that_differ_in_tests_and_texts_alone_are_one_build(repo: Repo) -> None:
    chain(repo, 1)
    repo.commit("Document", {"engine/README.md": "text\n", "README.md": "text\n"})
    repo.commit("Test", {"engine/tests/test_it.py": "assert True\n"})
    repo.commit("Native", {"engine/native/src/run.c": "int x;\n"})
    history = History(repo.folder)
    line = history.line(history.revision("HEAD~3"), history.revision("HEAD"))
    assert line[0].build == line[1].build == line[2].build != line[3].build


def test_an_export_holds_the_engine_as_it_was_and_is_made_once(repo: Repo) -> None:
    hashes = chain(repo, 2)
    history = History(repo.folder)
    folder = history.export(history.revision(hashes[0]))
    assert (folder / "__init__.py").read_text() == "STEP = 0\n"
    assert folder.name == "engine"
    assert history.export(history.revision(hashes[0])) == folder
    assert repo.git("status", "--porcelain") == ""
    assert repo.git("worktree", "list").count("\n") == 0


def test_the_engine_may_lie_elsewhere_or_be_the_whole_repository(repo: Repo) -> None:
    repo.commit("Far", {"a/b/engine/__init__.py": "X = 1\n"})
    history = History(repo.folder, "a/b/engine")
    assert (history.export(history.revision("HEAD")) / "__init__.py").is_file()
    whole = History(repo.folder, ".")
    assert (whole.export(whole.revision("HEAD")) / "a" / "b").is_dir()
    with pytest.raises(HarnessError, match="inside the repository"):
        History(repo.folder, "../elsewhere")


def test_a_revision_without_an_engine_has_no_build_and_no_export(repo: Repo) -> None:
    repo.commit("Empty", {"README.md": "text\n"})
    chain(repo, 1)
    history = History(repo.folder)
    before = history.revision("HEAD~1")
    assert before.build == ""
    with pytest.raises(HarnessError, match="no engine"):
        history.export(before)


@pytest.mark.parametrize("text", ["nowhere", "", "--all", "HEAD~99"])
def test_an_unknown_revision_is_told_with_a_remedy(repo: Repo, text: str) -> None:
    chain(repo, 1)
    with pytest.raises(HarnessError, match=r"no revision .*git log"):
        History(repo.folder).revision(text)


def test_a_folder_without_a_repository_is_told(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with pytest.raises(HarnessError, match=r"not a git repository.*--repo"):
        History(tmp_path / "plain")
    with pytest.raises(HarnessError, match="no such folder"):
        History(tmp_path / "absent")


def test_good_and_bad_the_wrong_way_round_are_told(repo: Repo) -> None:
    chain(repo, 3)
    history = History(repo.folder)
    old, new = history.revision("HEAD~2"), history.revision("HEAD")
    with pytest.raises(HarnessError, match="the other way round"):
        history.line(new, old)
    with pytest.raises(HarnessError, match="both"):
        history.line(new, new)


def test_a_good_revision_of_another_branch_is_told_with_the_fork(repo: Repo) -> None:
    fork = chain(repo, 2)[-1]
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Aside", {ENGINE: "STEP = 7\n"})
    repo.git("checkout", "--quiet", "main")
    repo.commit("Further", {ENGINE: "STEP = 8\n"})
    history = History(repo.folder)
    with pytest.raises(HarnessError, match=f"forked at {fork[:7]}.*harness bisect revision"):
        history.line(history.revision("side"), history.revision("main"))


def test_histories_without_a_common_root_are_told(repo: Repo) -> None:
    chain(repo, 1)
    repo.git("checkout", "--quiet", "--orphan", "other")
    repo.commit("Another beginning", {ENGINE: "STEP = 5\n"})
    history = History(repo.folder)
    with pytest.raises(HarnessError, match="no common history"):
        history.line(history.revision("main"), history.revision("other"))


def test_a_shallow_clone_is_told_with_the_way_out(repo: Repo, tmp_path: Path) -> None:
    hashes = chain(repo, 5)
    shallow = tmp_path / "shallow"
    repo.git("clone", "--quiet", "--depth", "2", f"file://{repo.folder}", str(shallow))
    history = History(shallow)
    with pytest.raises(HarnessError, match="git fetch --unshallow"):
        history.revision(hashes[0])
    # What is whole in it can be searched.
    assert len(history.line(history.revision("HEAD~1"), history.revision("HEAD"))) == 2


def test_a_merge_whose_side_is_cut_off_in_a_shallow_clone_is_told(
    repo: Repo, tmp_path: Path
) -> None:
    chain(repo, 1)
    repo.git("checkout", "--quiet", "-b", "side")
    for at in range(3):
        repo.commit(f"Aside {at}", {"engine/aside.py": f"A = {at}\n"})
    repo.git("checkout", "--quiet", "main")
    good = repo.commit("Meanwhile", {ENGINE: "STEP = 9\n"})
    repo.merge("side", "Merge side")
    shallow = tmp_path / "shallow"
    repo.git("clone", "--quiet", "--depth", "2", f"file://{repo.folder}", str(shallow))
    history = History(shallow)
    with pytest.raises(HarnessError, match=r"cut off.*--unshallow"):
        history.line(history.revision(good), history.revision("HEAD"))


def test_an_engine_in_a_submodule_is_told_with_the_repository_to_search(
    repo: Repo, repos: Callable[[str], Repo]
) -> None:
    inner = repos("inner")
    inner.commit("Inside", {"__init__.py": "X = 1\n"})
    repo.commit("Outside", {"README.md": "text\n"})
    repo.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add",
             str(inner.folder), "engine")  # fmt: skip
    repo.commit("Add the engine")
    with pytest.raises(HarnessError, match=r"engine is a submodule.*--engine-path \."):
        History(repo.folder).revision("HEAD")


def test_a_submodule_inside_the_engine_is_told(repo: Repo, repos: Callable[[str], Repo]) -> None:
    inner = repos("inner")
    inner.commit("Inside", {"kernel.c": "int x;\n"})
    chain(repo, 1)
    repo.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add",
             str(inner.folder), "engine/native/src")  # fmt: skip
    repo.commit("Add kernels")
    with pytest.raises(HarnessError, match="engine/native/src is a submodule"):
        History(repo.folder).revision("HEAD")


def test_changes_that_are_not_committed_are_told_where_they_would_mislead(repo: Repo) -> None:
    chain(repo, 2)
    history = History(repo.folder)
    head, before = history.revision("HEAD"), history.revision("HEAD~1")
    history.require_committed(head)
    (repo.folder / ENGINE).write_text("STEP = 77\n")
    with pytest.raises(HarnessError, match=r"engine/__init__\.py changed and not committed"):
        history.require_committed(head)
    history.require_committed(before)  # what is checked out is not what is searched


def test_a_revert_is_made_in_a_clone_and_leaves_the_repository_alone(repo: Repo) -> None:
    base = {"engine/one.py": "A = 1\n", "engine/two.py": "B = 1\n"}
    repo.commit("Begin", base)
    culprit = repo.commit("Break", {"engine/one.py": "A = 2\n"})
    repo.commit("Go on", {"engine/two.py": "B = 2\n"})
    (repo.folder / "engine" / "two.py").write_text("B = 3\n")  # work in progress stays
    before = repo.git("status", "--porcelain"), repo.git("worktree", "list"), repo.git("branch")
    history = History(repo.folder)
    found = history.reverted(history.revision(culprit), history.revision("HEAD"))
    assert found is not None
    assert (found / "one.py").read_text() == "A = 1\n"
    assert (found / "two.py").read_text() == "B = 2\n"
    after = repo.git("status", "--porcelain"), repo.git("worktree", "list"), repo.git("branch")
    assert after == before


def test_a_revert_that_does_not_apply_is_none(repo: Repo) -> None:
    hashes = chain(repo, 3)
    history = History(repo.folder)
    assert history.reverted(history.revision(hashes[1]), history.revision("HEAD")) is None


def test_a_bare_repository_and_a_linked_worktree_can_be_searched(
    repo: Repo, tmp_path: Path
) -> None:
    hashes = chain(repo, 2)
    repo.git("clone", "--quiet", "--bare", str(repo.folder), str(tmp_path / "bare"))
    repo.git("worktree", "add", "--quiet", "--detach", str(tmp_path / "linked"))
    for folder in (tmp_path / "bare", tmp_path / "linked"):
        history = History(folder)
        line = history.line(history.revision(hashes[0]), history.revision("HEAD"))
        history.require_committed(line[-1])
        assert history.export(line[0]).is_dir()
        assert history.reverted(line[1], line[1]) is not None


def test_a_hook_that_sets_gits_variables_does_not_redirect_us(
    repo: Repo, repos: Callable[[str], Repo], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain(repo, 1)
    other = repos("other")
    other.commit("Elsewhere", {ENGINE: "STEP = 3\n"})
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))
    assert History(repo.folder).revision("HEAD").subject == "Step 0"


def test_git_that_is_not_there_is_told(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HarnessError, match=r"no git on PATH.*install git"):
        History(repo.folder)


def test_files_that_would_leave_the_export_are_refused(repo: Repo, cache: Path) -> None:
    chain(repo, 1)
    (repo.folder / "engine" / "out").symlink_to("../../../../outside")
    repo.commit("Link outwards")
    history = History(repo.folder)
    with pytest.raises((HarnessError, subprocess.SubprocessError), match="outside"):
        history.export(history.revision("HEAD"))
    assert not [path for path in (cache / "revisions").iterdir() if path.name[0] != "."]
