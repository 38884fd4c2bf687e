"""The records that cross from a board to its host, and their one version.

A run is described by a `RunSpec` (host → board) and told by `Event`s (board → host, one JSON object
per line of `events.jsonl`). Everything in them is plain JSON; arrays travel beside them as `.npz`
files that an `array` event names by hash. Clocks: `t_ns` is the board's CLOCK_MONOTONIC in
nanoseconds; a board's wall clock is recorded once and never used for arithmetic.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from engine.options import EngineOptions

RECORD_VERSION = 1  # of events
# Of run specs; 2: engine options in place of a unit and a number of threads; 3: `stall_s`.
SPEC_VERSION = 3

# What an event may be. A reader refuses a kind that is not listed.
EVENT_KINDS = (
    "run-start",  # supervisor: run_id, boot_id, pid, pgid, wall_time_s, host facts of the run
    "engine-start",  # supervisor: attempt, pid
    "evidence",  # supervisor: what an engine that ended badly left (engine.evidence)
    "engine-exit",  # supervisor: attempt, code | signal, rusage, planned
    "sample",  # supervisor: one resource sample (engine.measure.sampler.Sample)
    "ready",  # engine: versions, unit, threads, package hash, seconds to load
    "progress",  # engine: done, total, message
    "data",  # engine: name, value (any JSON): one finding of the job, raw
    "array",  # engine: name, file (relative to the spool), sha256, bytes
    "error",  # engine or supervisor: kind, message, and where known step, layer, op
    "log",  # engine or supervisor: message; supervisor: stacks, of an engine that stands still
    "run-end",  # supervisor: status (finished | failed | cancelled | deadline | hung), reason
)


# What an event may hold: a board is not trusted, and whatever is let in here is stored and shown.
DEPTH_LIMIT = 64  # of lists and objects in each other
DIGITS_LIMIT = 20  # of a whole number: 64 bits and a sign
# An escape in JSON; of these, half of a surrogate pair and NUL are text that no store can hold.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(u[dD][89a-fA-F][0-9a-fA-F]{2}|u0000)|.)",
    re.DOTALL,
)


class RecordError(ValueError):
    """A record that this version cannot read: says found, expected and remedy."""


@dataclasses.dataclass(frozen=True)
class Restart:
    """The supervisor ends the engine `at_s` seconds into the run and starts it again."""

    at_s: float
    signal: str = "SIGKILL"
    reason: str = "planned restart"


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What one run on a board does. Paths are the board's own.

    `job` names a module of `engine.measure`; `parameters` belong to it. `options` say how the
    decoder runs: a mapping of engine.options.EngineOptions, what it leaves out being the unit's
    own default. `deadline_s`, `stall_s` and `sample_period_s` are seconds.
    """

    run_id: str
    job: str
    package: str | None
    package_sha256: str | None
    parameters: Mapping[str, Any]
    inputs: str | None = None  # one .npz with the job's arrays
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pin: tuple[int, ...] | None = None  # the CPUs to run on; None: all that are allowed
    seed: int = 0
    deadline_s: float = 3600.0
    stall_s: float | None = None  # without a word from the engine it is ended as hung; None: never
    sample_period_s: float = 1.0
    restarts: tuple[Restart, ...] = ()
    version: int = SPEC_VERSION

    @property
    def engine(self) -> EngineOptions:
        """`options` read and checked. Raises ValueError naming the field."""
        return EngineOptions.from_mapping(self.options)

    @property
    def unit(self) -> str:
        return self.engine.unit

    @property
    def threads(self) -> int | None:
        """None leaves the count to the engine."""
        return self.engine.threads

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> RunSpec:
        """Raises RecordError for JSON that is not a spec of this version, naming the field."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise RecordError(f"run spec is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise RecordError(f"run spec: found {type(raw).__name__}, expected an object")
        check_version("run spec", raw.get("version"), SPEC_VERSION)
        names = {field.name for field in dataclasses.fields(RunSpec)}
        unknown = sorted(set(raw) - names)
        if unknown:
            raise RecordError(
                f"run spec: unknown field {unknown[0]!r}, expected one of {sorted(names)}"
            )
        try:
            raw["restarts"] = tuple(Restart(**item) for item in raw.get("restarts") or ())
            raw["pin"] = None if raw.get("pin") is None else tuple(int(cpu) for cpu in raw["pin"])
            spec = RunSpec(**raw)
            if not isinstance(spec.options, dict):
                raise TypeError(f"options are {type(spec.options).__name__}, expected an object")
            EngineOptions.from_mapping(spec.options)
        except (TypeError, ValueError) as error:
            raise RecordError(f"run spec: {error}") from error
        return spec


@dataclasses.dataclass(frozen=True)
class Event:
    """One line of a spool. `n` counts from 0 without gaps; a reader can prove it lost nothing."""

    n: int
    t_ns: int
    kind: str
    data: Mapping[str, Any]

    def to_line(self) -> bytes:
        record = {"v": RECORD_VERSION, "n": self.n, "t_ns": self.t_ns, "kind": self.kind}
        return json.dumps({**record, "data": self.data}, separators=(",", ":")).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Event:
        """Raises RecordError for a line that is not an event of this version.

        What no store can hold (half a surrogate pair, NUL) becomes U+FFFD.
        """
        try:
            raw = _parse(line)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"event is not JSON: {error}; line begins {line[:80]!r}") from error
        if not isinstance(raw, dict):
            raise RecordError(f"event: found {type(raw).__name__}, expected an object")
        check_version("event", raw.get("v"), RECORD_VERSION)
        n, t_ns, kind, data = (raw.get(key) for key in ("n", "t_ns", "kind", "data"))
        if type(n) is not int or type(t_ns) is not int or n < 0 or abs(t_ns) >= 1 << 63:
            raise RecordError(f"event: n and t_ns must be whole numbers, found {n!r} and {t_ns!r}")
        if not isinstance(kind, str) or kind not in EVENT_KINDS:
            raise RecordError(f"event {n}: unknown kind {kind!r}, expected one of {EVENT_KINDS}")
        if not isinstance(data, dict):
            raise RecordError(f"event {n}: data is {type(data).__name__}, expected an object")
        return Event(n, t_ns, kind, data)


def _parse(line: bytes) -> Any:
    """`line` as JSON whose numbers, depth and text every reader can take. Raises ValueError."""
    text = line.decode("utf-8")
    if "\\u" in text:
        text = _ESCAPE.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
    raw = json.loads(text, parse_int=_whole)
    if text.count("[") + text.count("{") > DEPTH_LIMIT:
        _check_depth(raw)
    return raw


def _whole(digits: str) -> int:
    if len(digits) > DIGITS_LIMIT:
        raise ValueError(f"a whole number of {len(digits)} digits, at most {DIGITS_LIMIT}")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_LIMIT):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(f"more than {DEPTH_LIMIT} lists and objects in each other")


def check_version(what: str, found: object, known: int) -> None:
    """Raises RecordError unless `found` is the version `known` that this module writes."""
    if found != known:
        raise RecordError(
            f"{what}: version {found!r}, this side reads version {known}; "
            "deploy the engine of the same commit as the harness"
        )
