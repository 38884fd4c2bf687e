"""How commands of a virtual board reach the emulator: small scripts on the board's PATH.

Python is one of them, and names itself as its own program (`sys.executable`), so what it starts
with that is emulated again. The kernel could do the same for every file of another architecture
(binfmt_misc), but only for the whole machine and with root, or from Linux 6.7 on in a namespace.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness.boards.virtual import processors, userland

# What tells the architecture of the system. `od` reads the header of the program that runs it.
PROGRAMS = ("python3", "uname", "arch", "od", "getconf")
_FOLDERS = ("usr/bin", "bin")
# Set for this machine's processor, wrong for another: the numeric library finds out by itself.
NOT_PASSED_ON = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
_SECONDS = 20.0


class NotShown(LookupError):
    """The emulator tells its programs something else than what the board is."""


@dataclasses.dataclass(frozen=True)
class Emulation:
    """An emulator, the folder with what it runs, and the board's cores."""

    emulator: Path
    root: Path
    cores: tuple[processors.Processor, ...]

    @staticmethod
    def of(names: Sequence[str], root: Path, count: int | None = None) -> Emulation:
        """For the kinds of cores `names` on a machine of `count` cores, by default this one."""
        kinds = processors.on_cores(names, count or os.cpu_count() or 1)
        return Emulation(userland.find_emulator(), root, tuple(kinds))

    def command(self, program: str, shown: str | None = None) -> list[str]:
        """The start of a command line for `program`, which believes to be called `shown`."""
        path = self._path(program)
        cpu = processors.executing(self.cores).emulated_by
        name = [] if shown is None else ["-0", shown]
        return [str(self.emulator), "-cpu", cpu, "-L", str(self.root), *name, str(path)]

    def write_programs(self, folder: Path) -> None:
        """A script for each of PROGRAMS, in place of what `folder` has by that name."""
        for program in PROGRAMS:
            path = folder / program
            path.unlink(missing_ok=True)
            *command, name, target = self.command(program, "$0")
            # "$0" is the path by which the script was found; a word of shell, not of the list.
            words = f'{shlex.join(command)} "{name}" {shlex.quote(target)} "$@"'
            path.write_text(f"#!/bin/sh\nexec {words}\n", encoding="utf-8")
            path.chmod(0o755)

    def write_facts(self, folder: Path) -> tuple[Path, Path]:
        """Makes what is to be shown as /proc/cpuinfo and as the folder `CPU_FOLDER`."""
        info, cpus = folder / "cpuinfo", folder / "cpu"
        info.write_text(processors.cpuinfo(self.cores), encoding="ascii")
        processors.write_folder(cpus, self.cores)
        return info, cpus

    def check_shown(self) -> None:
        """Raises NotShown when an emulated program reads another /proc/cpuinfo than is shown.

        Later emulators (QEMU 8.1 and newer) make one up, with cores that are all alike.
        """
        if len(set(self.cores)) == 1:
            return
        said = subprocess.run(
            [*self.command("cat"), "/proc/cpuinfo"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,  # an empty output differs, too
        ).stdout
        if said != processors.cpuinfo(self.cores).encode():
            raise NotShown(
                f"{self.emulator.name} shows its programs a /proc/cpuinfo of its own, without "
                "mixed cores; expected one that does not (QEMU 7.2)"
            )

    def _path(self, program: str) -> Path:
        for folder in _FOLDERS:
            if (self.root / folder / program).exists():
                return self.root / folder / program
        raise LookupError(f"no {program} below {self.root}; remove that folder to make it again")
