"""Are the logits right where the cache is long? What the other stages compare fits in some hundred
positions; a rotation table, a cache index or an attention that goes wrong behind them shows here.

The curve's board part tells the largest logits of single steps at a few depths of a fixed text. The
reference unit reads the same text on the host, once for each model and set of depths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.package import Package
from harness.jobs import prompts, references
from harness.jobs.agreement import noise_of
from harness.verdicts import Check, Outcome

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.deploy.models import PreparedModel
    from harness.jobs.base import StageContext
    from harness.jobs.runlog import RunLog

# Of the spread (standard deviation) of the reference's logits at a depth. Measured on 30 layers:
# float32 sums in another order cost 1e-5 of it, keys and values held as float16 2.5e-3 (which is
# legitimate), a rotation by angles held as float16 0.1 at 1,024 positions.
SHARE = 0.005


def reference_logits(
    model: PreparedModel,
    definition: EngineOptions,
    tokens: npt.NDArray[np.int64],
    positions: list[int],
) -> npt.NDArray[np.float32]:
    """(n, V): the naive reference's logits once each number of `positions` of `tokens` is read."""

    def make() -> references.Arrays:
        found = []
        with Package.open(model.package) as package:
            decoder = references.decoder_of(package, definition, positions[-1])
            for position in positions:
                found.append(decoder.advance(tokens[decoder.position : position]))
        return {"logits": np.array(found, np.float32)}

    read = tokens[: positions[-1]].tolist()
    key = [model.sha256, definition.to_mapping(), read, positions]
    return references.cached("depth", key, make)["logits"]


def judge_depth(context: StageContext, log: RunLog, asked: int) -> Check:
    """`asked` is the context of the run's spec, to whose length the fixed text was cut."""
    told = log.arrays("depth")
    positions = [int(position) for position in told["positions"]]
    vocab = context.model.hyperparameters.vocab
    malformed = _malformed(told, positions, asked, vocab)
    if malformed:
        return _check(Outcome.FAIL, None, f"What the board told of its logits is {malformed}.")
    tokens = prompts.text_tokens(context.model, asked, context.options.seed)
    definition = references.judging(references.definition_of(context.engine.options))
    want = reference_logits(context.model, definition, tokens, positions)
    want = want.astype(np.float64)  # (n, V)
    got = np.asarray(told["values"], np.float64)  # (n, k)
    rows = np.arange(len(positions))
    deficit = want.max(axis=-1) - want[rows, told["best"]]  # (n,)
    # Not finite: as far off as can be.
    off = np.where(np.isfinite(got), np.abs(got - want[rows[:, None], told["ids"]]), np.inf)
    limits = noise_of(context).alone + SHARE * want.std(axis=-1)  # (n,)
    wrong = np.flatnonzero((off.max(axis=-1) > limits) | (deficit > 2 * limits))
    if not len(wrong):
        worst = int(np.argmax(off.max(axis=-1) / limits))
        listed = ", ".join(str(position) for position in positions)
        return _check(
            Outcome.PASS,
            float(off[worst].max()),
            f"With {listed} positions cached the {got.shape[1]} largest logits are the "
            f"reference's, off by at most {off[worst].max():.2g}; limit {limits[worst]:.2g}.",
            float(limits[worst]),
        )
    first = int(wrong[0])
    much, limit = float(off[first].max()), float(limits[first])
    found = (
        f"the logits are off by {much:.2g}, limit {limit:.2g}"
        if much > limit
        else f"a token is chosen that the reference puts {deficit[first]:.2g} below its own"
    )
    before = f"; with {positions[first - 1]} they are right" if first else ""
    return _check(
        Outcome.FAIL,
        much if np.isfinite(much) else "not finite",
        f"With {positions[first]} positions cached {found}{before}.",
        limit,
    )


def _malformed(told: references.Arrays, positions: list[int], asked: int, vocab: int) -> str | None:
    """What is wrong with the arrays of a board, which is not trusted with an index."""
    ids, values, best = told["ids"], told["values"], told["best"]
    if not positions or positions != sorted(set(positions)):
        return f"for the positions {positions}, expected some in ascending order"
    if positions[0] < 1 or positions[-1] > asked:
        return f"for the positions {positions}, expected 1 to {asked}"
    if ids.ndim != 2 or ids.shape != values.shape or len(ids) != len(positions) or not ids.size:
        return f"of shape {ids.shape} and {values.shape} for {len(positions)} positions"
    if best.shape != (len(positions),) or min(ids.min(), best.min()) < 0:
        return "for tokens that do not exist"
    if max(ids.max(), best.max()) >= vocab:
        return f"for tokens outside the vocabulary of {vocab}"
    return None


def _check(
    outcome: Outcome, measured: float | str | None, sentence: str, limit: float | None = None
) -> Check:
    return Check(
        name="right_at_depth",
        outcome=outcome,
        measured=measured,
        limit=limit,
        unit="logits" if limit is not None else "",
        sentence=sentence,
    )
