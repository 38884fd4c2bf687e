"""What makes two crashes the same one: class, signal and code, op, own frames, fault."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from harness.verdicts import CrashNote

if TYPE_CHECKING:
    from harness.triage.case import Case
    from harness.triage.finding import Finding

FRAMES = 3


def note_of(case: Case, found: Finding) -> CrashNote:
    """The note of a finding."""
    text = signature(found)
    more = [
        text,
        *map(str, case.frames),
        str(case.ready.get("model", "")),
        str(sorted((case.ready.get("engine") or {}).items())),
    ]
    return CrashNote(
        name=found.name,
        signature=text,
        hash=_hash(text),
        finer=_hash("\n".join(more)),
        headline=found.headline[:400],
        sentence=found.sentence[:4000],
        remedy=found.remedy[:1000],
        op=found.op[:200],
        facts=tuple((name[:80], text[:1000]) for name, text in found.facts[:40]),
    )


def signature(found: Finding) -> str:
    """class | signal and code | op | own frames | mnemonic or kind of fault, of bounded length."""
    signal = " ".join(filter(None, (found.signal, found.code)))
    frames = " < ".join(found.frames[:FRAMES])
    parts = (found.name, signal, found.op[:100], frames[:700], found.kind[:100])
    return " | ".join(part or "-" for part in parts)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
