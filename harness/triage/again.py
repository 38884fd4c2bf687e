"""A crash seen again on its board: as it was, made smaller, or over a sanitised build."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.options import EngineOptions
from harness.bisect.trials import Result, Trial
from harness.errors import HarnessError
from harness.farm import deployed
from harness.farm.decoding import DecodeSession
from harness.farm.runner import stop_virtual_boards
from harness.inventory.engine import Engine
from harness.jobs import prompts
from harness.triage.judging import crash_of
from harness.triage.shrinking import Recipe, Shrinker
from harness.verdicts import CrashNote

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel
    from harness.inventory import Board
    from harness.jobs.runlog import RunLog
    from harness.store import RunRow, Store

JOB = "reproduce"
TOKENS, NEW = 48, 8  # of the first recipe
RUN_S = 180.0  # one run; what hangs is ended by then
STALL_S = 60.0

Tell = Callable[[str], None]


@contextlib.contextmanager
def on_board(
    board: Board,
    model: PreparedModel,
    store: Store,
    reason: str,
    *,
    options: Mapping[str, Any] | None = None,
    sanitize: str | None = None,
) -> Iterator[DecodeSession]:
    """The board with engine and model on it, leased for as long as it lasts; ended and released
    afterwards. `options`: fields of EngineOptions. Raises HarnessError."""
    asked = Engine.model_validate(_asked(options or {}))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="harness-again-") as folder,
            deployed.on_board(board, model, asked, store, reason, sanitize=sanitize) as there,
        ):
            yield DecodeSession(there, Path(folder))
    finally:
        stop_virtual_boards(store, [board])


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what is built and packed: the unit, and the kernels that were asked for."""
    return {name: options[name] for name in ("unit", "kernels") if options.get(name)}


def first_recipe(row: RunRow, model: PreparedModel) -> Recipe:
    """A plain generation with the engine options of a run."""
    told = (row.engine or {}).get("engine")
    if not isinstance(told, Mapping):
        raise HarnessError(
            f"run {row.id[:8]} does not say how its engine ran",
            expected="a run whose engine was ready before it ended",
            remedy="what ends it is the loading of the model: start it by hand on the board",
        )
    options = EngineOptions.from_mapping(told).to_mapping()
    found = prompts.tokenizer(model)
    vocab = model.hyperparameters.vocab
    tokens = [int(token) for token in found.encode(prompts.TEXT)] if found is not None else []
    tokens = tokens[:TOKENS] or [(7 * number + 3) % vocab for number in range(TOKENS)]
    return Recipe.of(
        {"tokens": tokens, "max_new": NEW, "layers": None, "piece": None, "options": options}
    )


def attempt(session: DecodeSession, recipe: Recipe) -> RunLog:
    """One run of a recipe, however it ends. Raises BoardError when the board does."""
    parameters = recipe.to_json()
    options = parameters.pop("options")
    parameters["context"] = min(
        len(recipe.tokens) + recipe.max_new + 1, session.deployed.model.hyperparameters.context
    )
    parameters = {name: value for name, value in parameters.items() if value is not None}
    return session.attempt(JOB, parameters, timeout_s=RUN_S, stall_s=STALL_S, engine=options)


def crash_in(session: DecodeSession, log: RunLog) -> CrashNote | None:
    return crash_of(log, session.deployed.facts.model_dump(mode="json"))


def alike(note: CrashNote | None, wanted: CrashNote) -> bool:
    """Whether a first run shows the crash that was seen in another job: of the same class, by the
    same signal, with the same instruction or kind of fault. Op and place may be another job's."""
    if note is None:
        return False
    return _essence(note) == _essence(wanted)


def _essence(note: CrashNote) -> tuple[str, ...]:
    parts = note.signature.split(" | ")
    return (parts[0], parts[1], parts[-1])


def minimise(
    session: DecodeSession,
    first: Recipe,
    wanted: CrashNote,
    tell: Tell,
    *,
    told: Sequence[Trial] = (),
    keep: Callable[[Trial], None] = lambda trial: None,
) -> tuple[Shrinker, CrashNote | None]:
    """Shrinks a recipe on a board; the search and the crash that it kept (None: not seen again).

    Each trial is given to `keep` as it is made; `told` are those of the same search before.
    """
    shrinker = Shrinker(first, session.deployed.model.hyperparameters.layers)
    kept: CrashNote | None = None
    runs = 0
    for trial in told:
        kept = kept or _note_in(trial)
        shrinker.tell(trial.result is Result.FAIL)
        runs += 1
    while (recipe := shrinker.ask()) is not None:
        runs += 1
        note = crash_in(session, attempt(session, recipe))
        first_seen = kept is None and alike(note, wanted)
        kept = note if first_seen else kept
        came = note is not None and kept is not None and note.hash == kept.hash
        failed = Result.FAIL if came else Result.OTHER
        keep(
            Trial(
                phase="shrink",
                subject=recipe.to_json(),
                result=Result.PASS if note is None else failed,
                signature=None if note is None else note.signature,
                evidence={"note": note.model_dump(mode="json")} if first_seen and note else {},
            )
        )
        tell(f"run {runs}: {recipe}: {'the crash' if came else 'no such crash'}")
        shrinker.tell(came)
    return shrinker, kept


def _note_in(trial: Trial) -> CrashNote | None:
    found = trial.evidence.get("note")
    return CrashNote.model_validate(found) if found else None
