"""A board's serial console. A driver is a module of this folder with a `DRIVER`."""

from harness.boards.console.base import ConsoleDriver, ConsoleStream
from harness.boards.console.capture import CONSOLE_NAME, capturing, last_lines

__all__ = ["CONSOLE_NAME", "ConsoleDriver", "ConsoleStream", "capturing", "last_lines"]
