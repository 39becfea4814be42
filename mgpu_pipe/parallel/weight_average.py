"""The exponential moving average of the weights (``optimizer.ema``).

It is a part of the optimizer's state: of each parameter's own shape, cut, saved and loaded as its moments are, under
every engine. After each update ``average = decay * average + (1 - decay) * weight``; it begins as the weight that the
run begins with. A parameter that was never updated has none: it is its own average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mgpu_pipe.compat.torch_private import foreach_lerp
from mgpu_pipe.models.parts import local_tensor

EMA = "ema"
"""The key of the optimizer's state."""


class WeightAverage:
    """Keeps the average of one rank's weights.

    Args:
        decay: None keeps none.
    """

    def __init__(self, decay: float | None = None) -> None:
        self.decay = decay
        self.evaluated = False
        """Whether evaluation in training is of the average."""

    @contextmanager
    def updated(self, optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Around an update of the weights.

        Args:
            flats: what an engine updates in the place of parameters, all of it at every step; None: those parameters
                of ``optimizer`` that have a gradient.
        """
        if self.decay is None:
            yield
            return
        weights = [p for group in optimizer.param_groups for p in group["params"]] if flats is None else flats
        begin = {
            weight: _copied(weight)
            for weight in weights
            if EMA not in optimizer.state.get(weight, {}) and (flats is not None or weight.grad is not None)
        }
        yield
        for weight, average in begin.items():  # not before: an optimizer takes an empty state for its first step
            optimizer.state[weight][EMA] = average
        kept = [weight for weight in weights if EMA in optimizer.state.get(weight, {})]
        foreach_lerp([optimizer.state[weight][EMA] for weight in kept], [w.detach() for w in kept], 1 - self.decay)

    @contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Within it the weights (as of :meth:`updated`) hold their averages."""
        weights = [p for group in optimizer.param_groups for p in group["params"]] if flats is None else flats
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for weight in weights:
            if EMA in (state := optimizer.state.get(weight, {})):
                live = local_tensor(weight).detach()
                kept.append((live, live.clone()))
                live.copy_(state[EMA])
        try:
            yield
        finally:
            for live, value in kept:
                live.copy_(value)


def _copied(weight: torch.Tensor) -> torch.Tensor:
    """In fp32 at least: what is added in a step is lost in fewer digits."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype, copy=True)
