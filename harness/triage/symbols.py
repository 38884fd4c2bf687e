"""Names and source lines of addresses in a library that was built here, and the frames of a stack.

The host keeps every library by the hash that is its build id too, so that a record from a board is
read with the very file that ran there. Sources: System V ABI (symbols), DWARF 5 (lines, inlined
subroutines, call frame information), both through pyelftools.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elftools.common.exceptions import DWARFError, ELFError
from elftools.dwarf.callframe import FDE
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from engine.native.build import LIBRARY, build_record, cache_folder
from harness.errors import HarnessError
from harness.paths import cache_dir

ANCHOR = "dn_isas"  # the function whose address a crash record tells
FRAMES_LIMIT = 32
CALLERS = 4  # that are told where only the stack's words can be looked at
_HASH = re.compile(r"[0-9a-f]{32}")

# DWARF register numbers: psABI of x86-64, figure 3.36; AADWARF64, table 1.
_X86 = ("rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp")
_REGISTERS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {**dict(enumerate(_X86)), **{n: f"r{n}" for n in range(8, 16)}, 16: "rip"},
    "aarch64": {**{n: f"x{n}" for n in range(31)}, 31: "sp"},
}
_STACK = {"x86_64": "rsp", "aarch64": "sp"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of ours. `offset` counts from the module's start, as `build` was linked."""

    function: str
    offset: int
    module: str = LIBRARY
    build: str = ""
    within: int = 0  # bytes into the function
    source: str = ""  # "kernels_linear.h:120"
    inlined: tuple[str, ...] = ()  # functions whose code stands there, the innermost first

    def __str__(self) -> str:
        named = f"{self.function}+0x{self.within:x}" if self.function else f"0x{self.offset:x}"
        return f"{named} ({self.source})" if self.source else named


def find_library(build: str) -> Path | None:
    """The library of that build hash, where this host still has it."""
    if not _HASH.fullmatch(build):
        return None
    for folder in (cache_dir("native"), cache_folder()):
        path = folder / build / LIBRARY
        if path.is_file() and build_record(path).get("hash") == build:
            return path
    return None


@functools.lru_cache(maxsize=8)
def symbols_of(path: Path) -> Symbols:
    """Read once. Raises HarnessError for what is no library."""
    return Symbols(path)


