"""The history of a repository that holds the engine, read by the `git` command.

Nothing is changed in the repository: sources are exported with `git archive` into a cache, under
the hash of the engine's tree, and a revert is tried in a clone of its own. Revisions are named by
their short hash and subject.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from harness.deploy.cache import locked
from harness.errors import HarnessError
from harness.paths import cache_dir
from harness.verdicts import one_line

GIT_S = 120.0  # for one command; a partial clone may have to fetch
CHECKOUT_S = 600.0
KEPT_EXPORTS = 60
SUBJECT = 60  # characters of a subject that are shown
# Set for hooks and by tools around git: they would point our commands at another repository.
_POINTERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
_FORMAT = "--format=%H%x00%h%x00%P%x00%s"
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclasses.dataclass(frozen=True)
class Revision:
    """A commit. `build` names what of it runs on a board, "" when it holds no engine; `tree` is
    git's name of the engine's folder in it."""

    hash: str
    short: str
    subject: str
    parents: tuple[str, ...]
    tree: str = ""
    build: str = ""

    @property
    def name(self) -> str:
        """For people: "1a2b3c4 Subject"."""
        return f"{self.short} {one_line(self.subject, SUBJECT)}".rstrip()

    @property
    def is_merge(self) -> bool:
        return len(self.parents) > 1


class History:
    """The commits of one repository. `engine_path` is the engine's folder in it, "." for its root.

    Raises HarnessError when it is no repository, or git cannot be run.
    """

    def __init__(self, repo: Path, engine_path: str = "engine") -> None:
        inside = PurePosixPath(engine_path)
        if inside.is_absolute() or ".." in inside.parts:
            raise HarnessError(
                f"engine path {engine_path!r}",
                expected="a folder inside the repository, such as engine",
                remedy="name it with --engine-path",
            )
        self.path = "" if str(inside) == "." else inside.as_posix()
        self.repo = repo
        if not repo.is_dir():
            raise HarnessError("no such folder", where=str(repo), remedy="name it with --repo")
        # Not the top folder: a bare repository has none, and a linked worktree shares its objects.
        self.store = repo / self._git("rev-parse", "--git-common-dir").strip()
        self._trees: dict[str, str] = {}  # git's tree → build
        self._known: dict[str, Revision] = {}

    # --- revisions ----------------------------------------------------------------------------

    def revision(self, text: str) -> Revision:
        """The commit that `text` names: a hash, branch, tag, HEAD~3. Raises HarnessError."""
        found = self._try(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}"
        )
        if found is None or not text:
            remedy = "see `git log --oneline`; `git fetch --tags` brings what is not here"
            if self.shallow:
                remedy = "this clone is shallow: `git fetch --unshallow` brings the rest"
            raise HarnessError(f"no revision {text!r}", where=str(self.repo), remedy=remedy)
        return self.revisions([found.strip()])[0]

    def revisions(self, hashes: Sequence[str]) -> list[Revision]:
        """The commits of those hashes, in that order."""
        missing = [name for name in dict.fromkeys(hashes) if name not in self._known]
        if missing:
            text = self._git(
                "log", "--no-walk=unsorted", "--stdin", _FORMAT, stdin="\n".join(missing)
            )
            self._read(text)
        return [self._known[name] for name in hashes]

    def line(self, good: Revision, bad: Revision) -> list[Revision]:
        """From `good` to `bad`, both included, along first parents: what was merged on the way is
        one step, its merge.

        Raises HarnessError when `good` is not an ancestor of `bad`, or history is cut off between.
        """
        if good.hash == bad.hash:
            raise HarnessError(
                f"the good and the bad revision are both {good.name}",
                remedy="name an older one that was good",
            )
        self._require_ancestor(good, bad)
        self._require_whole(good, bad)
        text = self._git("log", "--first-parent", "--reverse", _FORMAT, f"{good.hash}..{bad.hash}")
        return [good, *self._read(text)]

    def fork_point(self, one: Revision, other: Revision) -> Revision | None:
        """Where two lines left each other; None when they have nothing in common."""
        found = self._try("merge-base", one.hash, other.hash)
        return self.revisions([found.split()[0]])[0] if found else None

    @property
    def shallow(self) -> bool:
        return self._git("rev-parse", "--is-shallow-repository").strip() == "true"

    def uncommitted(self) -> list[str]:
        """Files of the engine that differ from what is committed."""
        if self._git("rev-parse", "--is-bare-repository").strip() == "true":
            return []
        told = self._git(
            "status", "--porcelain", "--untracked-files=no", "-z", "--", self._pathspec
        )
        return [entry[3:] for entry in told.split("\0") if len(entry) > 3]

    def require_committed(self, bad: Revision) -> None:
        """Raises HarnessError when `bad` is what is checked out and the engine was changed since:
        those changes belong to no revision, and the failure may be theirs."""
        changed = self.uncommitted()
        if changed and bad.hash == self._git("rev-parse", "HEAD").strip():
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise HarnessError(
                f"{changed[0]}{more} changed and not committed",
                where=str(self.repo),
                expected=f"the engine as {bad.name} has it",
                remedy="commit or stash that, or search without it: --ignore-uncommitted",
            )

    def _require_ancestor(self, good: Revision, bad: Revision) -> None:
        if self._try("merge-base", "--is-ancestor", good.hash, bad.hash) is not None:
            return
        if self.shallow:
            raise HarnessError(
                f"{good.name} is not among the ancestors of {bad.name} that are here",
                where=str(self.repo),
                remedy="this clone is shallow: `git fetch --unshallow` brings the rest",
            )
        base = self.fork_point(good, bad)
        if base is None:
            raise HarnessError(
                f"{good.name} and {bad.name} have no common history",
                where=str(self.repo),
                remedy="name two revisions of one branch",
            )
        if base.hash == bad.hash:
            raise HarnessError(
                f"{bad.name} is an ancestor of {good.name}",
                where=str(self.repo),
                expected="the good revision before the bad one",
                remedy="name them the other way round, or look for what repaired it in `git log`",
            )
        raise HarnessError(
            f"{good.name} is not an ancestor of {bad.name}: they forked at {base.name}",
            where=str(self.repo),
            remedy=f"name the fork as the good one, if it is: harness bisect revision {base.short} "
            f"{bad.short} …",
        )

    def _boundary(self) -> set[str]:
        """Commits whose parents a shallow clone has not."""
        found = self._git("rev-parse", "--git-path", "shallow").strip()
        try:
            return set((self.repo / found).read_text().split())
        except OSError:
            return set()

    def _require_whole(self, good: Revision, bad: Revision) -> None:
        cuts = self._boundary()
        if not cuts:
            return
        between = set(self._git("rev-list", f"{good.hash}..{bad.hash}").split())
        if cuts & between:
            raise HarnessError(
                f"history is cut off between {good.name} and {bad.name}",
                where=str(self.repo),
                expected="every commit between the two",
                remedy="this clone is shallow: `git fetch --unshallow` brings the rest",
            )

    def _read(self, text: str) -> list[Revision]:
        rows = [line.split("\0", 3) for line in text.split("\n") if line.count("\0") >= 3]
        fresh = [row for row in rows if row[0] not in self._known]
        trees = self._trees_of([row[0] for row in fresh])
        for name, short, parents, subject in fresh:
            tree = trees[name]
            build = self._build_of(tree, short) if tree else ""
            self._known[name] = Revision(
                name, short, subject.strip(), tuple(parents.split()), tree, build
            )
        return [self._known[row[0]] for row in rows]

    # --- sources ------------------------------------------------------------------------------

    @property
    def _pathspec(self) -> str:
        return f":(top,literal){self.path or '.'}"

    def _trees_of(self, hashes: Sequence[str]) -> dict[str, str]:
        """Commit → the tree of the engine's folder, "" where there is none."""
        if not hashes:
            return {}
        asked = "".join(f"{name}:{self.path}\n" for name in hashes)
        told = self._git("cat-file", "--batch-check=%(objecttype) %(objectname)", stdin=asked)
        found = {}
        for name, line in zip(hashes, told.splitlines(), strict=True):
            kind, _, tree = line.partition(" ")
            found[name] = tree if kind == "tree" else ""
            if kind != "tree" and self.path:
                self._require_no_submodule(name)
        return found

    def _require_no_submodule(self, name: str) -> None:
        """Raises HarnessError when the engine's folder is, or lies in, a submodule."""
        parts = PurePosixPath(self.path).parts
        places = ["/".join(parts[: at + 1]) for at in range(len(parts))]
        for line in self._git("ls-tree", "--full-tree", name, *places).splitlines():
            head, _, path = line.partition("\t")
            if head.startswith("160000 "):
                raise self._submodule(path, name[:9])

    def _build_of(self, tree: str, short: str) -> str:
        """A name for what of a tree runs on a board: Python sources and native sources, the same
        as bundles take. Trees that differ in tests or texts alone have the same build."""
        if tree in self._trees:
            return self._trees[tree]
        digest = hashlib.sha256()
        some = False
        for entry in self._git("ls-tree", "-r", "-z", "--full-tree", tree).split("\0"):
            head, _, name = entry.partition("\t")
            if not name:
                continue
            mode, _, blob = head.split(" ", 2)
            if mode == "160000":
                raise self._submodule(f"{self.path}/{name}" if self.path else name, short)
            if runs_on_board(name):
                some = True
                digest.update(f"{mode} {blob} {name}\n".encode())
        self._trees[tree] = digest.hexdigest()[:16] if some else ""
        return self._trees[tree]

    def _submodule(self, path: str, short: str = "") -> HarnessError:
        return HarnessError(
            f"{path} is a submodule" + (f" in {short}" if short else ""),
            where=str(self.repo),
            expected="the engine's own files",
            remedy=f"search the repository that holds them: --repo {self.repo / path} "
            "--engine-path .",
        )

    def export(self, revision: Revision) -> Path:
        """The engine's folder of a revision, as files, in the cache. Not to be written to.

        Raises HarnessError for a revision without one.
        """
        if not revision.build:
            raise HarnessError(
                f"{revision.name} has no engine in {self.path or 'its root'}",
                where=str(self.repo),
                remedy="name the engine's folder with --engine-path",
            )
        return self.export_tree(revision.tree)

    def export_tree(self, tree: str, repo: Path | None = None) -> Path:
        """A tree of the engine's folder (of `repo`, by default of ours) as files in the cache."""
        if not _HASH.fullmatch(tree):
            raise ValueError(f"tree {tree!r}, expected a hash")
        folder = cache_dir("revisions")
        place = folder / tree / "engine"
        with locked(folder / ".lock"):
            if place.is_dir():
                os.utime(place.parent)
                return place
            with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as name:
                inside = Path(name) / "whole" / "engine"
                inside.mkdir(parents=True)
                with tempfile.TemporaryFile() as file:
                    self._run(["archive", "--format=tar", tree], repo, stdout=file)
                    file.seek(0)
                    try:
                        # The filter refuses what would be written or point outside.
                        with tarfile.open(fileobj=file) as archive:
                            archive.extractall(inside, filter="data")
                    except (OSError, tarfile.TarError) as error:
                        raise HarnessError(
                            f"the engine cannot be unpacked: {error}",
                            where=f"tree {tree[:12]}",
                            expected="plain files and folders, and space for them",
                            remedy=f"see {folder}; HARNESS_CACHE names another place",
                        ) from error
                inside.parent.rename(place.parent)
            self._prune(folder, place.parent)
        return place

    @staticmethod
    def _prune(folder: Path, keep: Path) -> None:
        """The exports that were used longest ago go first."""
        made = [path for path in folder.iterdir() if _HASH.fullmatch(path.name) and path != keep]
        made.sort(key=lambda path: path.stat().st_mtime_ns)
        for old in made[: -KEPT_EXPORTS + 1]:
            shutil.rmtree(old, ignore_errors=True)

    def reverted(self, culprit: Revision, head: Revision) -> Path | None:
        """The engine of `head` without what `culprit` changed, exported; None when that does not
        come out of it cleanly.

        It is tried in a clone of its own, which shares the objects and is removed.
        """
        with tempfile.TemporaryDirectory(prefix="harness-revert-") as name:
            clone = Path(name) / "clone"
            quiet = ["-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false"]
            made = self._call(
                [
                    *quiet,
                    "clone",
                    "--quiet",
                    "--shared",
                    "--no-checkout",
                    str(self.store.absolute()),
                    str(clone),
                ],
                CHECKOUT_S,
            )
            if made.returncode != 0:
                return None
            steps = [
                ["checkout", "--quiet", "--detach", head.hash],
                ["revert", "--no-commit", *(["-m", "1"] if culprit.is_merge else []), culprit.hash],
            ]
            for step in steps:
                if self._call(["-C", str(clone), *quiet, *step], CHECKOUT_S).returncode != 0:
                    return None
            tree = self._run(["write-tree"], clone).strip()
            if self.path:
                tree = self._run(["rev-parse", f"{tree}:{self.path}"], clone).strip()
            return self.export_tree(tree, clone)

    # --- git ----------------------------------------------------------------------------------

    def _git(self, *arguments: str, stdin: str | None = None) -> str:
        return self._run(list(arguments), None, stdin=stdin)

    def _try(self, *arguments: str) -> str | None:
        """What git says, None when it says no."""
        done = self._call(["-C", str(self.repo), *arguments], GIT_S)
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

    def _run(
        self,
        arguments: Sequence[str],
        repo: Path | None,
        *,
        stdin: str | None = None,
        stdout: IO[bytes] | None = None,
    ) -> str:
        done = self._call(["-C", str(repo or self.repo), *arguments], GIT_S, stdin, stdout)
        if done.returncode != 0:
            said = " ".join(done.stderr.decode(errors="replace").split())[-400:]
            raise HarnessError(
                f"git {arguments[0]} ended with status {done.returncode}: {said or 'no message'}",
                where=str(repo or self.repo),
                expected="a git repository that holds the engine",
                remedy="name it with --repo; the message is git's own",
            )
        return (done.stdout or b"").decode(errors="replace")

    @staticmethod
    def _call(
        arguments: Sequence[str],
        seconds: float,
        stdin: str | None = None,
        stdout: IO[bytes] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Raises HarnessError when git cannot be run or does not end."""
        git = shutil.which("git")
        if git is None:
            raise HarnessError("no git on PATH", remedy="install git: histories are read with it")
        try:
            return subprocess.run(
                [git, *arguments],
                input=None if stdin is None else stdin.encode(),
                stdin=subprocess.DEVNULL if stdin is None else None,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                timeout=seconds,
                check=False,
                env=git_environment(),
            )
        except subprocess.TimeoutExpired as error:
            raise HarnessError(
                f"git {arguments[0]} did not end within {seconds:g} s",
                remedy="try the same by hand; a partial clone may wait for its server",
            ) from error


def git_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What git is run with: English, no questions, no locks, and no other repository."""
    found = {name: value for name, value in environment.items() if name not in _POINTERS}
    return {**found, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"}


def runs_on_board(name: str) -> bool:
    """Whether a file of the engine's folder, by its path there, is part of a bundle: Python
    outside of tests, and the native library's sources."""
    path = PurePosixPath(name)
    if {"tests", "__pycache__"} & set(path.parts):
        return False
    return path.suffix == ".py" or (path.parts[:1] == ("native",) and path.suffix in (".c", ".h"))
