"""QLoRA: adapters beside frozen matrices that are kept as bytes of four-bit weights (:mod:`.nf4`).

A layer's ``weight`` is its bytes, and ``weight_scales`` what their scales are scaled by (packed experts have the like
of each of their weights): both are parameters that never have a gradient, so that every axis cuts, shards and gathers
them as bytes. Forward and backward pass dequantise them, one matrix at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.experts import WEIGHTS, GroupedExperts, LoraExperts
from mgpu_pipe.models.adapters.low_rank import LoraConv1D, LoraLayer, LoraLinear, as_rows
from mgpu_pipe.models.adapters.nf4 import BLOCK, Block, dequantise, packed_ranges, packed_shapes, quantise

ENDING = "_scales"
"""What follows a weight's name in that of the fp32 values that its scales are scaled by."""


class _Product(torch.autograd.Function):
    """x @ weight.T, whose backward pass makes no gradient of the weight.

    ``counts`` says how many rows of x go through each of several matrices; None: there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, block: Block, counts: list[int] | None
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.rest = block, counts
        return _one_by_one(F.linear, x, packed, scales, block, counts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _one_by_one(torch.matmul, grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


def _one_by_one(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    block: Block,
    counts: list[int] | None,
) -> torch.Tensor:
    """``product`` of x, or of each group of its rows, and a matrix, of which one is dequantised at a time."""
    if counts is None:
        return product(x, dequantise(packed, scales, block).to(x.dtype))
    results = []
    for rows, codes, tops in zip(x.split(counts), packed, scales, strict=True):
        if len(rows):
            results.append(product(rows, dequantise(codes, tops, block).to(x.dtype)))
    return torch.cat(results)


class Quantised(nn.Module):
    """A module with frozen weights of four bits, also where its class stores them transposed."""

    blocks: dict[str, Block]
    """By the weight's name, the part of it that is here."""

    def quantise(self, name: str) -> None:
        """Turn a weight, (..., outputs, inputs) in the form of the module's class, into bytes."""
        rows = as_rows(self, getattr(self, name))
        self.blocks = {**self.__dict__.get("blocks", {}), name: Block(rows.shape[-1])}
        if rows.is_meta:
            shapes = packed_shapes(tuple(rows.shape))
            made = [torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes]
        else:
            made = list(quantise(rows))
        for own, value in zip(parameters_of(name), made, strict=True):
            self._parameters[own] = nn.Parameter(value, requires_grad=False)

    def nf4_product(self, name: str, x: torch.Tensor, counts: list[int] | None = None) -> torch.Tensor:
        packed, scales = (getattr(self, own) for own in parameters_of(name))
        result: torch.Tensor = _Product.apply(x, packed, scales, self.blocks[name], counts)
        return result

    def own_part(self, name: str, outputs: bool, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Keep ``ranges`` of the outputs, or of the inputs, from now on; where their bytes lie."""
        inputs = self.blocks[name].inputs
        if outputs:
            self.blocks[name] = Block(inputs, rows=tuple(ranges))
            return ranges
        self.blocks[name] = Block(inputs, columns=tuple(ranges))
        [(start, stop)] = ranges
        return packed_ranges(inputs, start, stop)


class Nf4Layer(Quantised):
    """A linear layer."""

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return self.nf4_product("weight", x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: Any = self.bias
        return self.product(x) if bias is None else self.product(x) + bias


class Nf4Experts(Quantised, GroupedExperts):
    """Packed experts, each of whose matrices is quantised by itself."""

    def dense(self, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if name not in self.blocks:
            return super().dense(name, rows, ends)
        return self.nf4_product(name, rows, torch.diff(ends, prepend=ends.new_zeros(1)).tolist())


class Nf4Linear(Nf4Layer, nn.Linear):
    pass


class Nf4Conv1D(Nf4Layer, Conv1D):
    pass


class QloraLinear(Nf4Layer, LoraLayer, nn.Linear):
    product = LoraLayer.product


class QloraConv1D(Nf4Layer, LoraLayer, Conv1D):
    product = LoraLayer.product


QUANTISED: dict[type, type[Nf4Layer]] = {
    nn.Linear: Nf4Linear,
    Conv1D: Nf4Conv1D,
    LoraLinear: QloraLinear,
    LoraConv1D: QloraConv1D,
}


@functools.cache
def quantised_class(plain: type) -> type:
    """The class that a linear layer or a module of packed experts, adapted or not, becomes."""
    if plain in QUANTISED:
        return QUANTISED[plain]
    bases = plain.__bases__ if issubclass(plain, LoraExperts) else (plain,)
    return type(f"Nf4{plain.__name__}", (Nf4Experts, *bases), {})


def quantise_module(name: str, module: nn.Module) -> None:
    """Keep the frozen weights of ``module``, a linear layer or packed experts, as bytes.

    Raises:
        ConfigError: the inputs of one are no multiple of a block.
    """
    own = module._parameters
    frozen = [one for one in ("weight", *WEIGHTS) if one in own and not module.get_parameter(one).requires_grad]
    for one in frozen:
        inputs = as_rows(module, module.get_parameter(one)).shape[-1]
        if inputs % BLOCK:
            what = name if one == "weight" else f"{name}.{one}"
            raise ConfigError("peft", "qlora", "use peft=lora", f"{what} has {inputs} inputs, no multiple of {BLOCK}")
    if frozen:
        plain: Any = type(module)
        module.__class__ = quantised_class(plain)
        assert isinstance(module, Quantised)
        for one in frozen:
            module.quantise(one)


def packed_weight(model: nn.Module, name: str) -> str | None:
    """The weight whose bytes the parameter ``name`` holds, or the scales of; None: it is another parameter."""
    layer, _, own = name.rpartition(".")
    module, weight = model.get_submodule(layer), own.removesuffix(ENDING)
    return f"{layer}.{weight}" if isinstance(module, Quantised) and weight in module.blocks else None


def shapes_before(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``shapes`` of parameters as a folder holds them: those of ``model``, which has no bytes, for those of bytes."""
    packed = {name.removesuffix(ENDING) for name in shapes if is_scales(name)}
    return {
        name: tuple(model.get_parameter(name).shape) if name in packed else shape
        for name, shape in shapes.items()
        if not is_scales(name)
    }


def parameters_of(weight: str) -> tuple[str, str]:
    """The names of the parameters that hold the bytes of ``weight``."""
    return weight, f"{weight}{ENDING}"


def is_scales(name: str) -> bool:
    return name.endswith(ENDING)


def pack(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """The bytes of the parameter ``name`` out of the whole weight that it stands for."""
    packed, scales = quantise(as_rows(model.get_submodule(name.rpartition(".")[0]), whole))
    return scales if is_scales(name) else packed


def unpack(model: nn.Module, weight: str, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The whole weight that stands for its bytes, in fp32 and the form of its layer's class."""
    layer, _, own = weight.rpartition(".")
    module = model.get_submodule(layer)
    assert isinstance(module, Quantised)
    return as_rows(module, dequantise(packed, scales, module.blocks[own])).contiguous()
