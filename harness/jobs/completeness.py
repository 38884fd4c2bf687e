"""What came back of the accuracy job, checked before anything is computed from it.

A board that sends less than it was asked for must not pass for what it left out, and an array of
another shape must not break the judgement. What is missing makes the run INVALID, what has the
wrong shape makes it FAIL. A run that stopped at bad numbers may be shorter: that is told as such.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.jobs import failures
from harness.verdicts import Check, Outcome

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Told = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What the job was asked for: N positions of V logits; P rows of every op alone and free, and
    T of every op in a prefill (0: none); a text of at most `max_new` tokens."""

    positions: int
    vocab: int
    rows: int
    prefill_rows: int
    reference: Mapping[str, Array]  # (P, …) of every buffer
    repeats: int
    max_new: int
    stop_ids: Collection[int]
    passages: int = 0  # further texts of as many positions


@dataclasses.dataclass
class Returned:
    """What is usable of a run. `missing` and `wrong` are sentences about the rest.

    Arrays are numeric with at least one dimension, `logits` is (≤ N, V), `tokens` are within the
    vocabulary; op outputs may still have the wrong size, which compare_op tells.
    """

    local: Arrays = dataclasses.field(default_factory=dict)
    prefill: Arrays = dataclasses.field(default_factory=dict)
    free: Arrays = dataclasses.field(default_factory=dict)
    logits: Array = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.float16))
    hashes: tuple[str, ...] = ()
    steps: int = 0
    taps: tuple[str, str] = ("", "")  # hashes with and without
    disturbed: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    finish: str = "untold"
    free_stopped: Told | None = None  # where the teacher-forced run met bad numbers
    text_stopped: Told | None = None
    passages: list[Array] = dataclasses.field(default_factory=list)  # each (≤ N, V)
    # Of the same steps with one op after the other; asked for only where `hashes` differ.
    hashes_in_order: tuple[str, ...] = ()
    missing: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> Check:
        found = [*self.wrong, *self.missing]
        outcome = Outcome.FAIL if self.wrong else Outcome.INVALID if found else Outcome.PASS
        sentence = "Everything that was asked for came back."
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            sentence = f"The board did not send what it was asked for: {found[0]}{more}."
        return Check(
            name="complete", outcome=outcome, measured=len(found), limit=0, unit="gaps",
            sentence=sentence,
        )  # fmt: skip


def gather(log: RunLog, wanted: Wanted) -> Returned:
    """Raises HarnessError for an array file that is damaged; never for one that is wrong."""
    back = Returned()
    _repeat(back, _told(log, back, "repeat"), wanted)
    in_order = log.all_data("repeat_in_order")
    if in_order and isinstance(in_order[-1], Mapping):
        back.hashes_in_order = tuple(_names(in_order[-1].get("hashes")))
    taps = _told(log, back, "taps")
    back.taps = (str(taps.get("with") or ""), str(taps.get("without") or ""))
    if taps and not all(back.taps):
        back.missing.append("a hash of the run with or without taps")
    back.free_stopped = _stop(_told(log, back, "free").get("stopped"))
    stopped = back.free_stopped is not None
    back.free = _buffers(log, back, "free", wanted.rows, wanted.reference, shorter=stopped)
    back.local = _buffers(log, back, "local", wanted.rows, wanted.reference)
    disturbed = _names(_told(log, back, "local").get("disturbed"))
    if wanted.prefill_rows:
        back.prefill = _buffers(log, back, "prefill", wanted.prefill_rows, wanted.reference)
        disturbed += _names(_told(log, back, "prefill").get("disturbed"))
    back.disturbed = tuple(dict.fromkeys(disturbed))
    back.logits = _logits(log, back, "logits", wanted, shorter=stopped)
    told = [item for item in log.all_data("passage") if isinstance(item, Mapping)]
    for number in range(wanted.passages):
        ended = number < len(told) and _stop(told[number].get("stopped")) is not None
        logits = _logits(log, back, f"passage_{number}", wanted, shorter=ended)
        back.passages.append(logits)
    _text(back, _told(log, back, "text"), wanted)
    return back


