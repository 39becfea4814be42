"""The image processors of Llama 4 and Phi-4 multimodal, with torch's functions in place of torchvision's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


def _pad(images: torch.Tensor, padding: Sequence[int], fill: object) -> torch.Tensor:
    left, top, right, bottom = padding
    return F.pad(images, (left, right, top, bottom), value=fill[0] if isinstance(fill, list) else 0)


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
def maker(family: str = "llama4") -> Any:
    """The module of the processor."""
    with _stubbed():
        return import_module(f"transformers.models.{family}.image_processing_{family}")


def _by_pillow(values: torch.Tensor, size: tuple[int, int], resample: int) -> torch.Tensor:
    image = Image.fromarray(values.permute(1, 2, 0).numpy()).resize(size, resample)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@dataclass(frozen=True)
class _Processor:
    """The methods of torchvision's backend that the processor calls; resizing by torch, or else by Pillow."""

    by_torch: bool

    def resize(self, images: torch.Tensor, size: Any, resample: int) -> torch.Tensor:
        height, width = int(size.height), int(size.width)
        if self.by_torch:
            return F.interpolate(images, (height, width), mode="bilinear", antialias=True)
        return torch.stack([_by_pillow(values, (width, height), resample) for values in images])

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


class _MosaicProcessor:
    """The methods of torchvision's backend that Phi-4's processor calls, and its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(maker("phi4_multimodal").Phi4MultimodalImageProcessor, name).__get__(self)

    def resize(self, image: torch.Tensor, size: Any, resample: int, antialias: bool) -> torch.Tensor:
        return F.interpolate(image[None], (size.height, size.width), mode="bicubic", antialias=antialias)[0]

    def rescale_and_normalize(self, image: torch.Tensor, *settings: Any) -> torch.Tensor:
        _, factor, _, mean, std = settings
        means, stds = (torch.tensor(values)[:, None, None] for values in (mean, std))
        return (image.float() * factor - means) / stds


def mosaics_of_maker(images: Sequence[Any], settings: dict[str, Any], by_torch: bool = False) -> dict[str, Any]:
    """The whole picture and tiles of RGB pictures, their sizes, masks of patches, and numbers of tokens."""
    from transformers.image_utils import SizeDict

    def resize(image: torch.Tensor, size: list[int]) -> torch.Tensor:
        if by_torch:
            return F.interpolate(image[None], tuple(size), mode="bilinear", antialias=True)[0]
        return _by_pillow(image, (size[1], size[0]), Image.Resampling.BILINEAR)

    maker("phi4_multimodal").tvF = SimpleNamespace(pad=_pad, resize=resize)
    pixels = [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    names = ("image_mean", "image_std", "patch_size", "dynamic_hd")
    made = maker("phi4_multimodal").Phi4MultimodalImageProcessor._preprocess(
        _MosaicProcessor(),
        pixels,
        do_resize=True,
        size=SizeDict(**settings["size"]),
        resample=3,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        return_tensors=None,
        **{name: settings[name] for name in names},
    )
    return dict(made)
