"""The home folder of a virtual board, and the environment its commands see.

Nothing of the environment of whoever started the board reaches a command, except the locale and the
thread settings of numpy's BLAS: tokens and keys in a developer's shell are none of a board's
business, and a real board would not have them either.
"""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from harness.boards.virtual.emulation import NOT_PASSED_ON, Emulation
from harness.boards.virtual.options import Options

SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Numeric libraries size their buffers by these; a limit set on the host is meant for boards too.
PASSED_ON = ("OPENBLAS_", "OMP_", "LC_")
SHELLS = {
    "sh": ("sh",),
    "fish": ("fish",),
    "csh": ("tcsh", "csh"),
    "ash": ("ash", "busybox"),  # busybox is every program that it is called as
}
NO_PYTHON_HOME = "/nonexistent"

NOISE = (
    b"\x1b[1;32mWelcome to virt\x1b[0m \xe2\x9c\xa8\r\n"
    b"Last login: Thu Jan  1 00:00:00 1970\r\n\x1b]0;virt\x07"
)


class MissingShell(LookupError):
    """The login shell that the options ask for is not installed on this machine."""


def login_shell(options: Options) -> str:
    """Its full path. Raises MissingShell."""
    search = os.pathsep.join(SYSTEM_PATH)
    for name in SHELLS[options.shell]:
        found = shutil.which(name, path=search)
        if found:
            return found
    raise MissingShell(f"no {' or '.join(SHELLS[options.shell])} in {search}")


def furnish(home: Path, options: Options, emulation: Emulation | None = None) -> None:
    """Makes `home/bin` as the options want it; the rest of the home is left alone.

    With an `emulation`, the Python there and what tells the architecture are its programs.
    """
    home.mkdir(mode=0o700, exist_ok=True)
    own = home / "bin"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(mode=0o755)
    if options.no_python:
        _link_all_but_python(own)
    elif emulation is None:
        (own / "python3").symlink_to(base_interpreter())
    if emulation is not None:
        emulation.write_programs(own)
        if options.no_python:
            (own / "python3").unlink()
    if options.shell == "ash":
        (own / "ash").unlink(missing_ok=True)
        (own / "ash").symlink_to(login_shell(options))
    if options.clock is not None:
        (own / "date").unlink(missing_ok=True)
        _write_date(own / "date", options.clock)


def base_interpreter() -> Path:
    """The Python that runs the harness, without its virtual environment and packages."""
    return Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()


def search_path(home: Path, options: Options) -> str:
    own = str(home / "bin")
    return own if options.no_python else os.pathsep.join((own, *SYSTEM_PATH))


def environment(home: Path, options: Options, user: str, host: Mapping[str, str]) -> dict[str, str]:
    """What a command starts with. `host` is the environment of the board's own process."""
    values = {
        "PATH": search_path(home, options),
        "HOME": str(home),
        "USER": user,
        "LOGNAME": user,
        "SHELL": str(home / "bin" / "ash") if options.shell == "ash" else login_shell(options),
        "LANG": host.get("LANG", "C.UTF-8"),
    }
    for name, value in host.items():
        if name.startswith(PASSED_ON) and not (options.isa and name in NOT_PASSED_ON):
            values[name] = value
    if options.no_python:
        # An interpreter reached by its full path (/usr/bin/python3) finds no library and ends.
        values["PYTHONHOME"] = NO_PYTHON_HOME
    return values


def _link_all_but_python(folder: Path) -> None:
    """Links to every system command except Python, for a PATH of this one folder."""
    for place in SYSTEM_PATH:
        for command in sorted(Path(place).glob("*")):
            link = folder / command.name
            if "python" in command.name or command.name.startswith(("pypy", "pydoc")):
                continue
            if not link.is_symlink():
                link.symlink_to(command)


def _write_date(path: Path, year: int) -> None:
    """`date` as a board tells it that has no clock battery; it ticks from the start of `year`."""
    epoch = datetime.datetime(year, 1, 1, tzinfo=datetime.UTC).timestamp()
    behind = int(time.time() - epoch)  # never more: a second before 1970 is no time that is told
    real = shutil.which("date", path=os.pathsep.join(SYSTEM_PATH)) or "/bin/date"
    quoted = shlex.quote(real)
    path.write_text(
        f'#!/bin/sh\nexec {quoted} -d "@$(( $({quoted} +%s) - {behind} ))" "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)
