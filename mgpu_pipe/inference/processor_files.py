"""The files by which transformers makes the inputs of a model that sees, beside its weights.

They are plain JSON, written without the processors themselves, some of which want torchvision to be built.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mgpu_pipe.data.image.clips import FEWEST
from mgpu_pipe.data.image.grids import GridPixels, chat_pixels
from mgpu_pipe.data.image.keys import ImageConfig, PictureChatConfig
from mgpu_pipe.data.image.parts import PartPixels
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.text.conversations import PLACE
from mgpu_pipe.families.pictures import SEE_VIDEOS, WITHOUT_SUMMARY
from mgpu_pipe.inference.load import StoredModel
from mgpu_pipe.models.fields import places_of

PICTURES, VIDEOS, ALL = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers."""


def write_processor(stored: StoredModel, out: Path) -> None:
    """Write what prepares pictures as the run did, or copy the files of the folder that the model was made from."""
    if stored.maker is not None:
        for name in (PICTURES, VIDEOS, ALL):
            if (stored.maker / name).is_file():
                shutil.copyfile(stored.maker / name, out / name)
        return
    if stored.config is None or not isinstance(stored.config.data, ImageConfig):
        return
    if not isinstance(stored.config.data, PictureChatConfig):
        pixels = Pixels.of(stored.config.data, stored.config.model)
        _write(out / PICTURES, _of_squares(pixels, "CLIPImageProcessor"))  # it can do all that is done to a picture
        return
    pixels, model = chat_pixels(stored.config.data, stored.config.model), stored.model.config
    if isinstance(pixels, GridPixels):  # its processor as a whole wants torchvision, and tokens of its own
        _write(out / PICTURES, _of_grid(pixels))
        if model.model_type in SEE_VIDEOS:
            _write(out / VIDEOS, _of_videos(pixels, stored.config.data))
        return
    kind = type(stored.model).__name__.removesuffix("ForConditionalGeneration")
    if isinstance(pixels, PartPixels):
        _write(out / PICTURES, _of_parts(pixels, kind))
        _write(out / ALL, {"processor_class": f"{kind}Processor", "image_seq_len": pixels.parts.tokens})
        return
    pictures, vision = _of_squares(pixels, "LlavaImageProcessor"), model.vision_config
    if kind == "PaliGemma":
        pictures |= {"image_processor_type": "SiglipImageProcessor", "image_seq_length": places_of(model)}
        _write(out / PICTURES, pictures)
        _write(out / ALL, {"processor_class": "PaliGemmaProcessor"})
        return
    whole = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": model.vision_feature_select_strategy,
        "image_token": PLACE,
        "num_additional_image_tokens": int(vision.model_type not in WITHOUT_SUMMARY),
    }
    for name, content in ((PICTURES, pictures), (ALL, whole)):
        _write(out / name, content)


def _of_squares(pixels: Pixels, kind: str) -> dict[str, Any]:
    side, crops = {"height": pixels.size, "width": pixels.size}, pixels.fit == "crop"
    return {
        "image_processor_type": kind,
        "size": {"shortest_edge": pixels.size} if crops else side,
        "crop_size": side,
        "do_center_crop": crops,
        "resample": BILINEAR,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "do_convert_rgb": pixels.channels == 3,
    }


def _of_grid(pixels: GridPixels) -> dict[str, Any]:
    grid = pixels.grid
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": grid.least, "longest_edge": grid.most},
        "patch_size": grid.patch,
        "merge_size": grid.merge,
        "temporal_patch_size": grid.frames,
        "resample": BICUBIC,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "do_convert_rgb": pixels.channels == 3,
    }


def _of_videos(pixels: GridPixels, data: PictureChatConfig) -> dict[str, Any]:
    grid, frames = pixels.grid, {"fps": data.frames_per_second, "min_frames": FEWEST, "max_frames": data.max_frames}
    common = {**_of_grid(pixels), **frames, "do_sample_frames": True, "cap_pixels_per_frame": grid.told}
    del common["image_processor_type"]
    if not grid.told:
        return {"video_processor_type": "Qwen2VLVideoProcessor", **common}
    most = {  # it bounds a video, and each frame by a number of places
        "size": {"shortest_edge": grid.least, "longest_edge": grid.most * data.max_frames},
        "max_video_tokens": grid.most // grid.side**2,
    }
    return {"video_processor_type": "Qwen3VLVideoProcessor", **common, **most}


def _of_parts(pixels: PartPixels, kind: str) -> dict[str, Any]:
    return {
        "image_processor_type": f"{kind}ImageProcessor",
        "size": {"longest_edge": pixels.parts.longest},
        "max_image_size": {"longest_edge": pixels.size},
        "do_image_splitting": pixels.parts.splits,
        "resample": LANCZOS,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "do_convert_rgb": pixels.channels == 3,
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
