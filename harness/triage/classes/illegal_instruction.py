"""SIGILL: which instruction, of which extension, in which function, allowed by which flag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.native.isa import ISAS
from harness.triage.finding import Finding
from harness.triage.instructions import Instruction, decode, enabled_by, flags_of, lacking
from harness.triage.native import frame_keys, place

if TYPE_CHECKING:
    from harness.triage.case import Case

NAME, ORDER, TITLE = "illegal-instruction", 30, "Illegal instruction"
CODE_SHOWN = 16


def recognise(case: Case) -> Finding | None:
    if case.signal != "SIGILL":
        return None
    record = case.record
    if record is None or record.pc is None:
        return _without_record(case)
    if record.sender is not None:
        return _finding(
            case,
            f"it was sent SIGILL by process {record.sender}",
            "no instruction was at fault: the signal was sent",
            "find out what sends signals to the engine",
            "sent",
        )
    region = record.region(record.pc)
    if not record.at or region is None or not region.executable:
        where = region.module if region is not None else "no mapping"
        return _finding(
            case,
            f"control went to 0x{record.pc:x}, in {where}, where no code is",
            "the code it ran is not code: a jump through a damaged pointer or return address",
            "run it with --asan: an overrun that damages pointers is found where it happens",
            "corrupted control flow",
        )
    found = decode(record.at, case.machine, record.pc)
    where = place(case)
    if found is None:
        return _finding(
            case,
            f"bytes {record.at[:CODE_SHOWN].hex(' ')} in {where} are no instruction",
            "the code it ran is not code: damaged memory, or a jump into the middle of something",
            "compare the deployed library with its hash, then run it with --asan",
            "not an instruction",
        )
    return _of_instruction(case, found, where)


def _of_instruction(case: Case, found: Instruction, where: str) -> Finding:
    if found.trap:
        return _finding(
            case,
            f"{found.text} in {where}: a trap that the compiler put there",
            "the compiler marks so what must never be reached",
            "look at the source line: undefined behaviour, or a check that failed",
            found.mnemonic,
            found,
        )
    if not found.extension:
        return _finding(
            case,
            f"{found.text} in {where}, which every {case.machine} core has",
            "it is valid here: mixed cores, an emulator's limit, or damaged code pages",
            "run it on one core after the other (pin:), and compare the library with its hash",
            found.mnemonic,
            found,
        )
    if case.features and not lacking(found, case.features):
        return _finding(
            case,
            f"{found.text} in {where} is {found.extension}, which the cores are said to have",
            "the board's /proc/cpuinfo promises what one of its cores, or its hypervisor, refuses",
            "run it on one core after the other (pin:): mixed cores are the likely cause",
            found.mnemonic,
            found,
        )
    ran = str(case.native.get("isa") or "")
    isa = enabled_by(found, case.machine, ran)
    record = case.symbols.record if case.symbols is not None else {}
    why = f"the cores have no {found.feature}"
    if isa is not None:
        flags = flags_of(isa, record, case.machine)
        why += f"; it was compiled with {flags}, for the {isa.name} kernels"
        reason = str(case.native.get("reason") or "")
        if reason:
            why += f" ({reason})"
    best = _best(case)
    remedy = f"run the {best} kernels there (kernels: {best}, or leave the choice to the engine)"
    if isa is None:
        remedy = "leave out the flag that allows it in the toolchain of this board"
    return _finding(
        case,
        f"{found.mnemonic} in {where} needs {found.extension}, which the cores lack",
        why,
        remedy,
        found.mnemonic,
        found,
        isa_flags="" if isa is None else flags_of(isa, record, case.machine),
    )


def _best(case: Case) -> str:
    """The best kernels that the cores have all of."""
    rows = [isa for isa in ISAS.get(case.machine, ()) if set(isa.needs) <= case.features]
    return rows[-1].name if rows else "generic"


def _without_record(case: Case) -> Finding:
    """Only the signal, and what the kernel's line or faulthandler say."""
    missing = case.native.get("missing")
    trap = case.note("trap")
    lacks = ", ".join(map(str, missing)) if isinstance(missing, (list, tuple)) and missing else ""
    sentence = f"the kernel says: {trap.line}" if trap is not None else "there is no crash record"
    headline = "it ran an instruction that this core does not have, or code that is not code"
    if lacks:
        headline = f"its {case.native.get('isa')} kernels need {lacks}, which the cores lack"
    module = f"{trap.module}+0x{trap.offset:x}" if trap is not None and trap.offset else ""
    return Finding(
        NAME,
        headline=headline,
        sentence=f"{headline}; {sentence}",
        remedy="compare the kernels named in the ready event with the board's CPU features",
        signal="SIGILL",
        op=case.op,
        frames=(module,) if module else case.python_frames(),
        kind=lacks or "unknown",
        facts=(("kernel", trap.line),) if trap is not None else (),
    )


def _finding(
    case: Case,
    headline: str,
    why: str,
    remedy: str,
    kind: str,
    found: Instruction | None = None,
    *,
    isa_flags: str = "",
) -> Finding:
    record = case.record
    facts = []
    if found is not None:
        facts.append(("instruction", found.text))
        if found.extension:
            facts.append(("extension", f"{found.extension} ({found.feature} in /proc/cpuinfo)"))
    if isa_flags:
        facts.append(("compiler flag", isa_flags))
    if record is not None:
        facts.append(("bytes at the PC", record.at[:CODE_SHOWN].hex(" ")))
    facts.append(("features of the cores", " ".join(sorted(case.features)) or "not known"))
    facts += [("frame", str(frame)) for frame in case.frames]
    return Finding(
        NAME,
        headline=headline,
        sentence=f"{headline}; {why}",
        remedy=remedy,
        signal="SIGILL",
        code=case.code,
        op=case.op,
        frames=frame_keys(case),
        kind=kind,
        facts=tuple(facts),
    )
