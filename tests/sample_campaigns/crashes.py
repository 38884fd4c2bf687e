"""Runs that ended in a crash, as the harness records them."""

from __future__ import annotations

from harness.store import Store
from harness.store.crashes import Crashes
from harness.verdicts import CrashNote, Outcome, Verdict

from .recorder import HOSTILE, Recorder
from .verdicts import facts


def crash_verdict(hash_: str, text: str = "") -> Verdict:
    """A write out of bounds; `text` is in everything that a board says of it."""
    note = CrashNote(
        name="out-of-bounds",
        signature=f"out-of-bounds | SIGSEGV | - | - | overrun{text}",
        hash=hash_,
        finer="f" * 16,
        headline=f"a write beyond the heap{text}",
        sentence=f"it touched memory that is not its own{text}",
        remedy="run it with `--asan`",
        op=f"L01.ffn.down{text}"[:100],
        facts=((f"frame{text}"[:80], f"linear+0x40{text}"),),
    )
    return Verdict(outcome=Outcome.FAIL, headline="it died", crash=note)


def record_crashes(store: Store) -> None:
    """Two boards that die of the same fault; one of them also of another, in hostile words."""
    book = Recorder(store)
    book.campaign("harness", "bringup", "--tag", "crashing")
    for name in ("zero-06", "zero-07"):
        book.board(name, host=f"{name}.lab", facts=facts())
    first = book.run("zero-06", "curve", crash_verdict("a" * 16), known=facts())
    book.run("zero-07", "curve", crash_verdict("a" * 16), known=facts())
    book.run("zero-07", "stress", crash_verdict("b" * 16, HOSTILE), known=facts())
    found = {
        "command": f"harness triage {first[:8]} --again 5",
        "rate": "5 of 5",
        "words": "1 token",
    }
    Crashes(store).keep_reproducer(first, found)
    book.finish(Outcome.FAIL)
