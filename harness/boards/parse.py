"""The output of `probe.sh` → `Facts`. A pure function of bytes; whatever a board prints, it ends.

Board text is hostile until shown otherwise: it may hold terminal sequences, NULs and megabytes. It
is cut, cleaned and only then believed; a section that cannot be read is as one that is absent.
"""

from __future__ import annotations

import re

from harness.boards.facts import (
    CpuFacts,
    Facts,
    FolderFacts,
    PythonFacts,
    ThermalZone,
    common_features,
    platform_tags,
)

SIZE_LIMIT = 4 << 20  # bytes looked at
VALUE_LIMIT = 300  # letters of one value
CORES_LIMIT = 4096
_UNLIMITED_MB = 1 << 33  # cgroup v1 says "no limit" by a number near 2**63 bytes

_HEAD = re.compile(rb"^=== ([0-9a-f]{8,64}) probe 1\r?$", re.MULTILINE)
_TERMINAL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DF = re.compile(r"\s(\d+)\s+(\d+)\s+(-?\d+)\s+\d+%")

# MIDR_EL1 implementer and part numbers, from the kernel's arch/arm64/include/asm/cputype.h.
_ARM_PARTS = {
    ("41", "c07"): "cortex-a7",
    ("41", "c08"): "cortex-a8",
    ("41", "c09"): "cortex-a9",
    ("41", "c0f"): "cortex-a15",
    ("41", "d03"): "cortex-a53",
    ("41", "d04"): "cortex-a35",
    ("41", "d05"): "cortex-a55",
    ("41", "d07"): "cortex-a57",
    ("41", "d08"): "cortex-a72",
    ("41", "d09"): "cortex-a73",
    ("41", "d0a"): "cortex-a75",
    ("41", "d0b"): "cortex-a76",
    ("41", "d0c"): "neoverse-n1",
    ("41", "d0d"): "cortex-a77",
    ("41", "d40"): "neoverse-v1",
    ("41", "d41"): "cortex-a78",
    ("41", "d42"): "cortex-a78ae",
    ("41", "d44"): "cortex-x1",
    ("41", "d46"): "cortex-a510",
    ("41", "d47"): "cortex-a710",
    ("41", "d48"): "cortex-x2",
    ("41", "d49"): "neoverse-n2",
    ("41", "d4b"): "cortex-a78c",
    ("41", "d4d"): "cortex-a715",
    ("41", "d4e"): "cortex-x3",
    ("41", "d4f"): "neoverse-v2",
    ("41", "d80"): "cortex-a520",
    ("41", "d81"): "cortex-a720",
    ("41", "d82"): "cortex-x4",
    ("4e", "003"): "nvidia-denver2",
    ("4e", "004"): "nvidia-carmel",
    ("00", "051"): "qemu-max",  # target/arm of QEMU: the core with all that it emulates
}
# e_machine of an ELF header → the name that Python and wheels use, by word size.
_ELF_MACHINES = {
    (0x03, 32): "i686",
    (0x28, 32): "armv7l",
    (0x3E, 64): "x86_64",
    (0xB7, 64): "aarch64",
    (0xF3, 64): "riscv64",
    (0x102, 64): "loongarch64",
    (0x15, 64): "ppc64le",
    (0x16, 64): "s390x",
}


class ProbeError(ValueError):
    """The bytes are not the output of the probe, or break off."""


