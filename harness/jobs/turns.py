"""The dialogues of a stress run, read from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.jobs.details import StressTurn
from harness.jobs.validity import run_start_ns

if TYPE_CHECKING:
    from harness.jobs.runlog import RunLog

Floats = npt.NDArray[np.float64]


def read_turns(log: RunLog) -> tuple[tuple[StressTurn, ...], list[Mapping[str, Any]]]:
    """All turns in order, conversations numbered across attempts, and the raw ones that ended.

    A turn that began and never ended is the one in which its engine was killed.
    """
    numbers: dict[tuple[int, int], int] = {}
    turns: list[StressTurn] = []
    ended: list[Mapping[str, Any]] = []
    open_turn: Mapping[str, Any] | None = None

    def add(told: Mapping[str, Any], finish: str) -> None:
        key = (int(told["attempt"]), int(told["conversation"]))
        tpot = told.get("tpot_s")
        turns.append(
            StressTurn(
                conversation=numbers.setdefault(key, len(numbers)),
                turn=int(told["turn"]),
                attempt=int(told["attempt"]),
                prompt_tokens=int(told["prompt_tokens"]),
                new_tokens=int(told.get("new_tokens", 0)),
                cached_tokens=int(told.get("cached_tokens", 0)),
                finish=finish,
                started_s=float(told["started_s"]),
                ttft_s=told.get("ttft_s"),
                tpot_ms=None if tpot is None else 1e3 * float(tpot),
            )
        )

    for event in log.of_kind("data"):
        name, value = event.data.get("name"), event.data.get("value")
        if not isinstance(value, Mapping):
            continue
        if name == "turn-start":
            if open_turn is not None:
                add(open_turn, "killed")
            open_turn = value
        elif name == "turn":
            add(value, str(value["finish"]))
            ended.append(value)
            open_turn = None
    if open_turn is not None:
        add(open_turn, "killed")
    return tuple(turns), ended


def token_times(log: RunLog) -> Floats:
    """(n,) seconds since the run began at which each token was chosen."""
    start_ns = run_start_ns(log)
    times = [
        (int(turn["start_ns"]) - start_ns) / 1e9 + np.asarray(turn["token_us"], np.float64) / 1e6
        for turn in log.all_data("turn")
        if turn.get("token_us")
    ]
    return np.concatenate(times) if times else np.zeros(0)


def inter_token_ms(told: Sequence[Mapping[str, Any]]) -> Floats:
    """(n,) gaps between tokens of one answer; what lies between answers is no latency."""
    gaps = [np.diff(np.asarray(turn["token_us"], np.float64)) / 1e3 for turn in told]
    return np.concatenate(gaps) if gaps else np.zeros(0)
