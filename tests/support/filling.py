"""Fills a model whose parameters were cut from one process's values, and puts its tensors together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mgpu_pipe.models.build import materialise_buffers, recipe_of
from mgpu_pipe.models.local_shards import TensorPart, fill_parameters, fragments, layouts_of, local_tensor

OwnedShard = tuple[str, tuple[int, ...], torch.Tensor]
"""The unsharded parameter's name, the offsets in it, the values."""


def fill(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Give a meta ``model`` its parts of ``whole``, by name of the unsharded model, and its buffers."""

    def values(name: str, held: TensorPart) -> torch.Tensor:
        assert tuple(whole[name].shape) == held.whole, name
        return whole[name][_block(held.offsets, held.shape)].clone()

    fill_parameters(model, values, "cpu")
    materialise_buffers(model, recipe_of(model), "cpu")  # type: ignore[arg-type]


def owned_shards(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[OwnedShard]:
    """This rank's local shards of ``tensors``, by local parameter name, that no other rank of the axis counts."""
    layouts = layouts_of(model)
    return [
        (layout.name if layout else name, fragment.offsets, fragment.view(local_tensor(tensor)).clone())
        for name, tensor in tensors.items()
        for layout in (layouts.get(name),)
        if layout is None or layout.owned
        for fragment in fragments(tensor, layout)
    ]


def assembled(shards: Iterable[OwnedShard], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors from all ranks' local shards; every element must be there exactly once."""
    result = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    count = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for name, offsets, values in shards:
        block = _block(offsets, tuple(values.shape))
        result[name][block] = values
        count[name][block] += 1
    wrong = [name for name, times in count.items() if not bool((times == 1).all())]
    assert not wrong, f"every element has one owner: {wrong}"
    return result


def _block(offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at, at + length) for at, length in zip(offsets, shape, strict=True))
