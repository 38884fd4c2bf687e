"""Calls that may block for ever, ended by a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import paramiko

from harness.deadline import Deadline

Result = TypeVar("Result")


def bounded(
    call: Callable[[], Result], deadline: Deadline, on_timeout: Callable[[], object] | None = None
) -> Result:
    """`call()` on a thread of its own; TimeoutError when the deadline passes first.

    `on_timeout` must make the blocked call return soon (close its socket), and not block itself.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=work, name=f"bounded {deadline.label}", daemon=True)
    thread.start()
    thread.join(deadline.remaining)
    if thread.is_alive():
        if on_timeout is not None:
            on_timeout()
        raise TimeoutError(f"{deadline.label} did not end in time")
    if errors:
        raise errors[0]
    return results[0]


def is_gone(transport: paramiko.Transport, patience_s: float = 1.0) -> bool:
    """Whether the connection has ended; a channel learns of it a moment before its transport."""
    if transport.is_active():
        transport.join(patience_s)
    return not transport.is_active()
