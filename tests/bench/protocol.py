"""How the conductor and its workers talk: one JSON object a line, a reply to each request.

The conductor asks one worker at a time; all others are blocked on their pipe, with everything they
have loaded, and take no time from the one that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ASK_S = 3600.0  # the longest request: a prefill of thousands of tokens by a slow unit
END_S = 5.0
LOG_LINES = 3


class WorkerError(Exception):
    """A worker could not do what it was asked; it lives on. `kind` is its exception's name."""

    def __init__(self, worker: str, kind: str, message: str) -> None:
        self.worker, self.kind = worker, kind
        super().__init__(f"{worker}: {kind}: {message}")


class WorkerDied(Exception):
    """The process is gone; says by which signal and what it said last."""


class Worker:
    """A process that answers requests. `log` takes what it writes to stderr."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._log = name, log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                text=True,
                encoding="utf-8",
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, *, timeout_s: float = ASK_S, **fields: Any) -> dict[str, Any]:
        """Raises WorkerError for a refusal, WorkerDied when the process ends or does not answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise WorkerDied(f"{self.name}: was started without pipes")
        # A worker that hangs is killed; then its pipe ends, and so does the wait below.
        guard = threading.Timer(timeout_s, self._process.kill)
        guard.start()
        try:
            stdin.write(json.dumps({"do": do, **fields}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        finally:
            guard.cancel()
        if not line.endswith("\n"):
            raise WorkerDied(self._last_words(do))
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise WorkerError(self.name, reply["kind"], reply["message"])
        return reply

    def close(self) -> None:
        """Ends it: its pipe first, by a signal if that is not enough."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended by itself
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _last_words(self, do: str) -> str:
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        how = f"exit status {status}"
        if status < 0:
            try:
                how = signal.Signals(-status).name
            except ValueError:
                how = f"signal {-status}"
        said = self._log.read_text("utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return (
            f"{self.name} ended by {how} in {do!r}; it said last: {' / '.join(said) or 'nothing'}"
        )


def serve(handlers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """The worker's side: answer requests until the pipe ends.

    Replies have a descriptor of their own: what a library prints to stdout goes to the log.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": True, **handlers[request.pop("do")](**request)}
        except Exception as error:  # whatever it is, the conductor decides what it means
            reply = {"ok": False, "kind": type(error).__name__, "message": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
