"""Llama 4's own image processor, with torch's functions in place of torchvision's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def _pad(images: torch.Tensor, padding: Sequence[int], fill: object) -> torch.Tensor:
    left, top, right, bottom = padding
    return F.pad(images, (left, right, top, bottom))


@contextmanager
def _stubbed() -> Iterator[None]:
    """Modules that the processor's file imports."""
    modules = {name: ModuleType(name) for name in NAMES}
    vars(modules[NAMES[-1]])["functional"] = SimpleNamespace(pad=_pad)
    before = {name: sys.modules.get(name) for name in NAMES}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@cache
def maker() -> Any:
    """The module of the processor."""

    with _stubbed():
        import transformers.models.llama4.image_processing_llama4 as module
    return module


@dataclass(frozen=True)
class _Processor:
    """The methods of torchvision's backend that the processor calls; resizing by torch, or else by Pillow."""

    by_torch: bool

    def resize(self, images: torch.Tensor, size: Any, resample: int) -> torch.Tensor:
        height, width = int(size.height), int(size.width)
        if self.by_torch:
            return F.interpolate(images, (height, width), mode="bilinear", antialias=True)
        resized = [
            Image.fromarray(values.permute(1, 2, 0).numpy()).resize((width, height), resample) for values in images
        ]
        return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in resized])

    def normalize(self, images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
        means, stds = (torch.tensor(values, dtype=images.dtype)[:, None, None] for values in (mean, std))
        return images.sub(means).div_(stds)

    def rescale_and_normalize(self, *args: Any) -> Any:
        return maker().Llama4ImageProcessor.rescale_and_normalize(self, *args)


def canvases_of_maker(images: Sequence[Any], settings: dict[str, Any], by_torch: bool = False) -> dict[str, Any]:
    """Tiles of RGB pictures, (tiles, 3, size, size), and rows and columns of each picture's tiles."""
    from transformers.image_utils import SizeDict

    pixels = [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    made = maker().Llama4ImageProcessor._preprocess(
        _Processor(by_torch),
        pixels,
        do_resize=True,
        size=SizeDict(**settings["size"]),
        resample=2,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=settings["image_mean"],
        image_std=settings["image_std"],
        max_patches=settings["max_patches"],
        resize_to_max_canvas=False,
        disable_grouping=True,
        return_tensors=None,
    )
    tiles = torch.cat([values.reshape(-1, *values.shape[-3:]) for values in made["pixel_values"]]).float()
    return {"pixel_values": tiles, "aspect_ratios": [tuple(map(int, shape)) for shape in made["aspect_ratios"]]}
