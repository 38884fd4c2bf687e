"""The logits of a text, position by position: what a search compares when it changes how the engine
runs.

The first part of the text is read as a prefill, the rest token by token. Parameters: `tokens`, the
ids of the text; `singles`, how many of the last are single steps; `context`.
"""

from __future__ import annotations

import numpy as np

from engine.measure.alignment import free_run, shifted
from engine.measure.context import JobContext


def run(context: JobContext) -> None:
    tokens = np.asarray(context.parameter("tokens"), np.int64)  # (N,)
    singles = int(context.parameter("singles"))
    decoder = context.decoder(context=int(context.parameter("context")))
    try:
        context.progress(0, 1, "reading a text")
        found = free_run(
            decoder, tokens, np.arange(max(0, len(tokens) - singles), len(tokens)), taps=False
        )
    finally:
        decoder.close()
    context.data("logits", {"hash": found.digest(), "stopped": found.stopped})
    context.array("logits", shifted=shifted(found.logits))
    context.progress(1, 1, "done")
