"""Parameters that are not trained, under DeepSpeed: no optimizer holds them, and they are in checkpoints too."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.checkpoint.adapters import tensor_shards
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.strategies.zero_build import Shards, equal_part, values_of
from mgpu_pipe.strategies.zero_state import fragment_shards


class FrozenWeights:
    """The frozen parameters of a model whose engine is started, whole (ZeRO-1, 2) or partitioned (ZeRO-3)."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._masters: Shards = {}
        """This rank's parts of the fp32 values that rounded weights stand for."""

    def keep(self, initial: Shards) -> None:
        """Keep the fp32 values of this rank's parts, of weights that were rounded."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for name, parameter in self._parameters:
            if name not in initial:
                continue  # bytes, which nothing rounds
            start, stop = equal_part(getattr(parameter, "ds_numel", parameter.numel()), rank, ranks)
            self._masters[name] = (start, values_of(initial, name, start, stop - start).clone())

    def held(self) -> list[torch.Tensor]:
        """What this rank has in memory."""
        weights = [getattr(parameter, "ds_tensor", parameter) for _, parameter in self._parameters]
        return [*weights, *(values for _, values in self._masters.values())]

    def shards(self) -> list[LocalShard]:
        """This rank's parts, fp32 where there are such values, as live tensors."""
        shards: list[LocalShard] = []
        for name, parameter in self._parameters:
            part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if name in self._masters:
                start, values = self._masters[name]
                shards += fragment_shards(name, shape, start, values)
            elif part is not None:
                start, stop = equal_part(prod(shape), dist.get_rank(), dist.get_world_size())
                shards += fragment_shards(name, shape, start, part.narrow(0, 0, stop - start))
            else:
                shards += tensor_shards(name, parameter)
        return shards

    @torch.no_grad()
    def written(self) -> None:
        """Update the weights from fp32 values that were written into. A collective call."""
        for name, parameter in self._parameters:
            if name not in self._masters:
                continue  # the weights themselves are the masters
            values = self._masters[name][1]
            part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
            if part is not None:
                part.narrow(0, 0, values.numel()).copy_(values)
            else:
                _gather_parts(parameter, values)


def _gather_parts(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Fill a whole parameter from every rank's part. A collective call."""
    ranks = dist.get_world_size()
    size = -(-parameter.numel() // ranks)
    mine = torch.zeros(size, dtype=values.dtype, device=values.device)
    mine[: values.numel()] = values
    gathered = torch.empty(size * ranks, dtype=values.dtype, device=values.device)
    dist.all_gather_into_tensor(gathered, mine)
    parameter.data.view(-1).copy_(gathered[: parameter.numel()])
