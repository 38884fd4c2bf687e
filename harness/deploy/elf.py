"""Reads of an ELF library what decides whether a board can load it: machine, libraries, versions.

Sources: the System V ABI (gABI 4.1, "ELF Header", "Sections", "Dynamic Section") and the Linux
Standard Base Core 5.0, "Symbol Versioning". Every offset is checked: the file may be damaged.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import HarnessError

MACHINES: Mapping[int, str] = {3: "i686", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
SHT_DYNAMIC, SHT_DYNSYM, SHT_VERNEED, SHT_VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
DT_NEEDED, DT_SONAME = 1, 14
_HIDDEN = 0x8000  # bit of a version index that is no part of the number


@dataclasses.dataclass(frozen=True)
class Need:
    """A version that must be in a library of the system, and the symbols it is needed for."""

    library: str  # "libc.so.6"
    version: str  # "GLIBC_2.34"
    symbols: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ElfFacts:
    machine: str  # "aarch64"; "machine 8" for one we have no name for
    libraries: tuple[str, ...]  # what the loader must find
    needs: tuple[Need, ...]
    name: str = ""  # what others know it by (soname)


@dataclasses.dataclass(frozen=True)
class _Section:
    kind: int
    data: memoryview
    link: int  # the section of its strings
    info: int


def read_elf(path: Path) -> ElfFacts:
    """The facts of a 64-bit little-endian ELF file. Raises HarnessError for anything else."""
    try:
        return _parse(memoryview(path.read_bytes()))
    except OSError as error:
        raise HarnessError(
            f"cannot be read: {error.strerror}", where=str(path), remedy="build it again"
        ) from error
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise HarnessError(
            f"no ELF library that can be read: {error}",
            where=str(path),
            expected="a 64-bit little-endian shared library",
            remedy="build it again",
        ) from error


def _parse(data: memoryview) -> ElfFacts:
    if bytes(data[:6]) != b"\x7fELF\x02\x01":
        raise ValueError(f"it begins with {bytes(data[:6])!r}")
    (machine,) = struct.unpack_from("<H", data, 18)
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [_section(data, offset + size * index) for index in range(count)]
    dynamic = [
        (tag, sections[section.link].data, value)
        for section in sections
        if section.kind == SHT_DYNAMIC
        for tag, value in struct.iter_unpack("<qQ", section.data)
    ]
    libraries = tuple(_string(names, value) for tag, names, value in dynamic if tag == DT_NEEDED)
    name = next((_string(names, value) for tag, names, value in dynamic if tag == DT_SONAME), "")
    users = _users(sections)
    needs = [
        Need(library, version, tuple(users.get(index, ())))
        for section in sections
        if section.kind == SHT_VERNEED
        for library, version, index in _versions(section, sections[section.link].data)
    ]
    return ElfFacts(MACHINES.get(machine, f"machine {machine}"), libraries, tuple(needs), name)


def _section(data: memoryview, at: int) -> _Section:
    kind, offset, size, link, info = struct.unpack_from("<I16xQQII", data, at + 4)
    inside = data[offset : offset + size] if kind != 8 else data[:0]  # 8: takes no room in the file
    if kind != 8 and len(inside) != size:
        raise ValueError(f"a section of {size} bytes at {offset} in a file of {len(data)}")
    return _Section(kind, inside, link, info)


def _string(table: memoryview, at: int) -> str:
    end = bytes(table[at : at + 4096]).find(b"\0")
    if not 0 <= at < len(table) or end < 0:
        raise ValueError(f"a name at {at} in a table of {len(table)} bytes")
    return bytes(table[at : at + end]).decode(errors="replace")


def _versions(section: _Section, names: memoryview) -> Iterator[tuple[str, str, int]]:
    """(library, version, index) of a .gnu.version_r: `info` entries with a list each."""
    at = 0
    for _ in range(section.info):
        _, count, file, aux, following = struct.unpack_from("<HHIII", section.data, at)
        inner = at + aux
        for _ in range(count):
            _, _, index, name, next_inner = struct.unpack_from("<IHHII", section.data, inner)
            yield _string(names, file), _string(names, name), index & ~_HIDDEN
            inner += next_inner
            if not next_inner:  # the last; a damaged count cannot hold us here
                break
        at += following
        if not following:
            break


def _users(sections: list[_Section]) -> dict[int, list[str]]:
    """Version index → the symbols that ask for it."""
    found: dict[int, list[str]] = {}
    for section in sections:
        if section.kind != SHT_VERSYM:
            continue
        symbols = sections[section.link]
        names = sections[symbols.link].data
        indices = struct.iter_unpack("<H", section.data)
        entries = struct.iter_unpack("<IBBHQQ", symbols.data)
        for (index,), (name, *_) in zip(indices, entries, strict=False):
            if index & ~_HIDDEN > 1:  # 0 and 1: local and global, without a version
                found.setdefault(index & ~_HIDDEN, []).append(_string(names, name))
    return found


def newest_version(needs: tuple[Need, ...], prefix: str) -> Need | None:
    """The need with the highest version of a family: "GLIBC_2.34" of prefix "GLIBC_"."""
    numbered = [(number, need) for need in needs if (number := _number(need.version, prefix))]
    return max(numbered, key=lambda item: item[0])[1] if numbered else None


def _number(version: str, prefix: str) -> tuple[int, ...]:
    rest = version.removeprefix(prefix)
    fits = version.startswith(prefix) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}", rest)
    return tuple(int(part) for part in rest.split(".")) if fits else ()


def newer_than(needs: tuple[Need, ...], prefix: str, version: str) -> tuple[Need, ...]:
    """The needs of a family that a system of `version` ("2.31") does not have, highest first."""
    limit = _number(version, "")
    late = [need for need in needs if _number(need.version, prefix) > limit]
    return tuple(sorted(late, key=lambda need: _number(need.version, prefix), reverse=True))
