"""Applies a tensor-parallel plan to a model and records which parameters it has cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.architectures.family import COLUMNS, SequencePlan, Style
from mgpu_pipe.architectures.find import STYLES, families_with, family_of, tensor_if_errors
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.low_rank import A, DoraLayer, LoraLayer
from mgpu_pipe.models.adapters.qlora import BLOCK, Nf4Experts, Nf4Layer, Quantised
from mgpu_pipe.models.local_shards import Layout, add_layouts, layouts_of


class CutParameters:
    """Cuts the parameters of ``model`` along one axis and records their layouts."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._originals = dict(model.named_parameters())  # keeps them alive: the tables below use their addresses
        self._names = {id(parameter): name for name, parameter in self._originals.items()}
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), []).append((module, attribute))
        self._before = layouts_of(model)
        self._layouts: dict[str, Layout] = {}

    def name(self, parameter: nn.Parameter) -> str:
        """The name of ``parameter``, before or after it was cut."""
        return self._names[id(parameter)]

    def is_cut(self, parameter: nn.Parameter) -> bool:
        return self.name(parameter) in self._layouts

    def cut(
        self, module: nn.Module, attribute: str, dim: int, ranges: Sequence[tuple[int, int]], owned: bool = True
    ) -> None:
        """Replace a parameter, in every module that holds it, by its ``ranges`` along ``dim``."""
        parameter = module._parameters[attribute]
        assert parameter is not None
        name, before = self.name(parameter), self._before.get(self.name(parameter))
        assert before is None or before.shape == before.whole, f"{name} is cut already"
        parts = [parameter.detach().narrow(dim, start, stop - start) for start, stop in ranges]
        local = nn.Parameter(torch.cat(parts, dim), requires_grad=parameter.requires_grad)
        for holder, held_as in self._holders[id(parameter)]:
            holder._parameters[held_as] = local
        self._names[id(local)], self._holders[id(local)] = name, self._holders[id(parameter)]
        self._layouts[name] = Layout(
            name if before is None else before.name,
            tuple(parameter.shape),
            dim,
            tuple(ranges),
            owned and (before is None or before.owned),
        )

    def record(self, left_alone: Iterable[str], owns_the_rest: bool) -> None:
        """Store the layouts of the cut parameters and of the rest, which every rank of the axis holds, on the model."""
        skipped = set(left_alone)
        for name, parameter in self._model.named_parameters():
            if name in self._layouts or name in skipped:
                continue
            before = self._before.get(name) or Layout.uncut(name, tuple(parameter.shape))
            owned = before.owned and owns_the_rest
            self._layouts[name] = Layout(before.name, before.whole, before.dim, before.ranges, owned)
        add_layouts(self._model, self._layouts)


KEY_VALUE = ("k_proj", "v_proj")
"""Layers cut by key-value heads, which may be fewer than ranks."""
SEVERAL_INPUTS = ("encoder_attn", "crossattention", "EncDecAttention", "DisentangledSelfAttention")
"""Names or classes of modules whose column-parallel layers take other inputs than the hidden states."""


def tensor_plan(model: nn.Module, whole: Sequence[str] = ()) -> dict[str, Style]:
    """How each module (or bare parameter) of ``model`` is cut, by its name.

    Args:
        whole: names of modules that every rank keeps whole.

    Raises:
        ConfigError: no plan, or a plan with an unknown style.
    """
    modules = dict(model.named_modules())
    refused = tensor_if_errors(vars(getattr(model, "config", None) or object), _model_type(model), 2)
    if refused:
        raise refused[0]
    plan: dict[str, Style] = {}
    family_styles: dict[str, Mapping[str, Style]] = {}
    for model_type in {_model_type(module) for module in modules.values() if hasattr(module, "config")}:
        family_styles.update(family_of(model_type).modules)
    for name, module in modules.items():
        for child, style in family_styles.get(type(module).__name__, {}).items():
            if style == "per_head" or isinstance(getattr(module, child, None), nn.Module | nn.Parameter):
                plan[f"{name}.{child}" if name else child] = style
    names, of_family = [*modules, *(name for name, _ in model.named_parameters())], frozenset(plan)
    brought = getattr(model, "tp_plan", None) or {}
    for pattern, brought_style in brought.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        matches = [name for name in names if matching(name) and name not in of_family]
        if matches and brought_style not in STYLES:
            reason = f"the {_model_type(model)} family's plan cuts {pattern} in a way that is not known here"
            raise ConfigError("strategy.tp", brought_style, "use strategy.tp=1", reason)
        known = STYLES.get(brought_style)
        plan.update({name: known for name in matches if known is not None})
    if not any(style in COLUMNS for style in plan.values()):
        raise ConfigError(
            "model.type", _model_type(model), "use strategy.tp=1", "the family has no plan for tensor parallelism"
        )
    inside = tuple(f"{name}." for name in whole)
    return {name: style for name, style in plan.items() if not name.startswith(inside)}


