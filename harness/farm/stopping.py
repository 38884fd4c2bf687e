"""Ctrl-C: the first asks a campaign to end in order, the second ends the process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_on_signal(tell: Callable[[str], None]) -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. A second SIGINT raises KeyboardInterrupt.

    Only the main thread may ask. SIGHUP is left alone: a lost terminal ends the harness at once,
    and the next one continues its runs.
    """
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.is_set():
            stop.set()
            tell(
                f"{signal.Signals(number).name}: ending the runs and cleaning the boards; "
                "press Ctrl-C again to leave at once"
            )

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
