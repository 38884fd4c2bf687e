"""Everything that one run left of its end, read once: what the classes of crashes look at."""

from __future__ import annotations

import dataclasses
import functools
import re
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError
from harness.triage.kernel import Note, of_process, parse_lines
from harness.triage.output import (
    FatalPython,
    PythonThread,
    SanitizerReport,
    parse_fatal,
    parse_sanitizer,
    parse_threads,
)
from harness.triage.record import CrashRecord, code_name, parse_record
from harness.triage.symbols import ANCHOR, Frame, Symbols, find_library, symbols_of

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

LOG_BYTES = 4 << 20  # of an engine's log that is read
COMM = "python3"


@dataclasses.dataclass(frozen=True)
class Case:
    """One run's end. `facts` are the board's (harness.boards.facts.Facts as plain JSON)."""

    log: RunLog
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    # --- how it ended ---------------------------------------------------------------------------

    @functools.cached_property
    def exit(self) -> Mapping[str, Any]:
        """The exit that is looked into: the first that nobody planned and that was not clean."""
        exits = self.log.exits
        for data in exits:
            if data.get("planned") or data.get("ended_by") == "supervisor":
                continue
            if data.get("signal") or data.get("code"):
                return data
        return exits[-1] if exits else {}

    @property
    def own_exit(self) -> bool:
        """The engine ended so by itself, or by something else than the supervisor."""
        found = self.exit
        clean = not (found.get("signal") or found.get("code"))
        return not (clean or found.get("planned") or found.get("ended_by") == "supervisor")

    @property
    def signal(self) -> str:
        """ "SIGILL"; "" when no signal ended it.

        What the dying process wrote down comes before what it was seen to end by: while one thread
        tells of its end, another may meet its own, and an emulator ends by SIGSEGV then.
        """
        if not self.own_exit or not self.exit.get("signal"):
            return ""
        of_it = self.evidence.get("attempt") == self.exit.get("attempt")
        if self.record is not None and of_it:
            return signal_name(self.record.signal)
        return signal_name(self.exit["signal"])

    @functools.cached_property
    def error(self) -> Mapping[str, Any]:
        """The first error that the engine told."""
        return next(iter(self.log.errors), {})

    @functools.cached_property
    def ready(self) -> Mapping[str, Any]:
        """What the engine said of itself, {} if it never got so far."""
        return self.log.ready or {}

    # --- evidence -------------------------------------------------------------------------------

    @functools.cached_property
    def evidence(self) -> Mapping[str, Any]:
        """What the supervisor gathered for that exit."""
        found = [event.data for event in self.log.of_kind("evidence")]
        attempt = self.exit.get("attempt")
        same = [data for data in found if data.get("attempt") == attempt]
        return (same or found or [{}])[-1]

    @functools.cached_property
    def record(self) -> CrashRecord | None:
        text = self.evidence.get("record")
        return parse_record(text) if isinstance(text, str) else None

    @functools.cached_property
    def pids(self) -> frozenset[int]:
        """The engine's process numbers."""
        found = [self.exit.get("pid"), self.evidence.get("pid")]
        if self.record is not None:
            found += [self.record.process, self.record.thread]
        return frozenset(pid for pid in found if type(pid) is int and pid > 0)

    @functools.cached_property
    def all_notes(self) -> tuple[Note, ...]:
        """Every line of the board's logs that says something of the kind, about whomever."""
        lines: list[str] = []
        for name in ("kernel", "journal"):
            part = self.evidence.get(name)
            told = part.get("lines") if isinstance(part, Mapping) else None
            if isinstance(told, (list, tuple)):
                lines += [line for line in told if isinstance(line, str)]
        lines += self._said()
        return tuple(dict.fromkeys(parse_lines(lines)))

    @functools.cached_property
    def notes(self) -> tuple[Note, ...]:
        """Those about this engine."""
        nested = bool(self.evidence.get("own_pid_namespace")) or not self.pids
        return of_process(self.all_notes, self.pids, COMM, nested=nested)

    def _said(self) -> list[str]:
        """Lines of logs that other events carry."""
        found: list[str] = []
        for event in self.log.events:
            if event.kind in ("log", "engine-exit", "run-end"):
                found += texts(event.data)
        return found

    def note(self, *kinds: str) -> Note | None:
        """The last one of a kind."""
        found = [note for note in self.notes if note.kind in kinds]
        return found[-1] if found else None

    # --- what it printed ------------------------------------------------------------------------

    @functools.cached_property
    def output(self) -> str:
        """The engine's own output, with its errors."""
        attempt = self.exit.get("attempt")
        folder = self.log.folder
        paths = sorted(folder.glob("engine.*.log")) if folder.is_dir() else []
        wanted = [path for path in paths if path.name == f"engine.{attempt}.log"] or paths[-1:]
        if wanted:
            with wanted[-1].open("rb") as file:
                return file.read(LOG_BYTES).decode(errors="replace")
        for data in reversed(self.log.exits):
            for key in ("log_tail", "tail", "output_tail"):
                if data.get(key):
                    return str(data[key])
        return ""

    @functools.cached_property
    def fatal(self) -> FatalPython | None:
        return parse_fatal(self.output)

    @functools.cached_property
    def sanitizer(self) -> SanitizerReport | None:
        return parse_sanitizer(self.output)

    @functools.cached_property
    def stacks(self) -> str:
        """Where the engine stood when the supervisor looked; "" if it did not."""
        found = [e.data["stacks"] for e in self.log.of_kind("log") if e.data.get("stacks")]
        return str(found[-1]) if found else ""

    @functools.cached_property
    def threads(self) -> tuple[PythonThread, ...]:
        """The Python stacks of a crash, or of a look at an engine that stood still."""
        return self.fatal.threads if self.fatal is not None else parse_threads(self.stacks)

    # --- machine code ---------------------------------------------------------------------------

    @property
    def machine(self) -> str:
        if self.record is not None and self.record.machine:
            return self.record.machine
        return str(self.facts.get("machine") or "")

    @functools.cached_property
    def native(self) -> Mapping[str, Any]:
        """What the native unit said: isa, missing, features."""
        found = self.ready.get("native")
        return found if isinstance(found, Mapping) else {}

    @functools.cached_property
    def features(self) -> frozenset[str]:
        """Of the board's cores, by the engine's own word, else by the probe's."""
        told = self.native.get("features")
        if isinstance(told, (list, tuple)) and told:
            return frozenset(str(name) for name in told)
        cores = [
            core.get("features")
            for core in self.facts.get("cpus") or ()
            if isinstance(core, Mapping)
        ]
        sets = [frozenset(map(str, found)) for found in cores if found]
        return frozenset.intersection(*sets) if sets else frozenset()

    @functools.cached_property
    def symbols(self) -> Symbols | None:
        """Of the library that ran, where this host still has it."""
        path = find_library(self.record.build) if self.record is not None else None
        try:
            return symbols_of(path) if path is not None else None
        except HarnessError:
            return None

    @functools.cached_property
    def bias(self) -> int | None:
        """Where the library was loaded, less where it was linked."""
        if self.record is None or self.record.anchor is None or self.symbols is None:
            return None
        at = self.symbols.address(ANCHOR)
        return None if at is None else self.record.anchor - at

    @functools.cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The innermost frames that are ours, of machine code; () when there are none."""
        record, symbols, bias = self.record, self.symbols, self.bias
        if record is None or record.pc is None or symbols is None or bias is None:
            return ()
        return symbols.unwind(record.registers, record.pc, record.stack, bias)

    @property
    def code(self) -> str:
        """ "ILL_ILLOPC"; "" without a record."""
        return code_name(self.record.signal, self.record.code) if self.record is not None else ""

    @property
    def op(self) -> str:
        """The op at hand, as far as somebody said so."""
        if self.record is not None and self.record.op:
            return self.record.op
        return str(self.error.get("op") or "")

    def python_frames(self) -> tuple[str, ...]:
        """The innermost Python frames of the thread that the signal came to."""
        current = [thread for thread in self.threads if thread.current] or self.threads[-1:]
        return tuple(str(frame) for frame in current[0].frames[:3]) if current else ()


def signal_name(value: object) -> str:
    """SIGSEGV for 11 or "SIGSEGV" or "11"; "signal 77" for one without a name."""
    text = str(value)
    if text.isdigit():
        try:
            return signal.Signals(int(text)).name
        except ValueError:
            return f"signal {text}"
    return text if text.startswith("SIG") or re.match(r"signal \d", text) else f"SIG{text}"


def texts(value: Any) -> list[str]:
    """Every line of text in a JSON value."""
    if isinstance(value, str):
        return value.splitlines()
    if isinstance(value, Mapping):
        return [line for item in value.values() for line in texts(item)]
    if isinstance(value, (list, tuple)):
        return [line for item in value for line in texts(item)]
    return []


def memory_trend(samples: Sequence[Mapping[str, Any]]) -> str:
    """One sentence about resident memory before the end."""
    rss = [float(data["rss_mb"]) for data in samples if data.get("rss_mb")]
    free = [float(data["mem_available_mb"]) for data in samples if data.get("mem_available_mb")]
    if not rss:
        return "no memory samples"
    text = f"resident memory went from {rss[0]:.0f} to {rss[-1]:.0f} MB (peak {max(rss):.0f})"
    return text + (f", {free[-1]:.0f} MB were available last" if free else "")
