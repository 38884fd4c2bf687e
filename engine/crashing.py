"""What an engine leaves of its own crash: a file that is opened before, written as it dies.

The native library has the signal handler (native/src/crash.c); without that library there is what
faulthandler prints. The record is text, so that nothing has to be loaded to look at it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 10  # of one record: registers, code, mappings and the top of the stack

_path: Path | None = None


def record_name(attempt: int) -> str:
    """The file's name in the spool."""
    return f"crash.{attempt}.txt"


def record_to(path: Path) -> None:
    """Where the record of this process goes, once a native library is loaded."""
    global _path
    _path = path


def begin(functions: Any) -> bool:
    """Let the loaded library write the record. False where nobody asked for one, or no file can be
    made (a full disk): the run goes on without."""
    if _path is None:
        return False
    try:
        # Never closed: the handler writes to it, in whatever state the process is.
        file = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError:
        return False
    return not functions.dn_crash_record(file)
