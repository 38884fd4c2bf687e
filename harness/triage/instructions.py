"""Bytes of code → the instruction, its extension, and the compiler flag that allows it.

The instruction is capstone's. The extension comes from capstone's groups and operands where these
tell it, else from the tables here. Features are named as /proc/cpuinfo prints them.

Sources of the tables: Arm Architecture Reference Manual DDI 0487, C7 ("FEAT_…" of each
instruction), with Linux's Documentation/arch/arm64/elf_hwcaps.rst for the names; Intel SDM volume
2 and AMD APM volume 4 (CPUID flags of each instruction), with Linux's cpufeatures.h.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import capstone

from engine.native.build import cpu_flags
from engine.native.compilers import BuildError, Compiler, Target
from engine.native.isa import ISAS, Isa

# mnemonic → (feature in /proc/cpuinfo, name that people use), aarch64
_ARM: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("sdot", "udot"), ("asimddp", "dotprod")),
    **dict.fromkeys(("smmla", "ummla", "usmmla", "usdot", "sudot"), ("i8mm", "i8mm")),
    **dict.fromkeys(
        ("bfdot", "bfmmla", "bfmlalb", "bfmlalt", "bfcvt", "bfcvtn", "bfcvtn2"), ("bf16", "bf16")
    ),
    **dict.fromkeys(("fmlal", "fmlal2", "fmlsl", "fmlsl2"), ("asimdfhm", "fp16fml")),
    **dict.fromkeys(("sqrdmlah", "sqrdmlsh"), ("asimdrdm", "rdma")),
    **dict.fromkeys(("fcadd", "fcmla"), ("fcma", "fcma")),
    **dict.fromkeys(("fjcvtzs",), ("jscvt", "jscvt")),
    **dict.fromkeys(("ldapr", "ldaprb", "ldaprh"), ("lrcpc", "rcpc")),
    **dict.fromkeys(("frint32z", "frint32x", "frint64z", "frint64x"), ("frint", "frintts")),
    **dict.fromkeys(("aese", "aesd", "aesmc", "aesimc"), ("aes", "aes")),
    **dict.fromkeys(
        ("crc32b", "crc32h", "crc32w", "crc32x", "crc32cb", "crc32cw"), ("crc32", "crc")
    ),
    **dict.fromkeys(("rndr", "rndrrs"), ("rng", "rng")),
}
_ATOMIC = re.compile(
    r"(?:ld|st)(?:add|clr|eor|set|smax|smin|umax|umin)(?:a|l|al)?[bh]?|swp(?:a|l|al)?[bh]?|cas(?:p|a|l|al|pa|pl|pal)?[bh]?"
)
# mnemonic's start → the same, x86; only where capstone's groups do not tell it
_X86 = (
    ("vp2intersect", ("avx512_vp2intersect", "avx512vp2intersect")),
    ("vpdpb", ("avx512_vnni", "avx512vnni")),
    ("vpdpw", ("avx512_vnni", "avx512vnni")),
    ("vdpbf16", ("avx512_bf16", "avx512bf16")),
    ("vcvtne2ps2bf16", ("avx512_bf16", "avx512bf16")),
    ("vcvtneps2bf16", ("avx512_bf16", "avx512bf16")),
    ("tdp", ("amx_int8", "amx-int8")),
    ("tile", ("amx_tile", "amx-tile")),
    ("extrq", ("sse4a", "sse4a")),
    ("insertq", ("sse4a", "sse4a")),
    ("movntss", ("sse4a", "sse4a")),
    ("vfmaddsub", ("fma", "fma")),
)
_GROUPS = (  # capstone's group → the same; the first that an instruction is in counts
    ("FMA4", ("fma4", "fma4")),
    ("XOP", ("xop", "xop")),
    ("VNNI", ("avx512_vnni", "avx512vnni")),
    ("BWI", ("avx512bw", "avx512bw")),
    ("DQI", ("avx512dq", "avx512dq")),
    ("CDI", ("avx512cd", "avx512cd")),
    ("AVX512", ("avx512f", "avx512f")),
    ("VLX", ("avx512vl", "avx512vl")),
    ("F16C", ("f16c", "f16c")),
    ("FMA", ("fma", "fma")),
    ("AVX2", ("avx2", "avx2")),
    ("AVX", ("avx", "avx")),
    ("BMI2", ("bmi2", "bmi2")),
    ("BMI", ("bmi1", "bmi")),
    ("SSE4A", ("sse4a", "sse4a")),
    ("SSE42", ("sse4_2", "sse4.2")),
    ("SSE41", ("sse4_1", "sse4.1")),
    ("SSSE3", ("ssse3", "ssse3")),
    ("AES", ("aes", "aes")),
)
# What traps on purpose: the compiler's own mark of what must not be reached.
TRAPS = ("ud2", "ud1", "ud0", "udf", "brk", "int3", "hlt")
_MODES: Mapping[str, tuple[int, int]] = {
    "x86_64": (capstone.CS_ARCH_X86, capstone.CS_MODE_64),
    "aarch64": (capstone.CS_ARCH_ARM64, capstone.CS_MODE_LITTLE_ENDIAN),
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`extension` is what people call it, `feature` its name in /proc/cpuinfo; "" for what every
    core of the machine has."""

    mnemonic: str
    operands: str
    size: int
    extension: str = ""
    feature: str = ""

    @property
    def text(self) -> str:
        return f"{self.mnemonic} {self.operands}".strip()

    @property
    def trap(self) -> bool:
        return self.mnemonic in TRAPS


