"""How far bf16 runs are from the fp32 run of the same steps."""

from __future__ import annotations

import math
from collections.abc import Sequence


def loss_error(rows: Sequence[tuple[float, float]], losses: Sequence[float]) -> float:
    """Root mean square over steps of the relative error of the loss.

    The largest error of ten steps is a matter of luck: it depends on the processor's kernels by more than a factor of
    1.5, while the mean does not.

    Args:
        rows: loss and gradient norm of each step.
        losses: of the fp32 run.
    """
    errors = [loss / expected - 1 for (loss, _), expected in zip(rows, losses, strict=True)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))
