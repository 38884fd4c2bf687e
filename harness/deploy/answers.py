"""What on_board.py may answer. A board is not trusted: each answer is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

BYTES_LIMIT = 1 << 20  # of one answer
_Text = Annotated[str, Field(max_length=4096)]  # a path, or the reason of something
_Size = Annotated[int, Field(ge=0, lt=1 << 63)]  # bytes
_Pid = Annotated[int, Field(gt=0, lt=1 << 32)]


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Trial(_Answer):
    status: Annotated[int, Field(ge=0, lt=1 << 16)]
    said: _Text


class Surveyed(_Answer):
    root: _Text | None
    have: Annotated[list[_Text], Field(max_length=1000)]
    refused: Annotated[list[tuple[_Text, _Text]], Field(max_length=1000)]
    short: Annotated[list[tuple[_Text, _Size, _Size]], Field(max_length=1000)]
    trial: Trial | None = None


class Installed(_Answer):
    error: _Text | None = None
    pruned: Annotated[list[_Text], Field(max_length=10_000)] = []
    trial: Trial | None = None


class Discarded(_Answer):
    free: _Size


class Stopped(_Answer):
    alive: bool


class Cleaned(_Answer):
    left: Annotated[list[_Text], Field(max_length=10_000)]


class Run(_Answer):
    run_id: _Text
    spool: _Text
    pids: Annotated[list[_Pid], Field(max_length=10_000)]
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class Runs(_Answer):
    runs: Annotated[list[Run], Field(max_length=1000)]


ANSWERS: Mapping[str, type[_Answer]] = {
    "survey": Surveyed,
    "install": Installed,
    "discard": Discarded,
    "stop": Stopped,
    "clean": Cleaned,
    "runs": Runs,
}


def parse_answer(do: str, raw: bytes) -> dict[str, Any]:
    """The answer to request `do`, checked. Raises ValueError saying what is wrong with it."""
    try:
        # As JSON, in which a list may stand for a tuple. Numbers stay numbers: nothing is guessed.
        answer = ANSWERS[do].model_validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None
    checked: dict[str, Any] = json.loads(answer.model_dump_json(exclude_unset=True))
    return checked