def parse_probe(data: bytes) -> Facts:
    """Raises ProbeError when beginning or end is missing; odd or absent parts are left empty."""
    sections = _sections(data)
    uname = sections.get("uname", [])
    system, release, kernel_machine = ([*uname, "", "", ""])[:3]
    bits, machine = _userland(sections, kernel_machine)
    allowed = _allowed(sections.get("allowed", []))
    cpus = _cpus(sections.get("cpuinfo", []), sections.get("cpus", []), allowed)
    usable = [cpu for cpu in cpus if cpu.allowed]
    libc = _libc(sections.get("libc", []))
    python, refused = _python(sections.get("python", []), machine, libc)
    total, available, limit = _memory(sections.get("memory", []))
    return Facts(
        machine=machine,
        kernel=f"{system} {release}".strip(),
        os=_os(sections.get("os", [])),
        model=_first(sections, "model"),
        serial=_first(sections, "serial") or _keyed(sections.get("cpuinfo", []), "Serial"),
        libc=libc,
        bits=bits,
        cpus=tuple(cpus),
        features=common_features(usable),
        memory_mb=total,
        available_mb=available,
        memory_limit=limit,
        folders=tuple(_folders(sections.get("folders", []))),
        python=python,
        python_refused=tuple(refused),
        boot_id=_boot(sections.get("boot", [])),
        clock_s=_clock(sections),
        tools=tuple(line for line in sections.get("tools", []) if re.fullmatch(r"[\w.-]+", line)),
        thermal_zones=tuple(_thermal(sections.get("thermal", []))),
        governor=", ".join(sorted({cpu.governor for cpu in usable if cpu.governor})),
    )


def _sections(data: bytes) -> dict[str, list[str]]:
    """Name → cleaned lines that are not empty. Sections of one name are joined."""
    data = data[:SIZE_LIMIT]
    head = _HEAD.search(data)
    if head is None:
        raise ProbeError(
            f"no probe output; it begins with {data[:80]!r}"
            if data
            else "the probe printed nothing"
        )
    mark = f"=== {head[1].decode()} "
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for raw in data[head.start() :].decode("utf-8", errors="replace").split("\n"):
        line = _clean(raw)
        if line.startswith(mark):
            lines = sections.setdefault(line[len(mark) :].strip(), [])
        elif line:
            lines.append(line)
    if "end" not in sections:
        last = [name for name in sections if name != "probe 1"][-1:] or ["its beginning"]
        raise ProbeError(f"the probe's output breaks off in {last[0]!r}")
    return sections


def _clean(line: str) -> str:
    # CPU features can make a line of some thousand letters; nothing else is that long.
    return _CONTROL.sub("", _TERMINAL.sub("", line[:16384])).strip()


def _short(text: str) -> str:
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 1] + "…"  # or a path


def _first(sections: dict[str, list[str]], name: str) -> str:
    return _short(next(iter(sections.get(name, [])), ""))


def _keyed(lines: list[str], key: str) -> str:
    """The value of a `key : value` line."""
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return _short(value.strip())
    return ""


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _os(lines: list[str]) -> str:
    for line in lines:
        if line.startswith("ANDROID="):
            return _short(f"Android {line[8:]}")
    for key in ("PRETTY_NAME=", "NAME="):
        for line in lines:
            if line.startswith(key):
                return _short(line[len(key) :].strip("\"'"))
    return ""


def _userland(sections: dict[str, list[str]], kernel_machine: str) -> tuple[int | None, str]:
    """Word size and machine by the ELF header of a program; the kernel's word where there is none.

    A 64-bit kernel with a 32-bit userland (Raspberry Pi OS) says aarch64 in uname.
    """
    text = "".join(sections.get("elf", []))
    numbers = re.findall(r"[0-9a-fA-F]{2}", text)
    header = bytes(int(number, 16) for number in numbers[:20])
    if len(header) == 20 and header[:4] == b"\x7fELF" and header[4] in (1, 2):
        bits = 32 * header[4]
        order = "big" if header[5] == 2 else "little"
        machine = int.from_bytes(header[18:20], "big" if order == "big" else "little")
        if kernel_machine in ("armv6l", "armv7l", "armv8l") and bits == 32:
            return bits, "armv7l" if kernel_machine == "armv8l" else kernel_machine
        return bits, _ELF_MACHINES.get((machine, bits), _short(kernel_machine))
    return None, _short(kernel_machine)


def _allowed(lines: list[str]) -> set[int] | None:
    """The cores of `Cpus_allowed_list: 0-3,7`; None when not told."""
    text = _keyed(lines, "Cpus_allowed_list")
    cores: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        if not found:
            return None
        first, last = int(found[1]), int(found[2] or found[1])
        cores.update(range(first, min(last, CORES_LIMIT) + 1))
    return cores