class Symbols:
    """Of one library. Addresses are as it was linked: what was loaded elsewhere is shifted."""

    def __init__(self, path: Path) -> None:
        self.path, self.record = path, build_record(path)
        self.build = str(self.record.get("hash", ""))
        try:
            self._elf = ELFFile(path.open("rb"))
            self.machine = {"x64": "x86_64", "AArch64": "aarch64"}.get(
                self._elf.get_machine_arch(), "other"
            )
            self.functions = sorted(_functions(self._elf))
        except (OSError, ELFError, ValueError) as error:
            raise HarnessError(
                f"no library that can be read: {error}", where=str(path), remedy="build it again"
            ) from error
        self._starts = [item[0] for item in self.functions]
        self._fdes: list[tuple[int, int, FDE]] | None = None
        self._lines: dict[int, list[tuple[int, int, str]]] = {}  # by the unit's place

    def address(self, name: str) -> int | None:
        return next((at for at, _, found in self.functions if found == name), None)

    def function(self, address: int) -> tuple[str, int]:
        """(name, bytes into it); ("", 0) outside of every function."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0:
            start, size, name = self.functions[index]
            if address < start + max(size, 1):
                return name, address - start
        return "", 0

    def frame(self, address: int, call: bool = False) -> Frame:
        """`call`: a return address, whose call stands before it."""
        place = address - 1 if call else address
        name, within = self.function(place)
        return Frame(
            name,
            address,
            build=self.build,
            within=within + call,
            source=self.line(place),
            inlined=self.inlined(place),
        )

    def code(self, address: int, count: int) -> bytes:
        """Bytes of the file that are loaded there."""
        for segment in self._elf.iter_segments("PT_LOAD"):
            start, size = segment["p_vaddr"], segment["p_filesz"]
            if start <= address < start + size:
                data: bytes = segment.data()
                return data[address - start :][:count]
        return b""

    def executable(self, address: int) -> bool:
        return any(
            segment["p_flags"] & 1
            and segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_memsz"]
            for segment in self._elf.iter_segments("PT_LOAD")
        )

    def line(self, address: int) -> str:
        """The source file's name and line, "" where it is not told."""
        try:
            unit = _unit(self._elf, address)
            if unit is None:
                return ""
            if unit.cu_offset not in self._lines:  # most of a second for kernels
                self._lines[unit.cu_offset] = sorted(_lines(self._elf, unit))
        except (DWARFError, ELFError, KeyError, ValueError, IndexError, AttributeError):
            return ""
        table = self._lines[unit.cu_offset]
        index = bisect.bisect_right(table, address, key=lambda item: item[0]) - 1
        return table[index][2] if index >= 0 and address < table[index][1] else ""

    def inlined(self, address: int) -> tuple[str, ...]:
        """The inlined functions at an address, the innermost first."""
        try:
            return tuple(reversed(list(_inlined(self._elf, address))))[:8]
        except (DWARFError, ELFError, KeyError, ValueError, IndexError, AttributeError):
            return ()

    def unwind(
        self, registers: Mapping[str, int], pc: int, stack: bytes, bias: int
    ) -> tuple[Frame, ...]:
        """Frames of this library from `pc` outwards, by its call frame information.

        `registers` and `stack` (bytes from the stack pointer on) are those of the record, `bias` is
        where the library was loaded. Ends with the first frame that is not its own.
        """
        own = {number: registers.get(name, 0) for number, name in self._numbers().items()}
        memory = _Memory(registers.get(_STACK.get(self.machine, ""), 0), stack)
        frames: list[Frame] = []
        at, call = pc - bias, False
        if not self.executable(at):  # in somebody else's code, memcpy perhaps: who called it?
            return self._callers(registers, memory, bias)
        while len(frames) < FRAMES_LIMIT and self.executable(at - call):
            frames.append(self.frame(at, call))
            caller = self._caller(at - call, own, memory)
            if caller is None:
                break
            own, back = caller
            at, call = back - bias, True
        return tuple(frames)

    def _callers(
        self, registers: Mapping[str, int], memory: _Memory, bias: int
    ) -> tuple[Frame, ...]:
        """Return addresses into this library that stand behind a call, from the stack's top on.

        Without the other library's own information some of them may be left from calls that are
        over; the first is right as a rule.
        """
        words = [registers.get("x30", 0)] if self.machine == "aarch64" else []
        words += [
            int.from_bytes(memory.data[at : at + 8], "little")
            for at in range(0, len(memory.data) - 7, 8)
        ]
        found: list[Frame] = []
        for word in words:
            at = (word & (1 << 48) - 1) - bias
            if at > 0 and self.executable(at - 1) and self._behind_call(at):
                frame = self.frame(at, call=True)
                if frame.function and frame not in found:
                    found.append(frame)
            if len(found) >= CALLERS:
                break
        return tuple(found)

    def _behind_call(self, address: int) -> bool:
        if self.machine == "aarch64":  # bl, blr
            word = int.from_bytes(self.code(address - 4, 4), "little")
            return word >> 26 == 0b100101 or word & 0xFFFFFC1F == 0xD63F0000
        code = self.code(address - 7, 7)  # call rel32; call r/m64 of two to seven bytes
        near = len(code) == 7 and code[2] == 0xE8
        return near or any(
            code[at] == 0xFF and code[at + 1] >> 3 & 7 == 2 for at in range(len(code) - 1)
        )

    def _numbers(self) -> Mapping[int, str]:
        return _REGISTERS.get(self.machine, {})

    def _caller(
        self, address: int, own: Mapping[int, int], memory: _Memory
    ) -> tuple[dict[int, int], int] | None:
        """The caller's registers and where it goes on; None where nothing is told."""
        row = self._row(address)
        if row is None:
            return None
        table, back = row
        rule = table["cfa"]
        if rule.reg is None or rule.reg not in own:
            return None
        frame = own[rule.reg] + rule.offset
        found = dict(own)
        for number in own:
            kept = table.get(number)
            if kept is not None and kept.type == "OFFSET":
                value = memory.word(frame + kept.arg)
                if value is None:
                    return None
                found[number] = value
        pointer = {"x86_64": 7, "aarch64": 31}[self.machine]
        found[pointer] = frame
        kept = table.get(back)
        if kept is not None and kept.type == "OFFSET":
            target = memory.word(frame + kept.arg)
        else:  # not saved yet: a leaf function of aarch64 returns by its register
            target = own.get(back) if self.machine == "aarch64" else None
        return None if not target else (found, target & (1 << 48) - 1)

    def _row(self, address: int) -> tuple[Mapping[Any, Any], int] | None:
        for start, end, entry in self._entries():
            if start <= address < end:
                decoded = entry.get_decoded()
                rows = [row for row in decoded.table if row["pc"] <= address]
                if not rows or entry.cie is None:
                    return None
                return rows[-1], int(entry.cie["return_address_register"])
        return None

    def _entries(self) -> list[tuple[int, int, FDE]]:
        if self._fdes is None:
            self._fdes = []
            try:
                info = self._elf.get_dwarf_info()
                found = info.EH_CFI_entries() if info.has_EH_CFI() else []
                found = [*found, *(info.CFI_entries() if info.has_CFI() else [])]
            except (DWARFError, ELFError, KeyError, ValueError, AssertionError):
                found = []
            for entry in found:
                if isinstance(entry, FDE):
                    start = int(entry.header["initial_location"])
                    self._fdes.append((start, start + int(entry.header["address_range"]), entry))
        return self._fdes