def _told(log: RunLog, back: Returned, name: str) -> Told:
    """The last value under `name`; {} and a gap when there is none."""
    values = log.all_data(name)
    if values and isinstance(values[-1], Mapping):
        return values[-1]
    back.missing.append(f"nothing was told about {name!r}")
    return {}


def _stop(value: Any) -> Told | None:
    return value if isinstance(value, Mapping) else None


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _repeat(back: Returned, told: Told, wanted: Wanted) -> None:
    back.hashes, steps = tuple(_names(told.get("hashes"))), told.get("steps")
    back.steps = steps if isinstance(steps, int) else 0
    if told and len(back.hashes) != wanted.repeats:
        back.missing.append(f"{len(back.hashes)} of {wanted.repeats} repetitions")


def _arrays(log: RunLog, back: Returned, name: str) -> Arrays:
    """The numeric arrays of a set; empty when it was not sent."""
    if name not in {str(data.get("name")) for data in failures.of_kind(log, "array")}:
        return {}
    try:
        sent = log.arrays(name)
    except (ValueError, zipfile.BadZipFile) as error:
        back.wrong.append(f"the file of {name} holds no plain arrays ({error})")
        return {}
    found = {}
    for key, array in sent.items():
        if array.dtype.kind in "fiu" and array.ndim:
            found[key] = array
        else:
            back.wrong.append(f"{name} {key} is {array.dtype} of shape {array.shape}")
    return found


def _buffers(
    log: RunLog,
    back: Returned,
    name: str,
    rows: int,
    reference: Mapping[str, Array],
    *,
    shorter: bool = False,
) -> Arrays:
    """One set of op outputs, each (rows, …) of the reference's size. `shorter`: the run stopped, so
    rows and whole buffers may be left out."""
    found = _arrays(log, back, name)
    absent, short = [], []
    for key, want in reference.items():
        got = found.get(key)
        if got is None:
            absent.append(key)
            continue
        size, expected = math.prod(got.shape[1:]), math.prod(want.shape[1:])
        if size != expected or len(got) > rows:
            back.wrong.append(
                f"{name} {key} has {len(got)} rows of {size} values, expected {rows} of {expected}"
            )
        elif len(got) < rows:
            short.append(key)
    if absent and not shorter:
        back.missing.append(
            f"{len(absent)} of {len(reference)} outputs of the {name} run, first {absent[0]}"
        )
    if short and not shorter:
        back.missing.append(
            f"rows of {len(short)} outputs of the {name} run: of {short[0]} there are "
            f"{len(found[short[0]])} of {rows}"
        )
    return found


def _logits(log: RunLog, back: Returned, name: str, wanted: Wanted, *, shorter: bool) -> Array:
    nothing: Array = np.zeros((0, wanted.vocab), np.float16)
    logits = _arrays(log, back, name).get("shifted", nothing)
    if logits.shape[1:] != (wanted.vocab,) or len(logits) > wanted.positions:
        back.wrong.append(
            f"{name}: the logits have shape {logits.shape}, "
            f"expected {(wanted.positions, wanted.vocab)}"
        )
        return nothing
    if len(logits) < wanted.positions and not shorter:
        back.missing.append(f"{name}: logits of {len(logits)} of {wanted.positions} positions")
    return logits


def _text(back: Returned, told: Told, wanted: Wanted) -> None:
    back.finish, back.text_stopped = str(told.get("finish", "untold")), _stop(told.get("stopped"))
    tokens: Sequence[Any] = told.get("tokens") or []
    if not isinstance(tokens, list) or any(
        type(token) is not int or not 0 <= token < wanted.vocab for token in tokens
    ):
        back.wrong.append(f"the text holds something that is no token below {wanted.vocab}")
        return
    if len(tokens) > wanted.max_new:
        back.wrong.append(f"a text of {len(tokens)} tokens, at most {wanted.max_new} were wanted")
        tokens = tokens[: wanted.max_new]
    back.tokens = tuple(tokens)
    ended = len(tokens) == wanted.max_new or (bool(tokens) and tokens[-1] in wanted.stop_ids)
    if told and not ended and back.text_stopped is None:
        back.missing.append(f"{len(tokens)} of {wanted.max_new} tokens of the text")
