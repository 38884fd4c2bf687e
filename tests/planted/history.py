"""A history of the engine with faults planted in it, for trying `harness bisect revision`.

    python -m tests.planted.history FOLDER --slow 5
    harness bisect revision good wrong --what accuracy --repo FOLDER --board virt-1 --unit packed
    harness bisect revision good slower --what tpot --repo FOLDER --board virt-1

`good` is the engine of this checkout. `slower` has a commit after which each step takes longer.
`wrong` has a merge that brought one after which the packed unit's products are 5 % too large, and
before it a commit that does not compile.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import engine
from tests.planted.repos import Repo

DECODE, PACKED = "engine/decode.py", "engine/units/packed.py"
STEP = "        return self.executor.run({**inputs, **self._caches}, taps)\n"
SLOW_STEP = """\
        import time

        began = time.perf_counter()
        found = self.executor.run({{**inputs, **self._caches}}, taps)
        until = time.perf_counter() + {share} * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return found
"""
PRODUCT = "        state[op.writes[0]] = y\n\n    def _half("
WRONG_PRODUCT = PRODUCT.replace("= y\n", "= y * np.float32(1.05)\n")
SLOWER, WRONG = "Look around after each step", "Scale each product"  # the culprits' subjects
UNBUILDABLE, MERGE = "Leave a bracket open", "Merge side"


def planted_history(folder: Path, *, slow_percent: float = 5.0, notes: int = 1) -> Repo:
    """A repository in `folder` with the tags good, slower and wrong; `notes` harmless commits stand
    before and after each fault."""
    repo = Repo(folder)
    source = Path(engine.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(source, folder / "engine", ignore=ignored)
    repo.commit("Begin")
    repo.git("tag", "good")
    _notes(repo, "before", notes)
    fork = repo.git("rev-parse", "HEAD")

    repo.git("checkout", "--quiet", "-b", "side-slow", fork)
    slow = SLOW_STEP.format(share=slow_percent / 100)
    repo.commit(SLOWER, {DECODE: _replaced(repo, DECODE, STEP, slow)})
    _notes(repo, "after slower", notes)
    repo.git("tag", "slower")

    repo.git("checkout", "--quiet", "-b", "side", fork)
    repo.commit(WRONG, {PACKED: _replaced(repo, PACKED, PRODUCT, WRONG_PRODUCT)})
    _notes(repo, "aside", notes)
    repo.git("checkout", "--quiet", "main")
    repo.commit(UNBUILDABLE, {"engine/half.py": "def half(\n"})
    repo.commit("Close the bracket", {"engine/half.py": "def half() -> None: ...\n"})
    repo.merge("side", MERGE)
    _notes(repo, "after wrong", notes)
    repo.git("tag", "wrong")
    return repo


def _notes(repo: Repo, where: str, count: int) -> None:
    name = where.replace(" ", "_")
    for at in range(count):
        repo.commit(f"Note {at} {where}", {f"engine/note_{name}_{at}.py": "NOTE = 1\n"})


def _replaced(repo: Repo, name: str, before: str, after: str) -> str:
    text = (repo.folder / name).read_text()
    if text.count(before) != 1:
        raise ValueError(f"the plant no longer fits {name}: write it anew in tests/planted")
    return text.replace(before, after)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slow", type=float, default=5.0, metavar="PERCENT")
    parser.add_argument("--notes", type=int, default=8, help="harmless commits around each fault")
    asked = parser.parse_args()
    planted_history(asked.folder, slow_percent=asked.slow, notes=asked.notes)
    print(asked.folder)


if __name__ == "__main__":
    main()
