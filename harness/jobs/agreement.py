"""How far logits and text agree with the reference, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.jobs import prompts, references
from harness.jobs.details import LogitsAgreement, TextComparison
from harness.statistics.accuracy import kl
from harness.statistics.bootstrap import mean_interval, percentile_interval, wilson

if TYPE_CHECKING:
    from engine.options import EngineOptions
    from harness.deploy.models import PreparedModel
    from harness.jobs.base import StageContext

Array = npt.NDArray[Any]

BLOCK = 16  # positions at a time: a float64 copy of all logits would be large
LARGEST_KL = 1e3  # in place of infinity, which JSON cannot hold
SMALLEST_KL = 1e-12  # where the histogram begins; float16 logits cannot show less
NOISE_FLOOR = 1e-3  # logits: float32 sums in another order, with room
NOISE_FACTOR = 3.0  # of the naive implementation's error, as for ops
NOISE_POSITIONS = 96  # of a text, whose logits tell what rounding to codes costs
SCHEME_FACTOR = 2.0  # of the largest error there: depth looks at hundreds of logits more
CONTINUATION = 24  # tokens of the reference's own text behind a divergence
GRAM = 4
FEWEST_TEXTS = 3  # that an interval is drawn over; of fewer, over positions


def kl_rows(reference: Array, board: Array) -> npt.NDArray[np.float64]:
    """(n,) KL(reference ‖ board) in nats of two (n, V) logit arrays, at most LARGEST_KL."""
    spans = [slice(start, start + BLOCK) for start in range(0, len(reference), BLOCK)]
    parts = [np.minimum(kl(reference[span], board[span]), LARGEST_KL) for span in spans]
    return np.concatenate(parts) if parts else np.zeros(0)


def logits_agreement(pairs: Sequence[tuple[Array, Array]]) -> LogitsAgreement:
    """Over the positions that the board reached. Each pair is a text: (N, V) of the reference
    against (n ≤ N, V) of the board.

    Intervals are 95 %: of KL a bootstrap over texts, or over positions where there are too few; of
    top-1 Wilson's.
    """
    reached = [(want[: len(got)], got[: len(want)]) for want, got in pairs]
    reached = [pair for pair in reached if len(pair[1])]
    if not reached:
        return LogitsAgreement(
            positions=0, mean_kl=0.0, p99_kl=0.0, mean_kl_low=0.0, mean_kl_high=0.0,
            top1=0.0, top1_low=0.0, top1_high=1.0, kl_histogram=(), prompts=0,
        )  # fmt: skip
    texts = [kl_rows(want, got) for want, got in reached]  # (n,) each
    divergence = np.concatenate(texts)
    same = sum(int((w.argmax(axis=-1) == g.argmax(axis=-1)).sum()) for w, g in reached)
    many = len(texts) >= FEWEST_TEXTS
    low, high = mean_interval([text.mean() for text in texts] if many else divergence)
    groups = texts if many else [divergence[index : index + 1] for index in range(len(divergence))]
    p99_low, p99_high = percentile_interval(groups, 99)
    top1_low, top1_high = wilson(same, len(divergence))
    edges = np.arange(-12, 3)
    counts, _ = np.histogram(np.log10(np.maximum(divergence, SMALLEST_KL)), bins=edges)
    return LogitsAgreement(
        positions=len(divergence),
        mean_kl=float(divergence.mean()),
        p99_kl=float(np.percentile(divergence, 99)),
        mean_kl_low=low,
        mean_kl_high=high,
        top1=same / len(divergence),
        top1_low=top1_low,
        top1_high=top1_high,
        kl_histogram=tuple(
            (float(edge), int(count)) for edge, count in zip(edges[:-1], counts, strict=True)
        ),
        prompts=len(texts),
        p99_kl_low=p99_low,
        p99_kl_high=p99_high,
    )


def logit_noise(naive: float) -> float:
    """By how much a logit may differ for no bug's sake, of the naive implementation's own error.

    It is never taken from the board that is judged: a broken one would widen its own tolerance. A
    choice whose margin is below twice this may fall either way.
    """
    return max(NOISE_FLOOR, NOISE_FACTOR * naive)


def noise_of(context: StageContext) -> references.SchemeNoise:
    """How far logits may be off for no bug's sake in what the board is asked to compute."""
    definition = references.definition_of(context.engine.options)
    if references.is_exact(definition):
        return references.SchemeNoise(NOISE_FLOOR, NOISE_FLOOR)
    size = min(NOISE_POSITIONS, context.model.hyperparameters.context)
    tokens = prompts.text_tokens(context.model, size, 0)
    found = references.scheme_noise(context.model, definition, tokens)
    return references.SchemeNoise(
        max(NOISE_FLOOR, found.between), max(NOISE_FLOOR, SCHEME_FACTOR * found.alone)
    )


def repetition_rate(tokens: Sequence[int]) -> float:
    """Share of 4-grams that occurred before; 0 for a text shorter than one."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compare_text(
    model: PreparedModel,
    definition: EngineOptions,
    prompt: Sequence[int],
    tokens: Sequence[int],
    noise: float,
) -> TextComparison:
    """The board's greedy text against what the reference would have written at each place.

    Each token is judged after the board's own text before it, so a near tie does not excuse what
    follows. The divergence that is told is the first beyond the noise, else the first; there the
    reference's choice and a short continuation are shown. `margin` is how much the reference
    prefers its choice to the board's token.
    """
    head: dict[str, Any] = {
        "prompt": prompts.decode(model, prompt),
        "board": prompts.decode(model, tokens),
        "tokens": len(tokens),
        "noise": noise,
        "repetition_rate": repetition_rate(tokens),
    }
    if not tokens:
        return TextComparison(**head, reference="", first_divergence=0, near_tie=False, margin=None)
    checked = references.checked_text(model, definition, prompt, tokens)
    beyond = np.flatnonzero(checked.deficit > 2 * noise)
    at = int(beyond[0]) if len(beyond) else checked.first_divergence
    if at is None:
        return TextComparison(
            **head, reference=head["board"], first_divergence=None, near_tie=False, margin=None
        )
    margin = float(checked.deficit[at])
    written = [*tokens[:at], int(checked.best[at])]
    room = model.hyperparameters.context - len(prompt) - len(written)
    if room > 0:
        count = min(CONTINUATION, room)
        written += references.continuation(model, [*prompt, *written], count)
    return TextComparison(
        **head,
        reference=prompts.decode(model, written),
        first_divergence=at,
        near_tie=not len(beyond),
        margin=margin,
    )
