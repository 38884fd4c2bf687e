"""How long a run may take before its board counts as too slow for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.deploy.models import PreparedModel

# A token reads the weights once. Python and numpy on the slowest core that is worth a bring-up (an
# in-order core at 1 GHz) get through some 50 MB of quantised weights a second.
SLOWEST_BYTES_PER_S = 50e6
START_S = 120.0  # to start Python, import numpy and map the package, from a slow card


def slowest_s(model: PreparedModel, tokens: int) -> float:
    """Seconds in which even a slow board has started and read or written `tokens` tokens.

    Prefill is faster a token than decoding, so counting it alike errs on the patient side.
    """
    return START_S + tokens * model.package.stat().st_size / SLOWEST_BYTES_PER_S
