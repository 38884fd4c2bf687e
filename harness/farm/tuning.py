"""What a board runs best with: looked up, or measured once before its first timed stage."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from harness.jobs.engines import NATIVE, Tuned, asked_of, open_to_measurement
from harness.jobs.ladder import LADDER

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.boards.facts import Facts
    from harness.farm.board import BoardRun
    from harness.farm.placing import Placed
    from harness.inventory import Board
    from harness.inventory.engine import Engine

# Of the facts, what changes how fast so many threads are.
_FACTS = ("machine", "kernel", "model", "cpus", "governor")


def facts_hash(facts: Facts) -> str:
    """Of the board's cores and what governs them; the same after a reboot."""
    told = facts.model_dump(mode="json", include=set(_FACTS))
    return _hash(told)


def tuning_key(
    placed: Placed, board: Board, model_hash: str, options: EngineOptions, asked: Engine
) -> str:
    """Names everything that a ladder depends on. `options` are those without its result."""
    return _hash(
        {
            "engine": placed.engine_hash,
            "native": placed.native.hash if placed.native is not None else None,
            "facts": facts_hash(placed.facts),
            "model": model_hash,
            "options": options.to_mapping(),
            "pin": board.pin,
            "asked": asked.model_dump(mode="json", include={"kv_layout", "huge_pages", "threads"}),
        }
    )


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Tuning:
    """One board's part in a campaign: `found` is what it runs best with, once that is known."""

    def __init__(self, run: BoardRun) -> None:
        self.run = run
        self.found: Tuned | None = None
        self._asked_for = False

    @property
    def wanted(self) -> bool:
        """Whether something is left to the board. The numpy units have one thread wherever they
        run, so they have nothing to find."""
        asked = asked_of(self.run.board, self.run.orders.options.engine)
        native = self.run.untuned.options.unit == NATIVE
        return native and open_to_measurement(self.run.board, asked)

    def key(self) -> str:
        """Of the present engine, model and board."""
        run = self.run
        asked = asked_of(run.board, run.orders.options.engine)
        model = run.model_for(LADDER, run.untuned)
        return tuning_key(run.placed, run.board, model.sha256, run.untuned.options, asked)

    def look_up(self) -> None:
        """Takes what was measured before under the same key; what no longer holds is forgotten."""
        self.found = None
        if self.wanted:
            row = self.run.store.tuning(self.run.board.name, self.key())
            if row is not None:
                self.found = _read(row.found)

    def ensure(self) -> None:
        """Measures it where nothing is known yet. Whatever goes wrong is recorded with that run;
        the stages then run in the engine's own number of threads.

        Raises Interrupted.
        """
        from harness.farm.stage import StageRun

        if self.found is not None or self._asked_for or not self.wanted:
            return
        self._asked_for = True
        result = StageRun(self.run, LADDER).result()  # which keeps what it found
        told = f"{self.run.board.name} {LADDER.name} {result.outcome.value.upper()}: "
        told += result.verdict.headline
        if self.found is None:
            told += "; its stages run in the engine's own number of threads"
        self.run.campaign.reporter.note(told)

    def keep(self, run_id: str | None, found: Tuned | None) -> None:
        """Stores what a ladder found."""
        if found is None or run_id is None:
            return
        self.found = found
        run = self.run
        run.store.record_tuning(
            run.board.name,
            self.key(),
            engine_hash=run.placed.engine_hash,
            facts_hash=facts_hash(run.placed.facts),
            model_hash=run.model_for(LADDER, run.untuned).sha256,
            run_id=run_id,
            found=dataclasses.asdict(found),
        )


def _read(found: Any) -> Tuned:
    cpus = found.get("cpus")
    return Tuned(
        threads=int(found["threads"]),
        cpus=None if cpus is None else tuple(int(cpu) for cpu in cpus),
        kv_layout=found.get("kv_layout"),
        huge_pages=found.get("huge_pages"),
    )