def _cpus(cpuinfo: list[str], sysfs: list[str], allowed: set[int] | None) -> list[CpuFacts]:
    blocks: dict[int, dict[str, str]] = {}
    shared: dict[str, str] = {}  # old ARM kernels tell the features once, after all processors
    current = shared
    for line in cpuinfo:
        name, colon, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if not colon:
            continue
        if name == "processor" and (number := _whole(value)) is not None:
            if number >= CORES_LIMIT:
                continue
            current = blocks.setdefault(number, {})
        elif name in ("Hardware", "Serial", "Model"):
            current = shared
        else:
            current.setdefault(name, value)
            shared.setdefault(name, value)
    clocks: dict[int, list[str]] = {}
    for line in sysfs:
        found = re.match(r"cpu(\d{1,4}) (\S+) (\S+) (\S+)$", line)
        if found:
            clocks[int(found[1])] = [found[2], found[3], found[4]]
    cpus = []
    for number in sorted(set(blocks) | set(clocks)):
        if number not in blocks and blocks and allowed is not None and number not in allowed:
            continue  # offline
        told = {**shared, **blocks.get(number, {})}
        khz, capacity, governor = clocks.get(number, ["-", "-", "-"])
        frequency = _whole(khz)
        features = told.get("Features") or told.get("flags") or told.get("features") or ""
        cpus.append(
            CpuFacts(
                number=number,
                allowed=allowed is None or number in allowed,
                part=_part(told),
                max_mhz=None if frequency is None else frequency // 1000,
                capacity=_whole(capacity),
                governor="" if governor == "-" else _short(governor),
                features=tuple(dict.fromkeys((features or told.get("isa", "")).split())),
            )
        )
    return cpus


def _part(told: dict[str, str]) -> str:
    implementer = told.get("CPU implementer", "").lower().removeprefix("0x")
    part = told.get("CPU part", "").lower().removeprefix("0x")
    if part:
        return _ARM_PARTS.get((implementer, part), _short(f"arm {implementer}:{part}"))
    return _short(told.get("model name", ""))


def _libc(lines: list[str]) -> str:
    text = "\n".join(lines)
    if found := re.search(r"^glibc ([0-9]{1,4}\.[0-9]{1,4})\b", text, re.MULTILINE):
        return f"glibc {found[1]}"
    if re.search(r"musl", text):
        found = re.search(r"Version ([0-9]{1,4}\.[0-9]{1,4}(?:\.[0-9]{1,4})?)\b", text)
        return f"musl {found[1]}" if found else "musl"
    if "/system/bin/linker" in text:
        return "bionic"
    if found := re.search(r"(?:GLIBC|GNU libc|Free Software).*?\b([0-9]{1,4}\.[0-9]{1,4})\b", text):
        return f"glibc {found[1]}"
    return ""


def _memory(lines: list[str]) -> tuple[int | None, int | None, str]:
    """Total and available MiB as this user may have them, and what lowers them."""
    told: dict[str, int] = {}
    for line in lines:
        found = re.match(r"(\w+):?\s+(\d{1,19})(?: kB)?$", line)
        if found:
            told.setdefault(found[1], int(found[2]))
    total = told.get("MemTotal")
    free = told.get("MemAvailable")
    if free is None and "MemFree" in told:  # before Linux 3.14
        free = told["MemFree"] + told.get("Cached", 0)
    total_mb = None if total is None else total // 1024
    available_mb = None if free is None else free // 1024
    limits = [
        (told[key] // divisor, name)
        for key, divisor, name in (
            ("cgroup", 1 << 20, "cgroup"),
            ("ulimit_data", 1024, "ulimit -d"),
            ("ulimit_virtual", 1024, "ulimit -v"),
        )
        if key in told and told[key] // divisor < _UNLIMITED_MB
    ]
    lowest, name = min(limits, default=(None, ""))
    if lowest is None or (total_mb is not None and lowest >= total_mb):
        return total_mb, available_mb, ""
    return lowest, lowest if available_mb is None else min(lowest, available_mb), name


def _python(lines: list[str], machine: str, libc: str) -> tuple[PythonFacts | None, list[str]]:
    refused: list[str] = []
    for line in lines:
        if line.startswith("absent "):
            refused.append(f"{_short(line[7:])}: not found")
            continue
        if not line.startswith("candidate "):
            continue
        path, *told = (_short(part) for part in line.removeprefix("candidate ").split("|"))
        if len(told) < 8 or not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){2}", told[2]):
            said = told[1] if len(told) > 1 and told[1] else "it printed nothing"
            refused.append(f"{path}: does not start ({said})")
            continue
        good, own, version, bits, implementation, soabi, own_libc, missing = told[:8]
        if good != "ok":
            wants = "3.9 or newer"
            refused.append(
                f"{path}: lacks the modules {missing.replace(',', ', ')}"
                if missing
                else f"{path}: version {version}, needs {wants}"
            )
            continue
        if implementation != "cpython":
            refused.append(f"{path}: {implementation}, needs CPython")
            continue
        major, minor = version.split(".")[:2]
        of_python = _of_python(machine, bits, soabi)
        tags = platform_tags(of_python, own_libc or libc)
        return (
            PythonFacts(
                # What was found may be a script that chooses one (pyenv); this is the one itself.
                path=own if own.startswith("/") else path,
                version=version,
                abi=f"cp{major}{minor}",
                platform_tags=tags,
            ),
            refused,
        )
    return None, refused


