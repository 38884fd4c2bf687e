"""A trace as Chrome's JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track for tokens and one for each part of the board. Source: Trace Event Format (Google, 2016):
complete events (`ph` X) and metadata (`ph` M); times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness.jobs.op_times import Timeline, bytes_read

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
