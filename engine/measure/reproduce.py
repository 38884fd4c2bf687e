"""A crash again, as small as it was made: some tokens through some layers, in pieces of a size.

Parameters: `tokens` (prompt ids), `max_new`, `layers` (the first so many; absent: all), `piece`
(tokens of one prefill step; absent: the decoder's own), `context`. Each step is told as `progress`,
so that the last one before a crash is known.
"""

from __future__ import annotations

import dataclasses

from engine.measure.context import JobContext, JobError


def run(context: JobContext) -> None:
    import numpy as np

    tokens = np.asarray(context.parameter("tokens"), np.int64)
    max_new, piece = int(context.parameter("max_new")), context.spec.parameters.get("piece")
    package = context.package
    if package is None:
        raise JobError("job reproduce: the spec names no package")
    layers = context.spec.parameters.get("layers")
    if layers is not None:
        if not 1 <= int(layers) <= package.hyperparameters.layers:
            raise JobError(
                f"job reproduce: {layers} layers, expected 1 to {package.hyperparameters.layers}"
            )
        package.hyperparameters = dataclasses.replace(package.hyperparameters, layers=int(layers))
    decoder = context.decoder(context=int(context.parameter("context")))
    width = int(piece) if piece is not None else max(1, len(tokens))
    steps = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    try:
        for number, step in enumerate(steps):
            context.progress(number, len(steps) + max_new, "prefill")
            logits = decoder.advance(step)
        for number in range(max_new):
            context.progress(len(steps) + number, len(steps) + max_new, "decode")
            logits = decoder.advance(np.asarray([int(np.argmax(logits))], np.int64))
    finally:
        decoder.close()
    context.data("survived", {"tokens": len(tokens), "new": max_new})