def _of_python(machine: str, bits: str, soabi: str) -> str:
    """The machine in wheel names, for a Python that may be narrower than the system around it."""
    for name in ("aarch64", "x86_64", "riscv64", "loongarch64", "ppc64le", "s390x"):
        if name in soabi and bits == "64":
            return name
    if bits == "32":
        return {"aarch64": "armv7l", "x86_64": "i686"}.get(machine, machine)
    return machine


def _folders(lines: list[str]) -> list[FolderFacts]:
    """Each candidate from its `folder` line up to the next one."""
    found: list[FolderFacts] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "folder" and rest.startswith("/"):
            found.append(FolderFacts(path=rest[:4096], reason="not tried"))
        elif found:
            found[-1] = _with(found[-1], word, rest)
    return [_judged(folder) for folder in found]


def _with(folder: FolderFacts, word: str, rest: str) -> FolderFacts:
    if word == "df" and (numbers := _DF.search(f" {rest}")):
        return folder.model_copy(update={"free_mb": max(0, int(numbers[3][:19])) // 1024})
    if word in ("writable", "executable") and not rest:
        return folder.model_copy(update={word: True, "reason": ""})
    if word == "refused":
        step, _, said = rest.partition(" ")
        # "mkdir: cannot create directory '…': Permission denied": the last part is the reason.
        why = said.rsplit(": ", 1)[-1].strip() or "no reason told"
        what = {"run": "programs may not run there", "write": "cannot be written"}.get(
            step, "no folder can be made there"
        )
        return folder.model_copy(update={"reason": _short(f"{what} ({why})")})
    return folder


def _judged(folder: FolderFacts) -> FolderFacts:
    if folder.usable or folder.reason:
        return folder
    return folder.model_copy(update={"reason": "programs may not run there"})


def _boot(lines: list[str]) -> str:
    """The kernel's boot_id; the time of the boot where a kernel has none."""
    for line in lines:
        if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", line):
            return line
    for line in lines:
        if found := re.fullmatch(r"btime (\d{1,19})", line):
            return f"btime-{found[1]}"
    return ""


def _clock(sections: dict[str, list[str]]) -> float | None:
    """The mean of the wall clock at the beginning and the end of the probe."""
    times = [_whole(_first(sections, name)) for name in ("clock", "clock_end")]
    known = [time for time in times if time is not None]
    # Half a second more: `date +%s` cuts off what has passed of the second.
    return sum(known) / len(known) + 0.5 if known else None


def _thermal(lines: list[str]) -> list[ThermalZone]:
    zones = []
    for line in lines:
        found = re.match(r"(thermal_zone\d{1,4}) (\S+)(?: (.*))?$", line)
        if not found:
            continue
        value = re.fullmatch(r"-?\d{1,7}", found[2])
        number = float(found[2]) if value else None
        # Most drivers tell millidegrees, a few degrees; no board lives above 200 °C.
        celsius = number / 1000 if number is not None and abs(number) > 200 else number
        zones.append(ThermalZone(name=found[1], kind=_short(found[3] or ""), celsius=celsius))
    return zones
