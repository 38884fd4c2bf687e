"""The programs and libraries of a board of another architecture: a folder in the harness's cache.

Fetched from the package archive that this machine's apt is set up for, by apt and with its checks
of signatures and hashes, but with a state of its own: nothing is installed here, and the settings,
lists and architectures of the machine's apt stay as they are. No root is needed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.deadline import Deadline
from harness.deploy.cache import locked
from harness.errors import HarnessError
from harness.paths import cache_dir

log = logging.getLogger(__name__)

ARCHITECTURE = "arm64"
EMULATOR = "qemu-aarch64-static"
EMULATOR_PACKAGE = "qemu-user-static"
# Python, what its wheels are linked against, and the programs that tell what the system is.
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "coreutils", "libc-bin")
PYTHON = "usr/bin/python3"
RECIPE = "1"  # raise it when the folder is made differently
SECONDS = 600.0

# Read by apt after the machine's own settings. Hooks are the machine's business and not ours.
_SETTINGS = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear APT::Architectures;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
Dir::State "{work}/state";
Dir::State::lists "{work}/lists";
Dir::State::status "{work}/status";
Dir::Cache "{work}/cache";
Dir::Log "{work}/log";
"""
# What is imported and executed to see whether the folder is whole.
_CHECK = "import ctypes, hashlib, json, platform, select, ssl, zlib; print(platform.machine())"


class NoUserland(HarnessError):
    """This machine cannot have what a board of another architecture needs."""


def find_emulator() -> Path:
    """The emulator's program. Raises NoUserland without it."""
    found = shutil.which(EMULATOR)
    if found is None:
        raise NoUserland(
            f"no {EMULATOR} on PATH",
            expected=f"the emulator of Debian's package {EMULATOR_PACKAGE}",
            remedy=f"run `apt-get install {EMULATOR_PACKAGE}`, or remove 'isa' from 'virtual'",
        )
    return Path(found).resolve()


def userland(*, deadline: Deadline | None = None) -> Path:
    """The root folder of an aarch64 system, made at the first call (20 MB are fetched, seconds).

    Raises NoUserland when this machine has no apt, its archive is out of reach or has nothing for
    the architecture, or when what came does not run.
    """
    emulator = find_emulator()
    parent = cache_dir("userlands")
    root = parent / f"{ARCHITECTURE}-{RECIPE}"
    if root.is_dir():
        return root
    deadline = deadline or Deadline.after(SECONDS, f"{SECONDS:g} s for the programs of a board")
    with locked(parent / f".{root.name}.lock", deadline=deadline):
        if root.is_dir():
            return root
        for tool in ("apt-get", "dpkg-deb"):
            if shutil.which(tool) is None:
                raise NoUserland(
                    f"no {tool} on PATH, which fetches an {ARCHITECTURE} Python",
                    expected="Debian or a system derived from it",
                    remedy="run the harness there, or remove 'isa' from 'virtual'",
                )
        log.info("fetching the programs of an %s board", ARCHITECTURE)
        with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=parent) as temporary:
            work = Path(temporary)
            unpacked = work / "root"
            unpacked.mkdir(mode=0o755)
            for package in _fetch(work, deadline):
                _unpack(package, unpacked, deadline)
            shutil.rmtree(unpacked / "usr/share", ignore_errors=True)  # manuals, translations
            check_root(emulator, unpacked, deadline)
            unpacked.rename(root)
    return root


def check_root(emulator: Path, root: Path, deadline: Deadline) -> None:
    """Raises NoUserland unless the Python below `root` starts and has what the engine imports."""
    command = [str(emulator), "-L", str(root), str(root / PYTHON), "-S", "-c", _CHECK]
    code, said = _run(command, deadline)
    if code != 0 or said.strip() != "aarch64":
        raise NoUserland(
            f"the emulated Python ends with {code}: {last_words(said)}",
            expected="that it starts and says 'aarch64'",
            remedy=f"look at the version of {EMULATOR}, or remove 'isa' from 'virtual'",
        )


def _unpack(package: Path, root: Path, deadline: Deadline) -> None:
    command = ["dpkg-deb", "--extract", str(package), str(root)]
    code, said = _run(command, deadline)
    if code != 0:
        raise NoUserland(
            f"{package.name}: {last_words(said)}",
            expected="a package that can be unpacked",
            remedy=f"see whether {root.parent.parent} is full",
        )


def _fetch(work: Path, deadline: Deadline) -> list[Path]:
    """The package files, with all that they depend on, below `work`."""
    for folder in ("lists/partial", "cache/archives/partial", "state", "log"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()  # nothing is installed: everything that is needed is fetched
    settings = work / "apt.conf"
    settings.write_text(_SETTINGS.format(architecture=ARCHITECTURE, work=work), encoding="utf-8")
    apt = ["apt-get", f"--config-file={settings}", "--quiet=2", "--yes"]
    # A source of the machine that knows no such architecture makes the first fail; what counts is
    # whether the packages can be had from the others.
    update = [*apt, "update"]
    code, said = _run(update, deadline)
    update_failed = f"; before, {_tell(update, said)}" if code != 0 else ""
    install = [*apt, "install", "--download-only", *PACKAGES]
    code, said = _run(install, deadline)
    if code != 0:
        raise NoUserland(
            _tell(install, said) + update_failed,
            expected=f"the {ARCHITECTURE} packages {', '.join(PACKAGES)}",
            remedy="point this machine's apt at an archive that has them and can be reached, or "
            "remove 'isa' from 'virtual'",
        )
    return sorted((work / "cache/archives").glob("*.deb"))


def _run(command: Sequence[str], deadline: Deadline) -> tuple[int, str]:
    """The exit status, and both outputs together. Raises NoUserland at the deadline."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            timeout=deadline.remaining,
            check=False,  # each caller has something to say about it
        )
    except subprocess.TimeoutExpired:
        raise NoUserland(
            f"{command[0]} did not end in time ({deadline.label})",
            remedy="check the connection to the package archive of this machine's apt",
        ) from None
    return done.returncode, done.stdout.decode(errors="replace")


def _tell(command: Sequence[str], said: str) -> str:
    verb = next((word for word in command[1:] if not word.startswith("-")), "")
    return f"{Path(command[0]).name} {verb}: {last_words(said)}"


def last_words(said: str) -> str:
    """The line of a command's output that tells what went wrong: the last error, else the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"E: |dpkg-deb: error|\w+Error\b", line)]
    return (errors or lines or ["it said nothing"])[-1][:300]
