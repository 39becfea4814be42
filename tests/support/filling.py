"""Fills a model whose parameters were cut from one process's values, by the layouts it recorded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from mgpu_pipe.models.build import materialise_buffers, recipe_of
from mgpu_pipe.models.layout import fragments, layouts_of, unsharded_shape
from mgpu_pipe.models.parts import fill_parameters


def fill(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Give a meta ``model`` its parts of ``whole``, by name of the unsharded model, and its buffers."""
    layouts, local = layouts_of(model), dict(model.named_parameters())

    def values(name: str, _: object) -> torch.Tensor:
        layout, meta = layouts.get(name), local[name]
        value = whole[layout.name if layout else name]
        assert tuple(value.shape) == unsharded_shape(meta, layout), name
        part = torch.full(meta.shape, float("nan"))
        for fragment in fragments(meta, layout):
            block = tuple(slice(at, at + length) for at, length in zip(fragment.offsets, fragment.shape, strict=True))
            fragment.of(part).copy_(value[block])
        return part

    fill_parameters(model, values, "cpu")
    materialise_buffers(model, recipe_of(model), "cpu")  # type: ignore[arg-type]


def assembled(parts: list[tuple[object, Mapping[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The whole tensors from every rank's layouts and local tensors; where ranks hold the same, the owner's."""
    result: dict[str, torch.Tensor] = {}
    counted: dict[str, torch.Tensor] = {}
    for layouts, tensors in parts:
        for name, tensor in tensors.items():
            layout = layouts.get(name)  # type: ignore[attr-defined]
            if layout is not None and not layout.owned:
                continue
            known = layout.name if layout else name
            shape = unsharded_shape(tensor, layout)
            result.setdefault(known, torch.zeros(shape))
            counted.setdefault(known, torch.zeros(shape))
            for fragment in fragments(tensor, layout):
                block = tuple(slice(a, a + n) for a, n in zip(fragment.offsets, fragment.shape, strict=True))
                result[known][block] = fragment.of(tensor)
                counted[known][block] += 1
    assert all(bool((count == 1).all()) for count in counted.values()), "every element has one owner"
    return result
