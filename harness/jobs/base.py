"""What every stage has in common: the plan it makes, the context it is given, its shape.

A stage is a module of this folder with an attribute `STAGE`. `plan` runs on the host before the
board does anything; `judge` is given what came back and is a pure function of it and of cached
reference outputs. Trouble with the link or the board is raised as a BoardError, never judged.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pydantic import Field

from engine.records import Restart, RunSpec
from harness.inventory.engine import Engine
from harness.jobs.engines import EngineChoice
from harness.jobs.memory import Extent, need_of, refusal
from harness.verdicts import Record, Verdict

if TYPE_CHECKING:
    from harness.boards.facts import Facts
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.jobs.runlog import RunLog


class BringupOptions(Record):
    """What a user chooses for a bring-up. None leaves the choice to the board or the stage."""

    stress_minutes: float | None = Field(default=None, gt=0)  # None: the board's own
    curve_lengths: tuple[int, ...] | None = None  # cache positions at which tokens are timed
    curve_seconds: float = Field(default=60.0, gt=0)  # points and tokens are chosen to fit
    # Designed context; None: the model's, ≤ 2,048. Shorter ones have no room for a curve.
    context: int | None = Field(default=None, ge=64)
    stress_context: int | None = Field(default=None, ge=32)  # None: grows with stress_minutes
    profile_seconds: float = Field(default=15.0, gt=0)  # of `harness profile`
    seed: int = Field(default=0, ge=0)
    accuracy_tokens: int = Field(default=200, ge=1)  # generated and compared with the reference
    accuracy_positions: int = Field(default=96, ge=16)  # teacher-forced, whose logits are compared
    accuracy_prompts: int = Field(default=1, ge=1, le=64)  # texts whose logits are compared
    accuracy_rows: int = Field(default=6, ge=3)  # of these, positions where every op is compared
    # An engine that says nothing for so long is ended as hung; None: the stage's own patience.
    stall_seconds: float | None = Field(default=None, gt=0)
    engine: Engine = Field(default_factory=Engine)  # goes before what a board's entry says


@dataclasses.dataclass(frozen=True)
class StageContext:
    """One stage on one board. `model` is `stage_model(stage, …)`: the tiny model for `tiny`."""

    board: Board
    facts: Facts
    model: PreparedModel
    options: BringupOptions
    run_id: str
    remote_package: str | None  # the model's package on the board
    cache: Path  # folder for this run's input files
    engine: EngineChoice


@dataclasses.dataclass(frozen=True)
class Plan:
    """`inputs` is an .npz on the host that must reach the board; its path there goes into the spec
    as `inputs`. `seconds_hint` is what the stage takes on a board at about 10 tokens/s."""

    spec: RunSpec
    inputs: Path | None
    seconds_hint: float


@runtime_checkable
class Stage(Protocol):
    """One step of a bring-up. `order` sorts stages; `needs_model` False: runs the tiny model;
    `timed`: its speed is judged, so that it runs in the threads that the board is best with."""

    name: str
    order: int
    needs_model: bool
    timed: bool

    def extent(self, context: StageContext) -> Extent:
        """What the memory budget is asked for, before anything is sent to the board."""
        ...

    def plan(self, context: StageContext) -> Plan: ...

    def judge(self, context: StageContext, log: RunLog) -> Verdict:
        """Raises BoardError when the log shows trouble of the board or the link instead."""
        ...


def stage_model(stage: Stage, model: PreparedModel, options: BringupOptions) -> PreparedModel:
    """The model whose package the stage runs: deploy this one, and pass it in the StageContext."""
    if stage.needs_model:
        return model
    from harness.deploy.models import prepare_tiny

    return prepare_tiny(options.seed)


def stage_refusal(stage: Stage, context: StageContext) -> Verdict | None:
    """Why the stage's model does not fit the board; None when it does.

    Raises BoardError "low-memory" when it only does not fit now.
    """
    wanted = need_of(context.model, context.engine.options, stage.extent(context))
    return refusal(context.board, context.facts, wanted)


def make_spec(
    context: StageContext,
    job: str,
    parameters: dict[str, object],
    *,
    deadline_s: float,
    stall_s: float,
    restarts: tuple[Restart, ...] = (),
    sample_period_s: float = 1.0,
) -> RunSpec:
    """A spec with what is the same for every stage: package, engine options, cores, seed.

    `stall_s`: the longest that the stage's engine is silent on the slowest board, with room.
    """
    return RunSpec(
        run_id=context.run_id,
        job=job,
        package=context.remote_package,
        package_sha256=context.model.sha256,
        parameters=parameters,
        options=context.engine.options.to_mapping(),
        pin=context.engine.pin,
        seed=context.options.seed,
        deadline_s=deadline_s,
        stall_s=context.options.stall_seconds or stall_s,
        restarts=restarts,
        sample_period_s=sample_period_s,
    )
