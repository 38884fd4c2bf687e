"""The processors that a virtual board can have besides this machine's own: Arm cores, emulated.

A board's programs find out what they run on from /proc/cpuinfo and /sys/devices/system/cpu. The
emulator executes another architecture's instructions but leaves those to the machine below, so a
virtual board shows its own, made here: as Linux writes them (arch/arm64/kernel/cpuinfo.c and
Documentation/ABI/testing/sysfs-devices-system-cpu).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

CPU_FOLDER = Path("/sys/devices/system/cpu")
STRONGEST = 1024  # the capacity of a board's strongest core, by the kernel's scale
_LISTS = ("online", "possible", "present")


@dataclasses.dataclass(frozen=True)
class Processor:
    """One kind of core.

    emulated_by: the emulator's name for it. features: as `Features` in cpuinfo tells them; no more
    than the emulator executes. capacity: relative to the strongest of all kinds here, by the
    kernel's scale. The rest is what identifies it, as in the register MIDR_EL1.
    """

    name: str
    emulated_by: str
    features: tuple[str, ...]
    capacity: int
    max_khz: int
    implementer: int = 0x41  # Arm
    part: int = 0
    variant: int = 0
    revision: int = 0

    @property
    def midr(self) -> int:
        """The register's value; 0xF in the middle says that the features are in registers too."""
        fixed = 0xF << 16
        return self.implementer << 24 | self.variant << 20 | fixed | self.part << 4 | self.revision


_ARMV8 = "fp asimd aes pmull sha1 sha2 crc32"
_A76 = f"{_ARMV8} atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
_NEWEST = (
    f"{_ARMV8} atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp "
    "sha512 asimdfhm ilrcpc flagm sb dcpodp flagm2 frint i8mm bf16 rng bti"
)
PROCESSORS = {
    item.name: item
    for item in (
        Processor(
            name="cortex-a53",
            emulated_by="cortex-a53",
            features=tuple(f"{_ARMV8} cpuid".split()),
            capacity=380,
            max_khz=1_400_000,
            part=0xD03,
            revision=4,
        ),
        Processor(
            name="cortex-a76",
            emulated_by="cortex-a76",
            features=tuple(_A76.split()),
            capacity=1024,
            max_khz=2_400_000,
            part=0xD0B,
            variant=4,
            revision=1,
        ),
        # All that the emulator knows, except scalable vectors and matrices: their width is nobody's
        # board's. Pointers are signed in the emulator's quick way; nothing here depends on it.
        Processor(
            name="aarch64",
            emulated_by="max,sve=off,sme=off,pauth-impdef=on",
            features=tuple(_NEWEST.split()),
            capacity=1024,
            max_khz=2_400_000,
            implementer=0,
            part=0x51,
        ),
    )
}


def on_cores(names: Sequence[str], count: int) -> list[Processor]:
    """The kind of each of `count` cores: every name's share, in the order of the names.

    Boards with little and big cores number the little ones first, as `names` then should.
    """
    return [PROCESSORS[names[number * len(names) // count]] for number in range(count)]


def executing(cores: Sequence[Processor]) -> Processor:
    """The kind that the emulator must be: one that executes what any of the cores can.

    One process has one emulator, whichever cores it is moved to. So a choice of instructions that
    one of its cores lacks does not end the process on a board of mixed cores; on a board where all
    cores lack it, it does.
    """
    return max(cores, key=lambda core: (len(core.features), core.capacity))


def cpuinfo(cores: Sequence[Processor]) -> str:
    """The text of /proc/cpuinfo. Each core tells its own features."""
    blocks = []
    for number, core in enumerate(cores):
        blocks.append(
            f"processor\t: {number}\n"
            "BogoMIPS\t: 48.00\n"
            f"Features\t: {' '.join(core.features)}\n"
            f"CPU implementer\t: 0x{core.implementer:02x}\n"
            "CPU architecture: 8\n"
            f"CPU variant\t: 0x{core.variant:x}\n"
            f"CPU part\t: 0x{core.part:03x}\n"
            f"CPU revision\t: {core.revision}\n\n"
        )
    return "".join(blocks)


def write_folder(folder: Path, cores: Sequence[Processor], machine: Path = CPU_FOLDER) -> None:
    """Makes `folder` what /sys/devices/system/cpu of such a board is.

    Which cores are there is taken over from `machine`, all else is that of the cores: each is one
    hardware thread, which those of `machine` may not be. Caches are left out: nobody knows them.
    """
    folder.mkdir()
    for name in _LISTS:
        _copy(machine / name, folder / name)
    best = max(core.capacity for core in cores)
    for number, core in enumerate(cores):
        own = folder / f"cpu{number}"
        identification, clock = own / "regs/identification", own / "cpufreq"
        for place in (identification, clock):
            place.mkdir(parents=True)
        (own / "cpu_capacity").write_text(f"{round(STRONGEST * core.capacity / best)}\n")
        (clock / "cpuinfo_max_freq").write_text(f"{core.max_khz}\n")
        (identification / "midr_el1").write_text(f"0x{core.midr:016x}\n")
        _copy(machine / own.name / "online", own / "online")
        (own / "topology").mkdir()
        for name, value in _topology(number, len(cores)).items():
            (own / "topology" / name).write_text(f"{value}\n")


def _topology(number: int, count: int) -> dict[str, str]:
    """The files that tell how a core lies among `count` in one package."""
    alone, all_of_them = f"{number}", f"0-{count - 1}" if count > 1 else "0"
    return {
        "core_id": alone,
        "core_cpus_list": alone,
        "thread_siblings_list": alone,
        "physical_package_id": "0",
        "package_cpus_list": all_of_them,
        "core_siblings_list": all_of_them,
    }


def _copy(source: Path, target: Path) -> None:
    """Takes over a fact that the machine tells; one that it does not tell is left out."""
    try:
        target.write_bytes(source.read_bytes())
    except OSError:
        target.unlink(missing_ok=True)
