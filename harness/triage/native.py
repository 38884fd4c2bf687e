"""Frames of machine code, in words and in the form that signatures compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.triage.signature import FRAMES

if TYPE_CHECKING:
    from harness.triage.case import Case


def place(case: Case) -> str:
    """Where the program counter stood: "linear (kernels_linear.h:120)", or module and offset."""
    if case.frames:
        frame = case.frames[0]
        inner = [name for name in frame.inlined[:1] if name != frame.function]
        name = f"{inner[0]} in {frame.function}" if inner else frame.function
        name = name or f"{frame.module}+0x{frame.offset:x}"
        name = f"{name} ({frame.source})" if frame.source else name
        return name if _ours(case) else f"{module_place(case)}, called by {name}"
    return module_place(case)


def _ours(case: Case) -> bool:
    """Whether the program counter stood in our own library."""
    record, bias = case.record, case.bias
    if record is None or record.pc is None or bias is None or case.symbols is None:
        return False
    return case.symbols.executable(record.pc - bias)


def module_place(case: Case) -> str:
    """The same by the mappings alone: "libc.so.6+0x1234"."""
    record = case.record
    if record is None or record.pc is None:
        return "an unknown place"
    region = record.region(record.pc)
    if region is None:
        return f"0x{record.pc:x}, which nothing is mapped at"
    return f"{region.module}+0x{record.pc - region.start + region.offset:x}"


def frame_keys(case: Case) -> tuple[str, ...]:
    """The innermost own frames as signatures hold them: module + offset, build id. Without one the
    place in its module, else Python's frames."""
    if case.frames:
        return tuple(
            f"{frame.module}+0x{frame.offset:x} [{frame.build[:12]}]"
            for frame in case.frames[:FRAMES]
        )
    record = case.record
    python = case.python_frames()
    if python:
        return python
    if record is not None and record.pc is not None and record.region(record.pc) is not None:
        return (module_place(case),)
    return ()