@dataclasses.dataclass(frozen=True)
class _Memory:
    start: int
    data: bytes

    def word(self, address: int) -> int | None:
        at = address - self.start
        if not 0 <= at <= len(self.data) - 8:
            return None
        return int.from_bytes(self.data[at : at + 8], "little")


def _functions(elf: ELFFile) -> Iterator[tuple[int, int, str]]:
    for name in (".symtab", ".dynsym"):
        table = elf.get_section_by_name(name)
        if not isinstance(table, SymbolTableSection):
            continue
        for symbol in table.iter_symbols():
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_value"]:
                yield int(symbol["st_value"]), int(symbol["st_size"]), symbol.name
        return


def _unit(elf: ELFFile, address: int) -> Any:
    """The compile unit whose code an address is in; None outside of all."""
    info = elf.get_dwarf_info()
    units = info.iter_CUs()
    return next((u for u in units if _covers(info, u, u.get_top_DIE(), address)), None)


def _lines(elf: ELFFile, unit: Any) -> Iterator[tuple[int, int, str]]:
    """(start, end, "file:line") of a unit's line table."""
    program = elf.get_dwarf_info().line_program_for_CU(unit)
    if program is None:
        return
    files, first = program["file_entry"], 1 if program["version"] < 5 else 0
    before = None
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if before is not None and before.address < state.address:
            number = before.file - first
            if 0 <= number < len(files):
                name = files[number].name.decode(errors="replace").rsplit("/", 1)[-1]
                yield before.address, state.address, f"{name}:{before.line}"
        before = None if state.end_sequence else state


def _inlined(elf: ELFFile, address: int) -> Iterator[str]:
    info, unit = elf.get_dwarf_info(), _unit(elf, address)
    level = unit.get_top_DIE() if unit is not None else None
    while level is not None:
        level = next(
            (
                child
                for child in level.iter_children()
                if child.tag in ("DW_TAG_subprogram", "DW_TAG_inlined_subroutine")
                and _covers(info, unit, child, address)
            ),
            None,
        )
        if level is not None and level.tag == "DW_TAG_inlined_subroutine":
            origin = level.get_DIE_from_attribute("DW_AT_abstract_origin")
            name = origin.attributes.get("DW_AT_name")
            if name is not None:
                yield name.value.decode(errors="replace")


def _covers(info: Any, unit: Any, die: Any, address: int) -> bool:
    low, high = die.attributes.get("DW_AT_low_pc"), die.attributes.get("DW_AT_high_pc")
    if low is not None and high is not None:
        end = high.value if high.form == "DW_FORM_addr" else low.value + high.value
        return bool(low.value <= address < end)
    ranges = die.attributes.get("DW_AT_ranges")
    if ranges is None:
        return False
    base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
    offset = base.value if base is not None else 0
    lists = info.range_lists()
    for item in lists.get_range_list_at_offset(ranges.value, cu=unit) if lists else ():
        if not hasattr(item, "begin_offset"):
            offset = item.base_address
            continue
        start = 0 if getattr(item, "is_absolute", False) else offset
        if start + item.begin_offset <= address < start + item.end_offset:
            return True
    return False