def decode(code: bytes, machine: str, address: int = 0) -> Instruction | None:
    """The first instruction of `code`; None for bytes that are none, or a machine unknown here."""
    if machine not in _MODES or not code:
        return None
    engine = capstone.Cs(*_MODES[machine])
    engine.detail = True
    found = next(engine.disasm(code[:32], address, 1), None)
    if found is None:
        return _undecoded(code, machine)
    feature, extension = (_arm if machine == "aarch64" else _x86)(found, code)
    return Instruction(found.mnemonic, found.op_str[:120], found.size, extension, feature)


def _undecoded(code: bytes, machine: str) -> Instruction | None:
    """What this capstone does not know yet, by its encoding."""
    # EVEX F2.0F38.W0/W1 68 is vp2intersectd/q.
    evex = machine == "x86_64" and code[:1] == b"\x62" and len(code) > 5
    if evex and code[1] & 7 == 2 and code[2] & 3 == 3 and code[4] == 0x68:
        name = "vp2intersectq" if code[2] & 0x80 else "vp2intersectd"
        return Instruction(name, "", 6, "avx512vp2intersect", "avx512_vp2intersect")
    if machine == "aarch64" and code[2:4] == b"\0\0":
        return Instruction("udf", f"#{int.from_bytes(code[:2], 'little')}", 4)
    return None


def _arm(found: Any, code: bytes) -> tuple[str, str]:
    del code
    operands = found.op_str
    if re.search(r"\b[z]\d+\.|\bp\d+/|\bp\d+\.", operands):
        return ("sve2", "sve2") if found.mnemonic in ("sqrdmlah",) else ("sve", "sve")
    if found.mnemonic in _ARM:
        return _ARM[found.mnemonic]
    if _ATOMIC.fullmatch(found.mnemonic):
        return "atomics", "lse"
    if found.mnemonic.startswith("f") and re.search(r"\bv\d+\.[48]h|\bh\d+\b", operands):
        converts = found.mnemonic.startswith("fcvt")  # between sizes: part of the baseline
        return ("", "") if converts else ("asimdhp", "fp16")
    return "", ""


def _x86(found: Any, code: bytes) -> tuple[str, str]:
    for start, named in _X86:
        if found.mnemonic.startswith(start):
            return named
    groups = {
        capstone_name.upper()
        for capstone_name in map(found.group_name, found.groups)
        if capstone_name
    }
    for group, named in _GROUPS:
        if group in groups:
            return named
    if code[:1] == b"\x62":  # only AVX-512 is encoded so
        return "avx512f", "avx512f"
    return "", ""


def enabled_by(extension: Instruction, machine: str, ran: str = "") -> Isa | None:
    """The instruction set of engine/native/isa.py that allows an extension: `ran` if it does, else
    the plainest that does."""
    rows = [isa for isa in ISAS.get(machine, ()) if _allows(isa, extension)]
    return next((isa for isa in rows if isa.name == ran), rows[0] if rows else None)


def _allows(isa: Isa, found: Instruction) -> bool:
    words = {*isa.march.split("+")[1:], *(flag.removeprefix("-m") for flag in isa.flags)}
    return found.extension in words or found.feature in isa.needs


def flags_of(isa: Isa, record: Mapping[str, object], machine: str) -> str:
    """How the library's compiler was told: "-mcpu=generic+v8_2a+dotprod". `record` is the build's.

    For the record of another build, what gcc and clang take.
    """
    kind = str(record.get("compiler", "")).split(" ")[0]
    plain = " ".join((f"-march={isa.march}", *isa.flags))
    if kind != "zig":
        return plain
    try:
        target = Target.parse(
            str(record.get("target", f"{machine}-linux-gnu")), str(record.get("cpu") or "")
        )
    except BuildError:
        return plain
    told = cpu_flags(target, Compiler("zig", (), ""), isa)
    return f"{next(flag for flag in told if flag.startswith('-mcpu='))} (as gcc: {plain})"


def lacking(found: Instruction, features: Collection[str]) -> bool:
    """Whether cores of these features cannot run it, as far as that is known."""
    return bool(found.feature and features) and found.feature not in features
