"""SIGSEGV, SIGBUS and a sanitiser's report: memory that is not the engine's own, or not there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from engine.native.build import SOURCES
from harness.triage.finding import Finding
from harness.triage.native import frame_keys, place
from harness.triage.output import SanitizerReport

if TYPE_CHECKING:
    from harness.triage.case import Case
    from harness.triage.record import CrashRecord

NAME, ORDER, TITLE = "out-of-bounds", 40, "Memory out of bounds"
NEAR = 64 << 20  # bytes behind or before a mapping that still count as overrunning it
NULL = 64 << 10
MEANINGS = {
    "SIGSEGV": "it touched memory that is not its own",
    "SIGBUS": "it touched memory that could not be read (a truncated file, or alignment)",
}
_WRITE_X86 = 2  # of the page fault's error code: arch/x86/include/asm/trap_pf.h
_WNR_ARM = 1 << 6  # of a data abort's syndrome: ESR_ELx.ISS.WnR


def recognise(case: Case) -> Finding | None:
    report = case.sanitizer
    if report is not None and case.own_exit and report.tool != "thread":
        return _reported(case, report)
    if case.signal not in MEANINGS:
        return None
    record = case.record
    meaning = MEANINGS[case.signal]
    if record is None:
        return _finding(case, meaning, _said(case), "unknown")
    if record.sender is not None:
        who = "itself" if record.sender == record.process else f"process {record.sender}"
        return _finding(
            case,
            f"the signal was sent by {who}",
            "no access was at fault",
            "sent",
            remedy="find out what sends signals to the engine",
        )
    region = record.region(record.pc) if record.pc is not None else None
    if record.pc is not None and (region is None or not region.executable):
        return _finding(
            case,
            f"control went to 0x{record.pc:x}, where no code is",
            f"{meaning}: a jump through a damaged pointer or return address",
            "corrupted control flow",
        )
    kind, words = _fault(case, record)
    access = {True: "a write to", False: "a read of", None: "an access to"}[_wrote(record)]
    where = f"0x{record.address:x}" if record.address is not None else "an unknown address"
    return _finding(
        case, f"{access} {where} in {place(case)}: {words}", f"{meaning}; {_said(case)}", kind
    )


def _reported(case: Case, report: SanitizerReport) -> Finding:
    first = report.accesses[0] if report.accesses else None
    frames = (first.frames if first is not None else ()) or report.frames
    own = [frame for frame in frames if frame.place.split(":")[0] in _sources()]
    own = own or [frame for frame in frames if frame.name] or list(frames)
    where = str(own[0]) if own else "an unknown place"
    access = f": a {first.kind} of {first.size} bytes" if first is not None else ""
    words = f"{report.what}{access} in {where}" + (f", {report.region}" if report.region else "")
    return Finding(
        NAME,
        headline=words,
        sentence=f"The {report.tool} sanitiser reports a {words}",
        remedy="repair the access at that line; the whole report is in engine.*.log of the run",
        signal=case.signal,
        op=case.op,
        frames=tuple(f"{frame.name} {frame.place}" for frame in own[:3]),
        kind=report.what,
        facts=tuple(("frame", str(frame)) for frame in frames[:16]),
    )


@functools.cache
def _sources() -> frozenset[str]:
    """File names of the engine's C sources: other files are of libraries and compilers."""
    return frozenset(path.name for path in SOURCES.rglob("*.[ch]"))


def _fault(case: Case, record: CrashRecord) -> tuple[str, str]:
    """(kind, in words) of the address that was at fault."""
    at = record.address
    if case.signal == "SIGBUS":
        if case.code == "BUS_ADRALN":
            return "alignment", "an address that is not aligned as this instruction needs it"
        region = record.region(at) if at is not None else None
        if region is not None and region.path.startswith("/"):
            return "beyond the file", f"{region.module} is shorter than its mapping: was it cut?"
        return "bus error", "memory that could not be read"
    if at is None:
        return "unknown", "the address is not known"
    if at < NULL:
        return "null pointer", "a null pointer, and what lies behind it"
    region = record.region(at)
    if region is not None:
        how = "read-only" if not region.writable and _wrote(record) else "protected"
        return how, f"{region.module} is {how} there"
    if case.machine == "x86_64" and (at == 0 or at >> 47 not in (0, (1 << 17) - 1)):
        return "wild pointer", "no address at all: a damaged pointer"
    before = [r for r in record.regions if r.end <= at]
    if before and at - max(before, key=lambda r: r.end).end < NEAR:
        last = max(before, key=lambda r: r.end)
        return "overrun", f"{at - last.end} bytes beyond the end of {last.module}"
    behind = [r for r in record.regions if r.start > at]
    if behind and min(behind, key=lambda r: r.start).start - at < NEAR:
        first = min(behind, key=lambda r: r.start)
        return "underrun", f"{first.start - at} bytes before the start of {first.module}"
    return "wild pointer", "nothing is mapped near it: a damaged pointer or index"


def _wrote(record: CrashRecord) -> bool | None:
    """Whether it was a write; None where the machine does not tell."""
    if record.machine == "x86_64" and record.registers.get("trapno") == 14:
        return bool(record.registers.get("err", 0) & _WRITE_X86)
    if record.machine == "aarch64" and record.esr is not None and record.esr >> 26 in (0x24, 0x25):
        return bool(record.esr & _WNR_ARM)
    return None


def _said(case: Case) -> str:
    trap = case.note("trap")
    if trap is not None:
        return f"the kernel says: {trap.line}"
    if case.fatal is not None:
        return f"Python says: {case.fatal.what}"
    return "nothing else is known of it"


def _finding(case: Case, headline: str, why: str, kind: str, remedy: str = "") -> Finding:
    record = case.record
    facts = [("frame", str(frame)) for frame in case.frames]
    facts += [("Python frame", frame) for frame in case.python_frames()]
    if record is not None and record.address is not None:
        facts.insert(0, ("address", f"0x{record.address:x}"))
    return Finding(
        NAME,
        headline=headline,
        sentence=f"{headline}; {why}",
        remedy=remedy
        or f"`harness triage {case.log.run_id[:8]} --asan` runs it over the address sanitiser, "
        "which names the access; the engine's log ends with the Python frames",
        signal=case.signal,
        code=case.code,
        op=case.op,
        frames=frame_keys(case),
        kind=kind,
        facts=tuple(facts),
    )
