"""A systemd user timer that runs a command every night: the unit files, and their place.

Quoting follows systemd.service(5) and systemd.syntax(7), not the shell's rules: words in double
quotes with backslash escapes, "%" doubled against specifiers, "$" doubled in a command line
against variables. What cannot be written safely (control characters, an end that continues the
line) is refused.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import HarnessError

NAME = "harness-nightly"
_UNIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
STOP_S = 300  # for boards to be cleaned after a stop
CALL_S = 30.0  # for one answer of systemctl

_SERVICE = """\
[Unit]
Description={description}
Documentation=man:systemd.timer(5)

[Service]
Type=oneshot
WorkingDirectory={folder}
{environment}EnvironmentFile=-%E/decode-harness/{name}.env
ExecStart={command}
# Ends in order on SIGINT: runs are cancelled, boards cleaned and released.
KillMode=mixed
KillSignal=SIGINT
TimeoutStopSec={stop_s}
"""

_TIMER = """\
[Unit]
Description={description} (timer)

[Timer]
OnCalendar=*-*-* {at}:00
# A night that this machine slept through is made up for.
Persistent=true

[Install]
WantedBy=timers.target
"""


def quote(word: str, *, command: bool = False) -> str:
    """One word of a unit file's list, in double quotes where it needs them. `command`: of an
    ExecStart line, where `$` would begin a variable. Raises HarnessError for control characters."""
    _refuse_controls(word)
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if command:
        text = text.replace("$", "$$")
    plain = re.fullmatch(r"[A-Za-z0-9_./:=,@%$+-]+", text) and not text.startswith(("-", "@", "+"))
    return text if plain or re.fullmatch(r"--?[A-Za-z0-9_./:=,@%+-]+", text) else f'"{text}"'


def units(
    name: str,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    at: str,
) -> dict[str, str]:
    """File name → text of the service and its timer. `at` is HH:MM, in this machine's own time.

    Raises HarnessError for a name, time, path or value that systemd could not take as meant.
    """
    if not _UNIT_NAME.fullmatch(name):
        raise HarnessError(
            f"a timer named {name!r}", expected="letters, digits, '_', '.' and '-', 100 at most"
        )
    time = _TIME.fullmatch(at)
    if time is None:
        raise HarnessError(f"--at {at!r}", expected="HH:MM, such as 02:00")
    program, *arguments = command
    if "$" in program:  # a variable there is refused by some versions and expanded by none
        raise HarnessError(
            f"the program {program!r} has a '$' in its path", remedy="install it elsewhere"
        )
    words = [quote(program), *(quote(word, command=True) for word in arguments)]
    description = "decode-harness nightly"
    if name != NAME:
        description += f" ({name})"
    service = _SERVICE.format(
        description=description,
        folder=_whole_line(str(folder)),
        environment="".join(
            f"Environment={quote(f'{key}={value}')}\n" for key, value in sorted(environment.items())
        ),
        name=name,
        command=" ".join(words),
        stop_s=STOP_S,
    )
    timer = _TIMER.format(description=description, at=f"{int(time[1]):02}:{time[2]}")
    return {f"{name}.service": service, f"{name}.timer": timer}


def unit_folder() -> Path:
    """Where a user's own units lie."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd" / "user"


def install(files: Mapping[str, str], name: str) -> list[str]:
    """Writes the units and starts the timer; returns what was done, a line each.

    Raises HarnessError where a file cannot be written.
    """
    folder = unit_folder()
    told = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            path = folder / file
            temporary = path.with_name(f".{file}.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(path)
            told.append(f"wrote {path}")
    except OSError as error:
        raise HarnessError(f"cannot be written: {error.strerror}", where=str(folder)) from error
    return told + _systemctl([["daemon-reload"], ["enable", "--now", f"{name}.timer"]])


def uninstall(name: str) -> list[str]:
    """Stops the timer and removes its units; what was done, a line each."""
    files = [unit_folder() / f"{name}.{kind}" for kind in ("service", "timer")]
    there = [path for path in files if path.exists()]
    if not there:
        return [f"nothing to remove: no {name}.timer in {unit_folder()}"]
    told = _systemctl([["disable", "--now", f"{name}.timer"]])
    for path in there:
        path.unlink(missing_ok=True)
        told.append(f"removed {path}")
    return told + _systemctl([["daemon-reload"]])


def _systemctl(calls: Sequence[Sequence[str]]) -> list[str]:
    """Runs them in order up to the first that fails; what was done, and by hand is left to do."""
    told: list[str] = []
    program = shutil.which("systemctl")
    for number, call in enumerate(calls):
        words = ["systemctl", "--user", *call]
        said = "there is no systemctl here"
        if program is not None:
            try:
                done = subprocess.run(
                    [program, *words[1:]],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=CALL_S,
                    check=False,  # told below
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
            else:
                if done.returncode == 0:
                    told.append(f"ran {' '.join(words)}")
                    continue
                said = done.stderr.decode(errors="replace").strip()[-300:] or "no message"
        left = "; ".join(" ".join(["systemctl", "--user", *rest]) for rest in calls[number:])
        return [*told, f"not done ({said}); run by hand: {left}"]
    return told


def _whole_line(text: str) -> str:
    """A value that goes to the end of its line: nothing is quoted, but specifiers are read."""
    _refuse_controls(text)
    if text != text.strip() or text.endswith("\\"):
        raise HarnessError(
            f"the path {text!r} begins or ends in what a unit file cannot hold",
            remedy="use a folder of another name",
        )
    return text.replace("%", "%%")


def _refuse_controls(text: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise HarnessError(
            f"{text!r} has a control character", expected="text that a unit file can hold"
        )
