"""The record that a dying engine writes of itself (engine/native/src/crash.c), read without trust.

crash-record 1
machine aarch64
build 3f…                    hash of what the library was made of, also its build id
anchor dn_isas 0x…           where that function of the library was loaded
signal 4 / code 1 / address 0x… or sender PID
process PID / thread TID / op L07.ffn.down
register NAME 0x… , esr 0x…
pc 0x… / sp 0x…
before 0x… HEX / at 0x… HEX  bytes of the code before and at the program counter
maps                         the lines of /proc/self/maps
stack 0x… HEX                from the stack pointer on
end
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

VERSION = 1
BYTES_LIMIT = 512 << 10
REGISTERS_LIMIT, MAPPINGS_LIMIT = 64, 4096
_NUMBER = re.compile(r"0x[0-9a-f]{1,16}|-?[0-9]{1,18}")
_MAPPING = re.compile(
    r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ([r-])([w-])([x-])[ps-] ([0-9a-f]{1,16}) \S+ +[0-9]+ *(.*)"
)
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_WORD = re.compile(r"[A-Za-z0-9._+-]{1,120}")


@dataclasses.dataclass(frozen=True)
class Region:
    """One mapping: [start, end), bytes from `offset` of the file `path` ("" without one)."""

    start: int
    end: int
    readable: bool
    writable: bool
    executable: bool
    offset: int
    path: str

    @property
    def module(self) -> str:
        """The file's name, "[stack]", or "anonymous memory"."""
        return self.path.rsplit("/", 1)[-1][:120] or "anonymous memory"


@dataclasses.dataclass(frozen=True)
class CrashRecord:
    """What is missing is None, "" or empty. `at` are the bytes at the program counter."""

    machine: str
    build: str
    anchor: int | None
    signal: int
    code: int
    address: int | None
    sender: int | None
    process: int | None
    thread: int | None
    op: str
    pc: int | None
    sp: int | None
    esr: int | None
    registers: Mapping[str, int]
    before: bytes
    at: bytes
    regions: tuple[Region, ...]
    stack: bytes
    whole: bool  # it ends as it should

    def region(self, address: int) -> Region | None:
        """The mapping that holds an address."""
        return next((r for r in self.regions if r.start <= address < r.end), None)


def parse_record(text: str) -> CrashRecord | None:
    """None for what is no record of this version, or one without a signal.

    Lines that cannot be read are left out: the process was dying as it wrote them.
    """
    lines = text[:BYTES_LIMIT].split("\n")
    if lines[0].strip() != f"crash-record {VERSION}":
        return None
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    registers: dict[str, int] = {}
    data: dict[str, bytes] = {}
    regions: list[Region] = []
    whole = False
    for line in lines[1:]:
        name, _, rest = line.partition(" ")
        if name == "end":
            whole = True
        elif name == "register":
            key, _, value = rest.partition(" ")
            if _WORD.fullmatch(key) and _NUMBER.fullmatch(value) and len(registers) < 64:
                registers[key] = _whole(value)
        elif name in ("machine", "build", "op"):
            words[name] = rest if _WORD.fullmatch(rest) else ""
        elif name in ("before", "at", "stack"):
            _, _, digits = rest.partition(" ")
            if _HEX.fullmatch(digits):
                data[name] = bytes.fromhex(digits)
        elif name == "anchor":
            value = rest.rpartition(" ")[2]
            if _NUMBER.fullmatch(value):
                numbers["anchor"] = _whole(value)
        elif _NUMBER.fullmatch(rest):
            numbers.setdefault(name, _whole(rest))
        elif len(regions) < MAPPINGS_LIMIT:
            found = _MAPPING.fullmatch(line)
            if found is not None:
                regions.append(
                    Region(
                        int(found[1], 16),
                        int(found[2], 16),
                        found[3] == "r",
                        found[4] == "w",
                        found[5] == "x",
                        int(found[6], 16),
                        found[7][:400],
                    )
                )
    if not 0 < numbers.get("signal", 0) < 65:
        return None
    return CrashRecord(
        machine=words.get("machine", ""),
        build=words.get("build", ""),
        anchor=numbers.get("anchor"),
        signal=numbers["signal"],
        code=numbers.get("code", 0),
        address=numbers.get("address"),
        sender=numbers.get("sender"),
        process=numbers.get("process"),
        thread=numbers.get("thread"),
        op=words.get("op", ""),
        pc=numbers.get("pc"),
        sp=numbers.get("sp"),
        esr=numbers.get("esr"),
        registers=registers,
        before=data.get("before", b""),
        at=data.get("at", b""),
        regions=tuple(regions),
        stack=data.get("stack", b""),
        whole=whole,
    )


def _whole(text: str) -> int:
    return int(text, 16 if text.startswith("0x") else 10)


# include/uapi/asm-generic/siginfo.h
_CODES: Mapping[int, tuple[str, ...]] = {
    4: ("ILLOPC", "ILLOPN", "ILLADR", "ILLTRP", "PRVOPC", "PRVREG", "COPROC", "BADSTK", "BADIADDR"),
    7: ("ADRALN", "ADRERR", "OBJERR", "MCEERR_AR", "MCEERR_AO"),
    8: ("INTDIV", "INTOVF", "FLTDIV", "FLTOVF", "FLTUND", "FLTRES", "FLTINV", "FLTSUB"),
    11: ("MAPERR", "ACCERR", "BNDERR", "PKUERR", "ACCADI", "ADIDERR", "ADIPERR", "MTEAERR"),
}
_PREFIX = {4: "ILL_", 7: "BUS_", 8: "FPE_", 11: "SEGV_"}
_SENT = {0: "SI_USER", -1: "SI_QUEUE", -6: "SI_TKILL", 128: "SI_KERNEL"}


def code_name(signal: int, code: int) -> str:
    """The name of a siginfo's si_code, "SEGV_MAPERR"; the number where it has none."""
    if code in _SENT:
        return _SENT[code]
    names = _CODES.get(signal, ())
    return f"{_PREFIX[signal]}{names[code - 1]}" if 1 <= code <= len(names) else str(code)
