"""QLoRA: adapters next to frozen matrices that are stored as bytes of four-bit NF4 weights.

A layer's ``weight`` holds the bytes, and ``weight_scales`` the scales of their scales (packed experts have such a pair
for each weight). Both are parameters without gradients, so every axis cuts, shards and gathers them as bytes. Forward
and backward pass dequantise one matrix at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.low_rank import (
    WEIGHTS,
    GroupedExperts,
    LoraConv1D,
    LoraExperts,
    LoraLayer,
    LoraLinear,
    as_rows,
)

BLOCK, GROUP = 64, 256
"""Weights that share a scale, and scales that share a second scale."""
# bitsandbytes' table: quantiles of a normal distribution, its section 3.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True)
class Block:
    """Part of a matrix in a tensor of bytes.

    Attributes:
        inputs: inputs of the whole matrix.
        rows: ranges of outputs, None for all.
        columns: range of inputs, multiples of 64.
    """

    inputs: int
    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[tuple[int, int], ...] | None = None

    def groups(self, outputs: int, device: torch.device) -> torch.Tensor:
        """Group number of each local scale, (outputs, blocks)."""
        rows = _positions(self.rows or ((0, outputs),), device)
        columns = _positions([(a // BLOCK, b // BLOCK) for a, b in self.columns or ((0, self.inputs),)], device)
        return (rows.unsqueeze(1) * (self.inputs // BLOCK) + columns) // GROUP


def _positions(ranges: object, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])  # type: ignore[attr-defined]


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the results of :func:`quantise` for weights (..., outputs, inputs)."""
    *before, outputs, inputs = shape
    groups = -(-outputs * inputs // BLOCK // GROUP)
    return (*before, outputs, inputs // 2 + inputs // BLOCK), (*before, 4 * (1 + groups))


def packed_ranges(inputs: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Byte ranges in a row of the inputs ``start`` to ``stop``, multiples of 64."""
    scales = inputs // 2
    return [(start // 2, stop // 2), (scales + start // BLOCK, scales + stop // BLOCK)]


@torch.no_grad()
def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of ``weight``, (..., outputs, inputs), and the fp32 scales of its scales, as bytes."""
    if weight.dim() == 3:
        parts = [quantise(matrix) for matrix in weight]
        return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    outputs, inputs = weight.shape
    blocks = weight.to(torch.float32).reshape(-1, BLOCK)
    largest = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = _nearest(blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(1), levels).view(outputs, inputs)
    # In fp32 the mean would depend on the number of threads.
    offset = largest.double().mean().to(torch.float32)
    shifted = largest - offset
    whole = shifted.numel() // GROUP * GROUP
    groups = [shifted[:whole].view(-1, GROUP), *([shifted[whole:].unsqueeze(0)] if whole < shifted.numel() else [])]
    tops = [group.abs().amax(1) for group in groups]
    table = _dynamic().to(weight.device)
    scaled = [groups[0] * (1.0 / tops[0].clamp(min=1e-38)).unsqueeze(1)]
    scaled += [group / top.clamp(min=1e-38).unsqueeze(1) for group, top in zip(groups[1:], tops[1:], strict=True)]
    scales = torch.cat([_nearest(group, table).flatten() for group in scaled]).view(outputs, -1)
    bytes_ = torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales], 1)
    return bytes_, torch.cat([offset.unsqueeze(0), *tops]).view(torch.uint8)


@torch.no_grad()
def dequantise(packed: torch.Tensor, tops: torch.Tensor, block: Block) -> torch.Tensor:
    """Weights in fp32, (..., outputs, inputs), from the part ``block`` of :func:`quantise`'s bytes."""
    outputs, width = packed.shape[-2:]
    inputs = width * 2 * BLOCK // (BLOCK + 2)
    codes, scales = packed[..., : inputs // 2], packed[..., inputs // 2 :]
    fp32 = tops.clone().view(torch.float32)
    group_scales = fp32[..., 1:][..., block.groups(outputs, packed.device)]
    largest = _dynamic().to(packed.device)[scales.int()] * group_scales + fp32[..., :1].unsqueeze(-1)
    values = F.embedding(codes.int(), _pairs().to(packed.device))
    return values.view(*packed.shape[:-1], -1, BLOCK).mul_(largest.unsqueeze(-1)).flatten(-2)


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(values.clamp(-1, 1), (table[:-1] + table[1:]) / 2).to(torch.uint8)


@functools.cache
def _pairs() -> torch.Tensor:
    """Two levels for each byte of codes."""
    return torch.cartesian_prod(torch.tensor(LEVELS), torch.tensor(LEVELS))


@functools.cache
def _dynamic() -> torch.Tensor:
    """256 levels of a scale: a sign, an exponent of base ten, a fraction (Dettmers 2016, arXiv:1511.04561)."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        levels += [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(levels))


ENDING = "_scales"
"""Suffix of the parameter with the fp32 scales of a weight's scales."""


class _Product(torch.autograd.Function):
    """x @ weight.T without a gradient of the weight; ``counts`` are the rows of x for each of several matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, block: Block, counts: list[int] | None
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.rest = block, counts
        return _dequantised_products(F.linear, x, packed, scales, block, counts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _dequantised_products(torch.matmul, grad, *ctx.saved_tensors, *ctx.rest), None, None, None, None


def _dequantised_products(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    block: Block,
    counts: list[int] | None,
) -> torch.Tensor:
    """``product`` of x, or of each group of its rows, with its matrix. Dequantises one matrix at a time."""
    if counts is None:
        return product(x, dequantise(packed, scales, block).to(x.dtype))
    results = []
    for rows, codes, tops in zip(x.split(counts), packed, scales, strict=True):
        if len(rows):
            results.append(product(rows, dequantise(codes, tops, block).to(x.dtype)))
    return torch.cat(results)


class Quantised(nn.Module):
    """Module with frozen four-bit weights, even if its class stores them transposed."""

    blocks: dict[str, Block]
    """Local part of each weight by name."""

    def quantise(self, name: str) -> None:
        """Replaces a weight, in the form of the module's class, by its bytes."""
        rows = as_rows(self, getattr(self, name))
        self.blocks = {**self.__dict__.get("blocks", {}), name: Block(rows.shape[-1])}
        if rows.is_meta:
            shapes = packed_shapes(tuple(rows.shape))
            tensors = [torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes]
        else:
            tensors = list(quantise(rows))
        for attribute, value in zip(packed_parameters(name), tensors, strict=True):
            self._parameters[attribute] = nn.Parameter(value, requires_grad=False)

    def nf4_product(self, name: str, x: torch.Tensor, counts: list[int] | None = None) -> torch.Tensor:
        packed, scales = (getattr(self, attribute) for attribute in packed_parameters(name))
        result: torch.Tensor = _Product.apply(x, packed, scales, self.blocks[name], counts)
        return result

    def keep_part(self, name: str, outputs: bool, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Restricts a weight to ``ranges`` of outputs or inputs; returns the ranges of their bytes."""
        inputs = self.blocks[name].inputs
        if outputs:
            self.blocks[name] = Block(inputs, rows=tuple(ranges))
            return ranges
        self.blocks[name] = Block(inputs, columns=tuple(ranges))
        [(start, stop)] = ranges
        return packed_ranges(inputs, start, stop)


class Nf4Layer(Quantised):
    """Linear layer with a four-bit weight."""

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return self.nf4_product("weight", x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias: Any = self.bias
        return self.product(x) if bias is None else self.product(x) + bias


class Nf4Experts(Quantised, GroupedExperts):
    """Packed experts; each matrix is quantised separately."""

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
    """Quantised class of a linear layer or of packed experts, adapted or not."""
    if plain in QUANTISED:
        return QUANTISED[plain]
    bases = plain.__bases__ if issubclass(plain, LoraExperts) else (plain,)
    return type(f"Nf4{plain.__name__}", (Nf4Experts, *bases), {})


def quantise_module(name: str, module: nn.Module) -> None:
    """Replaces frozen weights of a linear or of experts by bytes; ConfigError if inputs are no whole blocks."""
    parameters = module._parameters
    weights = [weight for weight in ("weight", *WEIGHTS) if weight in parameters]
    frozen = [weight for weight in weights if not module.get_parameter(weight).requires_grad]
    for weight in frozen:
        inputs = as_rows(module, module.get_parameter(weight)).shape[-1]
        if inputs % BLOCK:
            what = name if weight == "weight" else f"{name}.{weight}"
            raise ConfigError("peft", "qlora", "use peft=lora", f"{what} has {inputs} inputs, no multiple of {BLOCK}")
    if frozen:
        plain: Any = type(module)
        module.__class__ = quantised_class(plain)
        assert isinstance(module, Quantised)
        for weight in frozen:
            module.quantise(weight)


def packed_weight(model: nn.Module, name: str) -> str | None:
    """Weight whose bytes or scales the parameter ``name`` holds; None for other parameters."""
    layer, _, attribute = name.rpartition(".")
    module, weight = model.get_submodule(layer), attribute.removesuffix(ENDING)
    return f"{layer}.{weight}" if isinstance(module, Quantised) and weight in module.blocks else None


def unquantised_shapes(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``shapes`` with those of bytes replaced by the shapes in ``model``, which is not quantised."""
    packed = {name.removesuffix(ENDING) for name in shapes if is_scales(name)}
    return {
        name: tuple(model.get_parameter(name).shape) if name in packed else shape
        for name, shape in shapes.items()
        if not is_scales(name)
    }


def packed_parameters(weight: str) -> tuple[str, str]:
    """Names of the parameters with the bytes and scales of ``weight``."""
    return weight, f"{weight}{ENDING}"


def is_scales(name: str) -> bool:
    return name.endswith(ENDING)


def pack(model: nn.Module, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Bytes of the parameter ``name`` from the whole weight."""
    packed, scales = quantise(as_rows(model.get_submodule(name.rpartition(".")[0]), whole))
    return scales if is_scales(name) else packed


def unpack(model: nn.Module, weight: str, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Whole weight from its bytes, in fp32 and the form of its layer's class."""
    layer, _, attribute = weight.rpartition(".")
    module = model.get_submodule(layer)
    assert isinstance(module, Quantised)
    return as_rows(module, dequantise(packed, scales, module.blocks[attribute])).contiguous()
