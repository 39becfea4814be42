"""Exponential moving average of the weights (``optimizer.ema``).

It is part of the optimizer's state in each parameter's shape, cut, saved and loaded like the moments under every
engine. After each update ``average = decay * average + (1 - decay) * weight``; it starts at the run's first weights. A
parameter without updates has no average and stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from mgpu_pipe.models.local_shards import local_tensor
from mgpu_pipe.system.compat.torch_private import foreach_lerp


@contextmanager
def on_local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which ``optimizer`` has this rank's shards, gradients and state as plain tensors.

    Afterwards it has the parameters again, with its state as plain tensors of the shards' shapes.
    """
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    shards: dict[torch.Tensor, torch.Tensor] = {p: _shard(p) for p in parameters if isinstance(p, DTensor)}
    originals = [group["params"] for group in optimizer.param_groups]
    _move_state(optimizer, shards)
    for group, parameters_of_group in zip(optimizer.param_groups, originals, strict=True):
        group["params"] = [shards.get(p, p) for p in parameters_of_group]
    places = {p: shard.data_ptr() for p, shard in shards.items()}
    try:
        yield
        with torch.no_grad():
            for p, shard in shards.items():
                if shard.data_ptr() != places[p]:  # replaced, not changed in place
                    local_tensor(p).copy_(shard)
    finally:
        for group, parameters_of_group in zip(optimizer.param_groups, originals, strict=True):
            group["params"] = parameters_of_group
        _move_state(optimizer, {shard: p for p, shard in shards.items()})


@torch.no_grad()
def _shard(parameter: torch.Tensor) -> torch.Tensor:
    shard = local_tensor(parameter)
    shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    return shard


def _move_state(optimizer: torch.optim.Optimizer, to: dict[torch.Tensor, torch.Tensor]) -> None:
    for key, new_key in to.items():
        if key in optimizer.state:
            state = optimizer.state.pop(key)  # a constructor may have made DTensor state
            optimizer.state[new_key] = {
                name: local_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
            }


EMA = "ema"
"""Key in the optimizer's state."""


class WeightAverage:
    """Moving average of a rank's weights.

    Args:
        decay: decay per update; None for no average.
    """

    def __init__(self, decay: float | None = None) -> None:
        self.decay = decay
        self.evaluated = False
        """Whether evaluations in training use the average."""

    @contextmanager
    def follow(self, optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Context around an update of the weights that updates the average.

        Args:
            flats: flat tensors that an engine updates instead of parameters, all at every step; None: parameters of
                ``optimizer`` with a gradient.
        """
        if self.decay is None:
            yield
            return
        weights = [p for group in optimizer.param_groups for p in group["params"]] if flats is None else flats
        begin = {
            weight: _copy(weight)
            for weight in weights
            if EMA not in optimizer.state.get(weight, {}) and (flats is not None or weight.grad is not None)
        }
        yield
        for weight, average in begin.items():  # not before the update: an empty state marks the first step
            optimizer.state[weight][EMA] = average
        averaged = [weight for weight in weights if EMA in optimizer.state.get(weight, {})]
        averages = [optimizer.state[weight][EMA] for weight in averaged]
        foreach_lerp(averages, [weight.detach() for weight in averaged], 1 - self.decay)

    @contextmanager
    def in_place(self, optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Context in which the weights, those of :meth:`follow`, hold their averages."""
        weights = [p for group in optimizer.param_groups for p in group["params"]] if flats is None else flats
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for weight in weights:
            if EMA in (state := optimizer.state.get(weight, {})):
                live = local_tensor(weight).detach()
                saved.append((live, live.clone()))
                live.copy_(state[EMA])
        try:
            yield
        finally:
            for live, value in saved:
                live.copy_(value)


def _copy(weight: torch.Tensor) -> torch.Tensor:
    """Copy in at least fp32; fewer digits would lose the change of a step."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype, copy=True)
