"""Trials of revisions on one board: export, build, deploy side by side, run, look at the log."""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.bisect.hunt import Build
from harness.bisect.hunted import Hunted, Shown
from harness.bisect.trials import Result, Trial
from harness.deploy.bundle import build_bundle
from harness.errors import BoardError, HarnessError
from harness.farm.aboard import runs_of_tests
from harness.farm.decoding import carry_out
from harness.farm.deployed import Deployed
from harness.jobs.base import BringupOptions, StageContext
from harness.jobs.engines import wants_native

if TYPE_CHECKING:
    from harness.inventory import Engine

TRIES = 3  # of a trial, while nothing but the board or the link is in the way
PAUSE_S = 5.0  # before the next of them
# Trouble that says something about the engine that was deployed, not about the board: it does not
# load there, does not start, or speaks another version of our records.
OF_THE_ENGINE = ("deploy", "engine", "protocol")


class Stopped(HarnessError):
    """Ctrl-C: what was tried is kept, and the same command goes on from there."""

    def __init__(self) -> None:
        super().__init__(
            "stopped", remedy="the trials are kept: the same command goes on from there"
        )


class BoardTrials:
    """Makes trials on a board that is leased. `stop` ends a run that goes on; `tell` hears what is
    done now."""

    def __init__(
        self,
        there: Deployed,
        asked: Engine,
        what: Hunted,
        options: BringupOptions,
        folder: Path,
        *,
        any_failure: bool = False,
        stop: Callable[[], bool] = lambda: False,
        tell: Callable[[str], None] = lambda text: None,
        keep: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        """`keep` is given trials that failed for the board's sake: they decide nothing, and are
        kept for the record."""
        self._there, self._asked, self._what, self._options = there, asked, what, options
        self._folder, self._any_failure = folder, any_failure
        self._stop, self._tell, self._keep = stop, tell, keep
        self._why_not: dict[Path, str | None] = {}  # by engine's folder: why it cannot be tried

    def __call__(self, phase: str, build: Build) -> Trial:
        """Raises BoardError when the board stays in the way, Stopped on Ctrl-C."""
        for left in range(TRIES - 1, -1, -1):
            began = time.monotonic()
            run_id = f"{runs_of_tests(self._there.store)}{uuid.uuid4().hex}"
            trouble: BoardError | None = None
            try:
                shown = self._shown(build, run_id)
            except BoardError as error:
                trouble = error
                shown = Shown(Result.INFRA, f"{error.kind}: {error.found}")
            self._check()
            if self._any_failure and shown.result is Result.FAIL:
                shown = _any(shown)
            trial = _trial(phase, build, shown, run_id, time.monotonic() - began)
            if shown.result is not Result.INFRA:
                return trial
            self._keep(trial)
            if left == 0:
                raise trouble or BoardError(
                    self._there.board.name,
                    "busy",
                    f"no measurement counts: {shown.signature}",
                    remedy="cool the board or fix its clocks, then run the same command again",
                )
            self._tell(f"{shown.signature}; trying again")
            time.sleep(PAUSE_S)
        raise AssertionError("unreachable: the last try returns or raises")

    def _shown(self, build: Build, run_id: str) -> Shown:
        sources = build.sources()
        if sources not in self._why_not:
            self._tell(f"building {build.name}")
            self._why_not[sources] = self.why_not(sources)
        why = self._why_not[sources]
        if why is not None:
            return _untestable(why)
        there = self._there
        self._check()
        self._tell(f"deploying {build.name}")
        try:
            there.sources = sources
            there.renew()
        except BoardError as error:
            if error.kind != "deploy":
                raise
            return self._blamed(error)
        self._check()
        self._tell(f"running {build.name}")
        context = StageContext(
            board=there.board,
            facts=there.facts,
            model=there.model,
            options=self._options,
            run_id=run_id,
            remote_package=there.package,
            cache=self._folder,
            engine=there.engine,
        )
        plan = self._what.plan(context)
        try:
            log, left = carry_out(there, context, plan, self._folder, self._stop)
            self._check()
            shown = self._what.show(context, log)
        except BoardError as error:
            there.stale = there.stale or error.kind == "board-reset"
            if error.kind not in OF_THE_ENGINE:
                raise
            return self._blamed(error)
        except HarnessError as error:
            if error.where != f"run {run_id}":
                raise
            return _untestable(str(error))  # it told less than this harness reads
        if left:
            found = f"the run left {'; '.join(left)}"
            raise BoardError(there.board.name, "busy", found, remedy="restart the board")
        return shown

    def _blamed(self, error: BoardError) -> Shown:
        """That an engine cannot be tested, once this checkout's has proved that the board is well.

        Raises BoardError when it is not.
        """
        self._there.sources = None
        self._there.renew()
        return _untestable(str(error))

    def why_not(self, sources: Path) -> str | None:
        """Why the engine in a folder cannot be tried, as far as this host can see; None if it can.

        Its library, which may take a minute, is in the cache afterwards. Raises HarnessError when
        the registry of wheels is out of reach.
        """
        there = self._there
        why = uncompilable(sources)
        if why is not None or not wants_native(there.board, self._asked):
            return why
        try:
            build_bundle(
                there.facts,
                there.board.name,
                native=True,
                toolchain=there.board.toolchain,
                sources=sources,
                check=self._check,
            )
        except BoardError as error:
            return f"does not build: {error.found}"
        return None

    def _check(self) -> None:
        if self._stop():
            raise Stopped


def uncompilable(sources: Path) -> str | None:
    """Where the Python of an engine's folder has a syntax error; None without one."""
    for path in sorted(sources.rglob("*.py")):
        try:
            compile(path.read_bytes(), path.name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            return f"does not compile: {path.relative_to(sources.parent).as_posix()}: {error}"
    return None


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Where the logs of runs lie while they are looked at."""
    with tempfile.TemporaryDirectory(prefix="harness-bisect-") as name:
        yield Path(name)


def _untestable(why: str) -> Shown:
    return Shown(Result.OTHER, "cannot be tested", untestable=why)


def _any(shown: Shown) -> Shown:
    evidence = {**shown.evidence, "signature": shown.signature}
    return Shown(Result.FAIL, "any failure", evidence=evidence)


def _trial(phase: str, build: Build, shown: Shown, run_id: str, seconds: float) -> Trial:
    evidence = {"name": build.name, **shown.evidence}
    if shown.untestable is not None:
        evidence["untestable"] = shown.untestable
    if shown.values:
        evidence["values"] = list(shown.values)
    middle = sorted(shown.values)[len(shown.values) // 2] if shown.values else None
    return Trial(
        phase=phase,
        subject=build.subject,
        result=shown.result,
        signature=shown.signature,
        value=middle,
        seconds=seconds,
        run=run_id,
        evidence=evidence,
    )
