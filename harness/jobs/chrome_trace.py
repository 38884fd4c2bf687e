"""A trace as Chrome's JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track for tokens and one for each part of the board. Source: Trace Event Format (Google, 2016):
complete events (`ph` X) and metadata (`ph` M); times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.jobs.op_times import Timeline, bytes_read

if TYPE_CHECKING:
    from harness.jobs.details import ProfileDetails

PROCESS = 1
TOKENS = 1  # the track of whole tokens; parts come behind it


def chrome_trace(
    name: str, program: Mapping[str, Any], line: Timeline, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The document. `program` is what the job told of its ops, `about` goes into `otherData`."""
    ops: Sequence[Mapping[str, Any]] = program["ops"]
    parts = sorted({str(op["part"]) for op in ops})
    tracks = {part: TOKENS + 1 + index for index, part in enumerate(parts)}
    events = [_meta("process_name", 0, name), _meta("thread_name", TOKENS, "tokens")]
    events += [_meta("thread_name", track, part) for part, track in tracks.items()]
    events += [
        {**_meta("thread_sort_index", track, ""), "args": {"sort_index": track}}
        for track in (TOKENS, *tracks.values())
    ]
    first = int(line.tokens[:, 2].min()) if len(line.tokens) else 0
    for number in np.argsort(line.tokens[:, 2], kind="stable"):
        _, position, start, end = (int(value) for value in line.tokens[number])
        what = f"token at {position}"
        events.append(_event(what, "token", TOKENS, start, end, first, {"position": position}))
    for number in np.argsort(line.rows[:, 2], kind="stable"):
        token, index, start, end = (int(value) for value in line.rows[number])
        op, position = ops[index], int(line.tokens[token, 1])
        size = bytes_read(op, float(program["kv_bytes"]), position)
        told: dict[str, Any] = {"kinds": "+".join(op["kinds"]), "bytes": size}
        if end > start:
            told["GB/s"] = round(size / (end - start), 3)
        track = tracks[str(op["part"])]
        events.append(_event(str(op["id"]), str(op["kinds"][-1]), track, start, end, first, told))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def typical_trace(
    name: str, details: ProfileDetails, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The same of what the store keeps of a profile: one typical token at each depth."""
    kv_layers = sum(op.kinds.split("+").count("attention") for op in details.ops)
    kv = details.kv_bytes_per_position / max(1, kv_layers)
    deep = details.depths[-1]
    ops = []
    for op in details.ops:
        kinds = op.kinds.split("+")
        attends = kinds.count("attention")
        weights = op.bytes - round(attends * kv * (deep.position + 1))
        told = {"id": op.op, "kinds": kinds, "part": op.part, "bytes": weights, "attends": attends}
        ops.append(told)
    tokens, rows, start = [], [], 0.0
    for index, (depth, spans) in enumerate(zip(details.depths, details.typical, strict=True)):
        last = max([1e3 * depth.traced_ms, *(begin + spent for _, begin, spent in spans)])
        tokens.append((index, depth.position, round(1e3 * start), round(1e3 * (start + last))))
        for op_index, begin, spent in spans:
            at = round(1e3 * (start + begin))
            rows.append((index, op_index, at, at + round(1e3 * spent)))
        start += 1.1 * last  # they were not neighbours
    line = Timeline(
        np.array(tokens, np.int64).reshape(-1, 4), np.array(rows, np.int64).reshape(-1, 4)
    )
    return chrome_trace(name, {"ops": ops, "kv_bytes": kv}, line, about)


def _meta(what: str, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": PROCESS, "tid": track, "args": {"name": name}}


def _event(
    name: str, category: str, track: int, start: int, end: int, first: int, told: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": (start - first) / 1e3,
        "dur": (end - start) / 1e3,
        "pid": PROCESS,
        "tid": track,
        "args": told,
    }
