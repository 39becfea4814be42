"""Weights of four bits: NF4 with double quantisation (Dettmers et al. 2023, "QLoRA", arXiv:2305.14314).

Codes, scales and values are those of the bitsandbytes package (0.50). A matrix of (outputs, inputs) is kept as bytes of
(outputs, inputs / 2 + inputs / 64): of each row the codes, two a byte, then the eight-bit scales of its blocks of 64.
Those are in turn scaled by groups of 256 over the whole matrix, in fp32 beside it. So rows, and multiples of 64 of its
inputs, can be cut like those of any parameter.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK, GROUP = 64, 256
"""Weights that share a scale; scales that share one."""
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
    """Which part of a matrix a tensor of bytes holds.

    Attributes:
        inputs: of the whole matrix.
        rows: ranges of outputs, None for all of them.
        columns: range of inputs, multiples of 64.
    """

    inputs: int
    rows: tuple[tuple[int, int], ...] | None = None
    columns: tuple[tuple[int, int], ...] | None = None

    def groups(self, outputs: int, device: torch.device) -> torch.Tensor:
        """For every scale held, (outputs, blocks), the number of its group."""
        rows = _positions(self.rows or ((0, outputs),), device)
        columns = _positions([(a // BLOCK, b // BLOCK) for a, b in self.columns or ((0, self.inputs),)], device)
        return (rows.unsqueeze(1) * (self.inputs // BLOCK) + columns) // GROUP


def _positions(ranges: object, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])  # type: ignore[attr-defined]


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the bytes that :func:`quantise` gives for weights (..., outputs, inputs)."""
    *before, outputs, inputs = shape
    groups = -(-outputs * inputs // BLOCK // GROUP)
    return (*before, outputs, inputs // 2 + inputs // BLOCK), (*before, 4 * (1 + groups))


def packed_ranges(inputs: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Where the bytes of the inputs ``start`` to ``stop``, multiples of 64, lie in a row."""
    scales = inputs // 2
    return [(start // 2, stop // 2), (scales + start // BLOCK, scales + stop // BLOCK)]


@torch.no_grad()
def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of ``weight``, (..., outputs, inputs), and the fp32 values, as bytes, that its scales are scaled by."""
    if weight.dim() == 3:
        parts = [quantise(one) for one in weight]
        return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    outputs, inputs = weight.shape
    blocks = weight.to(torch.float32).reshape(-1, BLOCK)
    largest = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = _nearest(blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(1), levels).view(outputs, inputs)
    # The mean in float64: in fp32 it depends on the number of threads.
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
    """The weights in fp32, (..., outputs, inputs), of the part ``block`` of :func:`quantise`'s bytes."""
    outputs, width = packed.shape[-2:]
    inputs = width * 2 * BLOCK // (BLOCK + 2)
    codes, scales = packed[..., : inputs // 2], packed[..., inputs // 2 :]
    fp32 = tops.clone().view(torch.float32)
    of_groups = fp32[..., 1:][..., block.groups(outputs, packed.device)]
    largest = _dynamic().to(packed.device)[scales.int()] * of_groups + fp32[..., :1].unsqueeze(-1)
    values = F.embedding(codes.int(), _pairs().to(packed.device))
    return values.view(*packed.shape[:-1], -1, BLOCK).mul_(largest.unsqueeze(-1)).flatten(-2)


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(values.clamp(-1, 1), (table[:-1] + table[1:]) / 2).to(torch.uint8)


@functools.cache
def _pairs() -> torch.Tensor:
    """The two levels that each byte of codes stands for."""
    return torch.cartesian_prod(torch.tensor(LEVELS), torch.tensor(LEVELS))


@functools.cache
def _dynamic() -> torch.Tensor:
    """The 256 levels of a scale: a sign, an exponent of base ten, a fraction (Dettmers 2016, arXiv:1511.04561)."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = (10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        levels += [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(levels))
