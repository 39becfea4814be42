"""One application of a tensor-parallel plan to a model: the rank that cuts, and what it has cut so far."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.dora import DoraLayer
from mgpu_pipe.models.adapters.low_rank import A, LoraLayer
from mgpu_pipe.models.adapters.nf4 import BLOCK
from mgpu_pipe.models.adapters.qlora import Nf4Experts, Nf4Layer, Quantised
from mgpu_pipe.parallel.tensor_parameters import CutParameters
from mgpu_pipe.parallel.tensor_roles import tensor_plan


class TensorCut:
    """A model on its way to being cut over the ranks of ``group``.

    Attributes:
        plan: the style of every module and parameter that has one, by name.
        modules: all modules of the model, by name.
        partial: parameters whose gradients are to be summed over a group, or over the axis (None), by name.
        left_alone: parameters of which this axis says nothing.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.plan = tensor_plan(model)
        self.modules = dict(model.named_modules())
        self.parameters = CutParameters(model)
        self.partial: dict[str, dist.ProcessGroup | None] = {}
        self.left_alone: set[str] = set()
        self._sharers: dict[int, dist.ProcessGroup] = {}

    def sum_gradient(self, parameter: nn.Parameter, group: dist.ProcessGroup | None = None) -> None:
        """Let the gradient be summed over ``group``, or over the axis: each rank's is a part of it."""
        self.partial[self.parameters.name(parameter)] = None if group is self.group else group

    def refusal(self, fix: str, reason: str) -> ConfigError:
        return ConfigError("strategy.tp", self.size, fix, reason)

    def even(self, name: str, length: int, parts: int = 1) -> list[tuple[int, int]]:
        """This rank's range of each of ``parts`` equal parts of ``length``."""
        one = length // parts
        if one % self.size:
            fits = [n for n in range(1, self.size + 1) if one % n == 0]
            raise self.refusal(f"use one of {fits}", f"the width {one} of {name} cannot be cut evenly")
        share = one // self.size
        return [(part * one + self.rank * share, part * one + (self.rank + 1) * share) for part in range(parts)]

    def cut_linear(
        self, layer: nn.Module, dim: int, ranges: list[tuple[int, int]], bias: bool = True, owned: bool = True
    ) -> None:
        if isinstance(layer, Nf4Layer):
            self.parameters.cut(layer, "weight", dim, layer.own_part("weight", dim == output_dim(layer), ranges), owned)
        else:
            self.parameters.cut(layer, "weight", dim, ranges, owned)
        if bias and layer._parameters.get("bias") is not None:
            self.parameters.cut(layer, "bias", 0, ranges, owned)
        if isinstance(layer, LoraLayer):
            self._cut_adapter(layer, dim == output_dim(layer), ranges, owned)
        length = sum(stop - start for start, stop in ranges)
        names = ("nf", "nx") if isinstance(layer, Conv1D) else ("out_features", "in_features")
        setattr(layer, names[0 if dim == output_dim(layer) else 1], length)

    def _cut_adapter(self, layer: LoraLayer, outputs: bool, ranges: list[tuple[int, int]], owned: bool) -> None:
        """Cut all but A like the weight's outputs, or A like its inputs; gradients of the rest are parts of a sum."""
        if outputs:
            for name in layer.OWN[1:]:
                self.parameters.cut(layer, name, 0, ranges, owned)
            self.sum_gradient(layer.lora_A)
        else:
            self.parameters.cut(layer, A, 1, ranges, owned)
            for name in layer.OWN[1:]:
                self.sum_gradient(getattr(layer, name))
            if isinstance(layer, DoraLayer):
                layer.norm_group = self.group

    def sharers(self, sharing: int) -> dist.ProcessGroup:
        """The group of the ``sharing`` neighbours that this rank shares its key-value head with.

        A collective call of this tensor-parallel group alone: a pipeline stage without attention never comes here.
        """
        if sharing == self.size:
            return self.group
        if sharing not in self._sharers:
            world, first = dist.group.WORLD, self.rank // sharing * sharing
            if world is not None and world.bound_device_id is not None:
                # A new group would be split from the world's communicator, and wait for all ranks of the world.
                parts = [list(range(at, at + sharing)) for at in range(0, self.size, sharing)]
                made = dist.split_group(self.group, parts)
            else:
                ranks = dist.get_process_group_ranks(self.group)
                made = dist.new_group(ranks[first : first + sharing], use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            self._sharers[sharing] = made
        return self._sharers[sharing]


def check_blocks(model: nn.Module, size: int, cuts_experts: bool = True) -> None:
    """Refuse to cut the inputs of four-bit weights inside of a block that shares a scale.

    Raises:
        ConfigError: a width that ``size`` ranks would cut so.
    """
    plan = tensor_plan(model) if size > 1 else {}
    for layer, module in model.named_modules():
        if not isinstance(module, Quantised) or (isinstance(module, Nf4Experts) and not cuts_experts):
            continue
        for weight, block in module.blocks.items():
            name = layer if weight == "weight" else f"{layer}.{weight}"
            if plan.get(name) == "row" and block.inputs % (BLOCK * size):
                fits = [ranks for ranks in range(1, size + 1) if block.inputs // BLOCK % ranks == 0]
                reason = f"it would split blocks of {BLOCK} weights of {name}, which has {block.inputs} inputs"
                raise ConfigError("strategy.tp", size, f"use one of {fits}, or peft=lora", reason)


def output_dim(layer: nn.Module) -> int:
    return 1 if isinstance(layer, Conv1D | nn.Embedding) and not isinstance(layer, Nf4Layer) else 0


def outputs(layer: nn.Module) -> int:
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.shape[output_dim(layer)]


def inputs(layer: nn.Module) -> int:
    assert isinstance(layer.weight, torch.Tensor)
    return layer.blocks["weight"].inputs if isinstance(layer, Nf4Layer) else layer.weight.shape[1 - output_dim(layer)]


def head_dim(attention: nn.Module) -> int:
    """Width of a head; 0 where the module has no heads."""
    return int(getattr(attention, "head_dim", 0) or 0)
