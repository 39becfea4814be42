"""An optimizer's update of a sharded model, computed on each rank's own shards.

Many of torch's fused and multi-tensor operators have no rule for a ``DTensor``; and where an update is elementwise (see
:mod:`mgpu_pipe.training.optimizer_probe`) none is needed: a shard of the result is the result on that shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from mgpu_pipe.models.parts import local_tensor


@contextmanager
def on_local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, ``optimizer`` holds this rank's shards, gradients and state of its parameters as plain tensors.

    Afterwards it holds the parameters again; its state stays under them, as plain tensors of the shards' shapes.
    """
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    shards: dict[torch.Tensor, torch.Tensor] = {p: _shard(p) for p in parameters if isinstance(p, DTensor)}
    kept = [group["params"] for group in optimizer.param_groups]
    _move_state(optimizer, shards)
    for group, own in zip(optimizer.param_groups, kept, strict=True):
        group["params"] = [shards.get(p, p) for p in own]
    places = {p: shard.data_ptr() for p, shard in shards.items()}
    try:
        yield
        with torch.no_grad():
            for p, shard in shards.items():
                if shard.data_ptr() != places[p]:  # not changed in place, but replaced
                    local_tensor(p).copy_(shard)
    finally:
        for group, own in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = own
        _move_state(optimizer, {shard: p for p, shard in shards.items()})


@torch.no_grad()
def _shard(parameter: torch.Tensor) -> torch.Tensor:
    shard = local_tensor(parameter)
    shard.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    return shard


def _move_state(optimizer: torch.optim.Optimizer, to: dict[torch.Tensor, torch.Tensor]) -> None:
    for key, new_key in to.items():
        if key in optimizer.state:
            state = optimizer.state.pop(key)  # a constructor may have made it of the parameter's kind
            optimizer.state[new_key] = {
                name: local_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
            }