def sequence_plan(model: nn.Module) -> SequencePlan:
    """Where ``model``'s sequence is split; ConfigError for a family without a plan."""
    plan = family_of(_model_type(model)).sequence
    if plan is None:
        raise ConfigError(
            "strategy.sequence_parallel",
            True,
            "use strategy.sequence_parallel=false",
            f"the {_model_type(model)} family has no plan for it; these have: "
            + ", ".join(families_with(lambda family: family.sequence)),
        )
    return plan


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


class TensorCut:
    """The state of cutting a model over the ranks of ``group``.

    Attributes:
        plan: the style of every module and parameter that has one, by name.
        modules: all modules of the model, by name.
        partial: parameters whose gradients are to be summed over a group, or over the axis (None), by name.
        left_alone: parameters that this axis neither cuts nor records.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, whole: Sequence[str] = ()) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.plan = tensor_plan(model, whole)
        self.modules = dict(model.named_modules())
        self.parameters = CutParameters(model)
        self.partial: dict[str, dist.ProcessGroup | None] = {}
        self.left_alone: set[str] = set()
        self._sharers: dict[int, dist.ProcessGroup] = {}

    def sum_gradient(self, parameter: nn.Parameter, group: dist.ProcessGroup | None = None) -> None:
        """Mark a parameter whose gradient is a sum over ``group``, or over the axis; each rank has one part."""
        self.partial[self.parameters.name(parameter)] = None if group is self.group else group

    def refusal(self, fix: str, reason: str) -> ConfigError:
        return ConfigError("strategy.tp", self.size, fix, reason)

    def ranges(self, name: str, length: int, parts: int = 1) -> list[tuple[int, int]]:
        """This rank's range of each of ``parts`` equal parts of ``length``."""
        width = length // parts
        if width % self.size:
            fits = [n for n in range(1, self.size + 1) if width % n == 0]
            raise self.refusal(f"use one of {fits}", f"the width {width} of {name} cannot be cut evenly")
        share = width // self.size
        return [(part * width + self.rank * share, part * width + (self.rank + 1) * share) for part in range(parts)]

    def cut_linear(
        self, layer: nn.Module, dim: int, ranges: list[tuple[int, int]], bias: bool = True, owned: bool = True
    ) -> None:
        if isinstance(layer, Nf4Layer):
            self.parameters.cut(
                layer, "weight", dim, layer.keep_part("weight", dim == output_dim(layer), ranges), owned
            )
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
            for name in layer.PARAMETERS[1:]:
                self.parameters.cut(layer, name, 0, ranges, owned)
            self.sum_gradient(layer.lora_A)
        else:
            self.parameters.cut(layer, A, 1, ranges, owned)
            for name in layer.PARAMETERS[1:]:
                self.sum_gradient(getattr(layer, name))
            if isinstance(layer, DoraLayer):
                layer.norm_group = self.group

    def sharers(self, sharing: int) -> dist.ProcessGroup:
        """Group of ``sharing`` neighbours with the same key-value head. Collective in this tensor-parallel group."""
        if sharing == self.size:
            return self.group
        if sharing not in self._sharers:
            world, first = dist.group.WORLD, self.rank // sharing * sharing
            if world is not None and world.bound_device_id is not None:
                # A new group would be split from the world's communicator, and wait for all ranks of the world.
                parts = [list(range(start, start + sharing)) for start in range(0, self.size, sharing)]
                group = dist.split_group(self.group, parts)
            else:
                ranks = dist.get_process_group_ranks(self.group)
                group = dist.new_group(ranks[first : first + sharing], use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._sharers[sharing] = group
        return self._sharers[sharing]


def check_blocks(model: nn.Module, size: int, cuts_experts: bool = True, whole: Sequence[str] = ()) -> None:
    """Refuse to cut the inputs of four-bit weights inside a block that shares a scale.

    Args:
        whole: names of modules that every rank keeps whole.

    Raises:
        ConfigError: a width that ``size`` ranks would cut so.
    """
    plan = tensor_plan(model, whole) if size > 1 else {}
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
