"""Trials of revisions by a pytest test that runs on a board."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bisect.board_trials import OF_THE_ENGINE, PAUSE_S, TRIES, Stopped, uncompilable
from harness.bisect.hunt import Build
from harness.bisect.outcomes import VARIABLE
from harness.bisect.trials import Result, Trial
from harness.errors import BoardError, HarnessError

TEST_S = 3600.0  # for one run of the test; a stage of it has deadlines of its own
END_S = 180.0  # for pytest to clean and release the board
POLL_S = 0.2
SHOWN = 600  # characters of what pytest printed


class PytestTrials:
    """Each trial is a pytest session of its own, which leases and prepares the board itself."""

    def __init__(
        self,
        test: str,
        board: str,
        farm: Path,
        folder: Path,
        *,
        model: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        tell: Callable[[str], None] = lambda text: None,
        keep: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self._test, self._board, self._farm, self._model = test, board, farm, model
        self._folder, self._stop, self._tell, self._keep = folder, stop, tell, keep

    def __call__(self, phase: str, build: Build) -> Trial:
        """Raises BoardError when the board stays in the way, HarnessError for a test that cannot be
        run, Stopped on Ctrl-C."""
        sources = build.sources()
        why = uncompilable(sources)
        if why is not None:
            return _trial(phase, build, Result.OTHER, "cannot be tested", 0.0, untestable=why)
        for left in range(TRIES - 1, -1, -1):
            if self._stop():
                raise Stopped
            self._tell(f"running {self._test} with {build.name}")
            began = time.monotonic()
            status, records, said = self._run(sources)
            result, signature, untestable = judged(records)
            if not records:
                raise HarnessError(
                    f"pytest ended with status {status} and ran no test: {said}",
                    where=self._test,
                    expected="a test of a board, as `pytest -m device` runs it",
                    remedy="run it by hand first",
                )
            trial = _trial(
                phase, build, result, signature, time.monotonic() - began, untestable=untestable
            )
            if result is not Result.INFRA:
                return trial
            self._keep(trial)
            if left == 0:
                raise BoardError(
                    self._board,
                    "board-lost",
                    f"the test could not be run: {signature}",
                    remedy=f"see `harness boards why {self._board}`; the same command goes on",
                )
            time.sleep(PAUSE_S)
        raise AssertionError("unreachable: the last try returns or raises")

    def _run(self, sources: Path) -> tuple[int, list[Mapping[str, Any]], str]:
        outcomes = self._folder / "outcomes.jsonl"
        outcomes.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", self._test, "-m", "device", "-q"]
        command += ["-p", "harness.bisect.outcomes", "-p", "no:cacheprovider"]
        command += [f"--boards={self._board}", f"--farm={self._farm.absolute()}"]
        command += [f"--engine-sources={sources}"]
        command += [f"--model={self._model.absolute()}"] if self._model is not None else []
        log = self._folder / "pytest.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, VARIABLE: str(outcomes)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to us; we end it in order
            )
            try:
                self._wait(process)
            finally:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.wait(END_S)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
        said = " ".join(log.read_text(errors="replace").split())[-SHOWN:]
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        return process.returncode, [json.loads(line) for line in lines], said

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + TEST_S
        while process.poll() is None:
            if self._stop():
                raise Stopped
            if time.monotonic() > end:
                raise BoardError(
                    self._board,
                    "timeout",
                    f"{self._test} did not end within {TEST_S:g} s",
                    remedy="give the test a deadline of its own",
                )
            time.sleep(POLL_S)


def judged(records: Sequence[Mapping[str, Any]]) -> tuple[Result, str | None, str | None]:
    """(result, signature, why the engine cannot be tested) of a session's records."""
    for record in records:
        if record["outcome"] != "failed":
            continue
        if record["trouble"] in OF_THE_ENGINE:
            return Result.OTHER, "cannot be tested", f"{record['trouble']}: {record['message']}"
        if record["trouble"] is not None or record["when"] != "call":
            return Result.INFRA, f"{record['when']}: {record['message']}", None
    failed = next((record for record in records if record["outcome"] == "failed"), None)
    if failed is not None:
        return Result.FAIL, f"{failed['test']}: {failed['error']}", None
    if any(record["outcome"] == "passed" for record in records):
        return Result.PASS, None, None
    return Result.OTHER, "skipped", f"skipped: {records[0]['message'] if records else 'no test'}"


def _trial(
    phase: str,
    build: Build,
    result: Result,
    signature: str | None,
    seconds: float,
    *,
    untestable: str | None,
) -> Trial:
    evidence: dict[str, Any] = {"name": build.name}
    if untestable is not None:
        evidence["untestable"] = untestable
    return Trial(
        phase=phase,
        subject=build.subject,
        result=result,
        signature=signature,
        seconds=seconds,
        evidence=evidence,
    )
