"""What a run has told, as it lies on the host: events, arrays, how it ended."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.records import Event, RecordError
from engine.spool import EVENTS_LIMIT, EVENTS_NAME, LINE_LIMIT, array_file
from harness.arrays import read_npz
from harness.deploy.cache import sha256_file
from harness.errors import HarnessError

if TYPE_CHECKING:
    import numpy.typing as npt

ARRAY_BYTES_LIMIT = 1 << 30  # of one array file that a board may announce
ARRAYS_BYTES_LIMIT = 8 << 30  # of all that a run announces; those of a restarted engine count again
ARRAYS_LIMIT = 20_000  # announcements of a run
EVENTS_NUMBER_LIMIT = 2_000_000  # of a run: a week of samples is a third of it
_LINE_SLACK = 1024  # what the supervisor adds to an engine's line
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class RunLog:
    """One run. `status` is that of its `run-end` event (finished, failed, cancelled, deadline), or
    "lost" or "board-reset" when it has none; `reason` says why it did not finish."""

    run_id: str
    events: list[Event]
    folder: Path
    status: str
    reason: str

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def all_data(self, name: str) -> list[Any]:
        """Every value that the job reported under `name`, in order."""
        return [e.data.get("value") for e in self.of_kind("data") if e.data.get("name") == name]

    def data(self, name: str) -> Any:
        """The last value under `name`. Raises HarnessError when the job reported none."""
        values = self.all_data(name)
        if not values:
            known = sorted({str(event.data.get("name")) for event in self.of_kind("data")})
            raise self._missing(f"data {name!r}", known)
        return values[-1]

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the last `array` event of that name, checked by hash, never unpickled."""
        found = [e for e in self.of_kind("array") if e.data.get("name") == name]
        if not found:
            known = sorted({str(event.data.get("name")) for event in self.of_kind("array")})
            raise self._missing(f"array {name!r}", known)
        reference = ArrayReference.of(found[-1])
        path = self.folder / reference.file
        if not path.is_file() or sha256_file(path) != reference.sha256:
            raise HarnessError(
                "it is missing or differs from the hash in its event",
                where=str(path),
                remedy="run the stage again",
            )
        return read_npz(path)

    def _missing(self, what: str, known: list[str]) -> HarnessError:
        return HarnessError(
            f"the run reported no {what}",
            where=f"run {self.run_id}",
            expected=f"one of {known}" if known else "the job to report it",
            remedy=f"it ended as {self.status!r}: {self.reason or 'no reason'}",
        )

    @property
    def samples(self) -> list[Mapping[str, Any]]:
        """Resource samples (engine.measure.sampler.Sample), each with its `t_ns` and `attempt`."""
        return [{"t_ns": event.t_ns, **event.data} for event in self.of_kind("sample")]

    @property
    def errors(self) -> list[Mapping[str, Any]]:
        return [event.data for event in self.of_kind("error")]

    @property
    def ready(self) -> Mapping[str, Any] | None:
        """What the newest engine process said of itself."""
        found = self.of_kind("ready")
        return found[-1].data if found else None

    @property
    def exits(self) -> list[Mapping[str, Any]]:
        return [event.data for event in self.of_kind("engine-exit")]


@dataclasses.dataclass(frozen=True)
class ArrayReference:
    """An `array` event whose every field has been checked: a board is not trusted with a path."""

    name: str
    file: str
    sha256: str
    bytes: int

    @staticmethod
    def of(event: Event) -> ArrayReference:
        """Raises RecordError."""
        name, file, digest, size = (
            event.data.get(key) for key in ("name", "file", "sha256", "bytes")
        )
        try:
            expected = array_file(str(name))
        except ValueError as error:
            raise RecordError(f"event {event.n}: {error}") from error
        if file != expected:
            raise RecordError(f"event {event.n}: array file {file!r}, expected {expected!r}")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise RecordError(f"event {event.n}: array hash {digest!r}, expected a SHA-256")
        if type(size) is not int or not 0 <= size <= ARRAY_BYTES_LIMIT:
            raise RecordError(
                f"event {event.n}: array of {size!r} bytes, at most {ARRAY_BYTES_LIMIT}"
            )
        return ArrayReference(str(name), expected, digest, size)


class EventTail:
    """The host's copy of events.jsonl: grows by whole, checked lines; resumes from what is there.

    `offset` is where the board's file goes on; `events` all events so far. Raises RecordError for
    bytes that are not the next events of this run.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path, self.run_id = path, run_id
        self.events: list[Event] = []
        self.offset = 0
        self._pending = b""
        self._announced = [0, 0]  # arrays, and their bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            known = file.read()
            # A harness that was killed may have written half of the last line.
            whole = known[: known.rfind(b"\n") + 1]
            for line in whole.splitlines():
                self._accept(line)
            file.truncate(len(whole))
        self.offset = len(whole)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].kind == "run-end"

    @property
    def unfinished(self) -> bytes:
        """The beginning of a line whose end has not been seen."""
        return self._pending

    def feed(self, data: bytes) -> list[Event]:
        """Take the bytes at `offset`; the events that they complete."""
        self.offset += len(data)
        if self.offset > EVENTS_LIMIT + LINE_LIMIT + _LINE_SLACK:
            raise RecordError(f"{EVENTS_NAME} is longer than {EVENTS_LIMIT} bytes")
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > LINE_LIMIT + _LINE_SLACK:
            raise RecordError(f"an event line of more than {LINE_LIMIT} bytes")
        new = []
        with self.path.open("ab") as file:
            for line in lines:
                new.append(self._accept(line))
                file.write(line + b"\n")
        return new

    def _accept(self, line: bytes) -> Event:
        if len(line) > LINE_LIMIT + _LINE_SLACK:
            raise RecordError(f"an event line of {len(line)} bytes, at most {LINE_LIMIT}")
        event = Event.from_line(line)
        if event.n != len(self.events):
            raise RecordError(f"event number {event.n}, expected {len(self.events)}")
        if event.n >= EVENTS_NUMBER_LIMIT:
            raise RecordError(f"more than {EVENTS_NUMBER_LIMIT} events")
        if self.ended:
            raise RecordError(f"event {event.n} ({event.kind}) after the end of the run")
        if event.n == 0 and (event.kind, event.data.get("run_id")) != ("run-start", self.run_id):
            raise RecordError(
                f"the spool begins with {event.kind} of run {event.data.get('run_id')!r}, "
                f"expected run-start of {self.run_id!r}"
            )
        if event.kind == "array":
            self._count(ArrayReference.of(event))
        self.events.append(event)
        return event

    def _count(self, reference: ArrayReference) -> None:
        """A board must not fill the host's disk, one allowed file after the other."""
        self._announced[0] += 1
        self._announced[1] += reference.bytes
        if self._announced[0] > ARRAYS_LIMIT or self._announced[1] > ARRAYS_BYTES_LIMIT:
            raise RecordError(
                f"{self._announced[0]} arrays of {self._announced[1]} bytes announced, at most "
                f"{ARRAYS_LIMIT} of {ARRAYS_BYTES_LIMIT}"
            )
