"""QLoRA: adapters beside frozen matrices that are kept as bytes of four-bit weights (:mod:`.nf4`).

A layer's ``weight`` is its bytes, and ``weight_scales`` what their scales are scaled by: both are parameters that never
have a gradient, so that every axis cuts, shards and gathers them as bytes. Forward and backward pass dequantise them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.low_rank import LoraConv1D, LoraLayer, LoraLinear, as_rows
from mgpu_pipe.models.adapters.nf4 import BLOCK, Block, dequantise, packed_ranges, packed_shapes, quantise

SCALES = "weight_scales"


class _Product(torch.autograd.Function):
    """x @ weight.T, whose backward pass makes no gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.block = block
        return F.linear(x, dequantise(packed, scales, block).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        packed, scales = ctx.saved_tensors
        return grad @ dequantise(packed, scales, ctx.block).to(grad.dtype), None, None, None


class Nf4Layer(nn.Module):
    """A frozen linear layer of four-bit weights, also where its class stores them transposed."""

    weight_scales: nn.Parameter
    block: Block
    """The part of the whole matrix that is here."""

    def quantise(self) -> None:
        """Turn the weight, (outputs, inputs) in the form of the layer's class, into bytes."""
        rows = as_rows(self, getattr(self, "weight"))  # noqa: B009
        self.block = Block(rows.shape[1])
        if rows.is_meta:
            packed, scales = (
                torch.empty(s, dtype=torch.uint8, device="meta") for s in packed_shapes(tuple(rows.shape))
            )
        else:
            packed, scales = quantise(rows)
        self._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
        self._parameters[SCALES] = nn.Parameter(scales, requires_grad=False)

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Product.apply(x, self.weight, self.weight_scales, self.block)
        return result

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: Any = self.bias
        return self.product(x) if bias is None else self.product(x) + bias

    def own_part(self, outputs: bool, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Keep ``ranges`` of the outputs, or of the inputs, from now on; where their bytes lie."""
        if outputs:
            self.block = Block(self.block.inputs, rows=tuple(ranges))
            return ranges
        self.block = Block(self.block.inputs, columns=tuple(ranges))
        [(start, stop)] = ranges
        return packed_ranges(self.block.inputs, start, stop)


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


def quantise_layer(name: str, layer: nn.Module) -> None:
    """Keep the frozen weight of ``layer`` as bytes.

    Raises:
        ConfigError: its inputs are no multiple of a block.
    """
    inputs = as_rows(layer, getattr(layer, "weight")).shape[1]  # noqa: B009
    if inputs % BLOCK:
        raise ConfigError("peft", "qlora", "use peft=lora", f"{name} has {inputs} inputs, no multiple of {BLOCK}")
    layer.__class__ = QUANTISED[type(layer)]
    assert isinstance(layer, Nf4Layer)
    layer.quantise()


def packed_weight(model: nn.Module, name: str) -> str | None:
    """The weight whose bytes the parameter ``name`` holds, or the scales of; None: it is another parameter."""
    layer, _, own = name.rpartition(".")
    holds = own in ("weight", SCALES) and isinstance(model.get_submodule(layer), Nf4Layer)
    return f"{layer}.weight" if holds else None


def shapes_before(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``shapes`` of parameters as a folder holds them: those of ``model``, which has no bytes, for those of bytes."""
    packed = {name.removesuffix(SCALES) + "weight" for name in shapes if is_scales(name)}
    return {
        name: tuple(model.get_parameter(name).shape) if name in packed else shape
        for name, shape in shapes.items()
        if not is_scales(name)
    }


def parameters_of(weight: str) -> tuple[str, str]:
    """The names of the parameters that hold the bytes of ``weight``."""
    return weight, f"{weight}_scales"


def is_scales(name: str) -> bool:
    return name.rpartition(".")[2] == SCALES


def pack(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """The bytes of the parameter ``name`` out of the whole weight that it stands for."""
    layer, _, own = name.rpartition(".")
    packed, scales = quantise(as_rows(model.get_submodule(layer), whole))
    return scales if own == SCALES else packed


def unpack(model: nn.Module, weight: str, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The whole weight that stands for its bytes, in fp32 and the form of its layer's class."""
    layer = model.get_submodule(weight.rpartition(".")[0])
    assert isinstance(layer, Nf4Layer)
    return as_rows(layer, dequantise(packed, scales, layer.block)).contiguous()
