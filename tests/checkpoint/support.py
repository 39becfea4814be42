"""A small model's tensors, cut in the ways that engines cut them, and files to save them with.

The oracle of every cut is plain slicing of the whole tensor, which every process makes from the same seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mgpu_pipe.checkpoint.live_tensors import select
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.strict_json import canonical
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice

Cut = Callable[[str, tuple[int, ...], int, int], list[TensorSlice]]


def model_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of several shapes; "embed.weight" spans two chunks of 4 MiB."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (2100, 512), "qkv.weight": (96, 32), "norm.weight": (33,), "experts": (4, 6, 10)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def optimizer_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """AdamW's state of those weights: two moments, and a scalar step that all ranks hold."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in model_tensors(seed + 1).items():
        found[f"{name}/exp_avg"] = weight * 0.1
        found[f"{name}/exp_avg_sq"] = weight.square()
        found[f"{name}/step"] = torch.tensor(float(seed + 7))
    return found


def whole(name: str, shape: tuple[int, ...], rank: int, world_size: int) -> list[TensorSlice]:
    return [TensorSlice.whole(name, shape)]


def rows(name: str, shape: tuple[int, ...], rank: int, world_size: int) -> list[TensorSlice]:
    """FSDP2: dim 0 cut as torch.chunk does, so the last ranks' shards may be short or empty."""
    return _along(name, shape, rank, world_size, 0) if shape else whole(name, shape, rank, world_size)


def columns(name: str, shape: tuple[int, ...], rank: int, world_size: int) -> list[TensorSlice]:
    """Tensor parallelism along the last dim."""
    return _along(name, shape, rank, world_size, len(shape) - 1) if shape else whole(name, shape, rank, world_size)


def fused(name: str, shape: tuple[int, ...], rank: int, world_size: int) -> list[TensorSlice]:
    """Tensor parallelism of a fused qkv: a share of the rows of each third."""
    if not shape or shape[0] == 0 or shape[0] % 3:
        return columns(name, shape, rank, world_size)
    third = shape[0] // 3
    parts = [_along(name, (third, *shape[1:]), rank, world_size, 0)[0] for _ in range(3)]
    return [TensorSlice(name, (i * third + p.offsets[0], *p.offsets[1:]), p.shape) for i, p in enumerate(parts)]


def flat(name: str, shape: tuple[int, ...], rank: int, world_size: int) -> list[TensorSlice]:
    """ZeRO: a range of the flattened matrix, which is the end of a row, whole rows, and the start of a row."""
    if len(shape) != 2 or 0 in shape:
        return rows(name, shape, rank, world_size)
    total, width = shape[0] * shape[1], shape[1]
    low, high = rank * total // world_size, (rank + 1) * total // world_size
    tensor_slices: list[TensorSlice] = []
    while low < high:
        row, column = divmod(low, width)
        if column == 0 and high - low >= width:
            count = (high - low) // width
            tensor_slices.append(TensorSlice(name, (row, 0), (count, width)))
            low += count * width
        else:
            count = min(width - column, high - low)
            tensor_slices.append(TensorSlice(name, (row, column), (1, count)))
            low += count
    return tensor_slices


CUTS: dict[str, Cut] = {"whole": whole, "rows": rows, "columns": columns, "fused": fused, "flat": flat}


def _along(name: str, shape: tuple[int, ...], rank: int, world_size: int, dim: int) -> list[TensorSlice]:
    size = -(-shape[dim] // world_size)
    low = min(rank * size, shape[dim])
    high = min(low + size, shape[dim])
    offsets = tuple(low if d == dim else 0 for d in range(len(shape)))
    return [TensorSlice(name, offsets, tuple(high - low if d == dim else n for d, n in enumerate(shape)))]


def cut_shards(tensors: dict[str, torch.Tensor], cut: Cut, rank: int = 0, world_size: int = 1) -> list[LocalShard]:
    """This rank's local shards, as views of the whole tensors."""
    found: list[LocalShard] = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for tensor_slice in cut(name, shape, rank, world_size):
            found.append(LocalShard(tensor_slice, shape, select(tensor, tensor_slice.offsets, tensor_slice.shape)))
    return found


def empty_like(shards: list[LocalShard]) -> list[LocalShard]:
    """The same tensor slices over tensors full of a value that no test saves."""
    return [
        LocalShard(p.tensor_slice, p.global_shape, torch.full(p.tensor_slice.shape, -77.0).to(p.tensor.dtype))
        for p in shards
    ]


def config_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    if not path.exists():
        path.write_text("seed: 1234\n")
    return path


def save_alone(root: Path, step: int, seed: int | None = None) -> Path:
    """A checkpoint of one process; other seeds are other values."""
    seed = step if seed is None else seed
    return save(
        root,
        step,
        cut_shards(model_tensors(seed), whole),
        cut_shards(optimizer_tensors(seed), whole),
        {"samples_consumed": step * 32, "learning_rate": 0.1 + 0.2},
        config_file(root.parent),
    )


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as an enemy would: with a root hash that fits."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["root"]
    change(manifest)
    path.write_bytes(canonical({**manifest, "root": hashlib.sha256(canonical(manifest)).hexdigest()}))
