"""Chooses the picture inputs of a vision-language model."""

from __future__ import annotations

from typing import Any

from mgpu_pipe.architectures.pictures import READ_PICTURES_WHOLE, READ_QUESTIONS_WHOLE, SEE_PARTS, SEE_POOLED, SEE_ROWS
from mgpu_pipe.objectives.patch_pictures import PooledPictures, RowPictures
from mgpu_pipe.objectives.picture_inputs import (
    FixedSizePictures,
    NativeSizePictures,
    PictureInputs,
    PrefixPictures,
    TiledPictures,
    WholePictures,
)

_KINDS: dict[str, type[PictureInputs]] = {
    **dict.fromkeys(SEE_PARTS, TiledPictures),
    **dict.fromkeys(READ_QUESTIONS_WHOLE, PrefixPictures),
    **dict.fromkeys(READ_PICTURES_WHOLE, WholePictures),
    **dict.fromkeys(SEE_ROWS, RowPictures),
    **dict.fromkeys(SEE_POOLED, PooledPictures),
}


def build_picture_inputs(config: Any, packed: bool = False) -> PictureInputs:
    """The picture inputs of the model with ``config``, with conversation positions if rows are packed."""
    if hasattr(config.vision_config, "spatial_merge_size"):
        return NativeSizePictures(config, packed)
    kind: Any = _KINDS.get(config.model_type, FixedSizePictures)
    inputs: PictureInputs = kind(config, packed)
    return inputs
