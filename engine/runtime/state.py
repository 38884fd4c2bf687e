"""What ops read and write: named buffers, the inputs of a step, and how a step can fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.program.ops import Op

# Arrays of a step by name: float activations, or int64 for the inputs. Caches are arrays too, or
# views that read and take writes like arrays (engine.runtime.cache).
Buffer = npt.NDArray[Any]
State = dict[str, Buffer]


class ContextFull(ValueError):
    """The next tokens have no slot left. Carries how many fit."""

    def __init__(self, position: int, tokens: int, context: int) -> None:
        self.position, self.tokens, self.context = position, tokens, context
        super().__init__(
            f"{tokens} tokens at position {position} exceed the context of {context}; "
            f"{context - position} still fit"
        )


class NonFinite(ArithmeticError):
    """An op wrote NaN or infinity. Names the step, the op and how many values."""

    def __init__(self, step: int, op: Op, count: int, size: int, kind: str) -> None:
        self.step, self.op, self.layer = step, op.id, op.layer
        self.count, self.size, self.kind = count, size, kind
        self.evidence: dict[str, Any] = {}  # plain JSON: what else is known of the numbers
        super().__init__(step, op.id, count, size, kind)

    def __str__(self) -> str:
        return f"step {self.step}, op {self.op}: {self.count} of {self.size} values are {self.kind}"


class CacheOverflow(NonFinite):
    """Keys or values that the cache's scheme cannot hold; nothing of the op is kept silently.

    Raised by a unit, which does not count steps: whoever runs the step sets `step`.
    """

    def __init__(self, op: Op, count: int, size: int, scheme: str, limit: float) -> None:
        kind = f"NaN or beyond ±{limit:.6g}, the range of a cache in {scheme}"
        super().__init__(0, op, count, size, kind)
        self.scheme, self.limit = scheme, limit


def step_inputs(
    tokens: npt.ArrayLike,
    positions: npt.ArrayLike,
    rows: npt.ArrayLike,
    *,
    slots: npt.ArrayLike | None = None,
    starts: npt.ArrayLike | None = None,
    visible: npt.ArrayLike | None = None,
    prefix_positions: npt.ArrayLike | None = None,
) -> State:
    """The inputs of a step of T tokens, R of whose logits are wanted: int64 arrays by name.

    `tokens` (T,); `positions` (T,) for RoPE; `rows` (R,) of the T. `slots` (T,) is where each
    token's key and value go, counted over all sequences (default: the positions); `starts` (T,) the
    first slot of the token's sequence (default 0); `visible` (T,) how many slots of its sequence,
    from `starts` on, the token attends, itself included (default: position + 1).
    `prefix_positions` (T,) are the positions at which queries read a kept prefix: programs with a
    ring have this input, no other has.
    """
    places = np.asarray(positions, np.int64)
    state: State = {
        "tokens": np.asarray(tokens, np.int64),
        "positions": places,
        "rows": np.asarray(rows, np.int64),
        "slots": places if slots is None else np.asarray(slots, np.int64),
        "starts": np.zeros_like(places) if starts is None else np.asarray(starts, np.int64),
        "visible": places + 1 if visible is None else np.asarray(visible, np.int64),
    }
    if prefix_positions is not None:
        state["prefix_positions"] = np.asarray(prefix_positions, np.int64)
    return state
