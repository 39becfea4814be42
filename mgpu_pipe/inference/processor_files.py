"""Writes the processor files of vision and speech models: transformers' settings for preparing inputs.

They are plain JSON. Writing them needs no processor class, some of which need torchvision.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mgpu_pipe.architectures.find import family_of, sight_of
from mgpu_pipe.architectures.pictures import PooledGrid
from mgpu_pipe.data.audio.alphabet import wave_extractor
from mgpu_pipe.data.audio.chat_sounds import chat_window
from mgpu_pipe.data.audio.filter_bank import window_of
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.cache import write_json
from mgpu_pipe.data.images.decode_image import MODES, decode, pillow
from mgpu_pipe.data.images.grids import GridPixels, chat_pixels
from mgpu_pipe.data.images.image_keys import ImageConfig, PictureChatConfig
from mgpu_pipe.data.images.parts import CanvasPixels, MosaicPixels, PartPixels, PatchPixels, TilePixels
from mgpu_pipe.data.images.pixels import FILTERS, Pixels
from mgpu_pipe.data.images.videos import FEWEST
from mgpu_pipe.data.model_field import NESTED, PREPROCESSOR, PROCESSOR
from mgpu_pipe.data.text.conversations import AUDIO, PLACE
from mgpu_pipe.data.text.tokenizer_folder import json_file
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.models.fields import picture_tokens
from mgpu_pipe.system.local_files import is_file

Tensors = dict[str, torch.Tensor]
PICTURE, WAVE, RATE = "file.picture", "file.wave", "file.rate"
"""Names of the probe's tensors: the bytes of a PNG; sound samples, float32; samples per second."""
PREPARED = "prepared."
"""Prefix of the name of an input that the run prepared."""
SIDES = (61, 90)
"""Height and width of the probe's picture, chosen so that squashing differs from cropping and half pixels occur."""
SECONDS = 0.5


class ProbeFiles(NamedTuple):
    """A file and the run's inputs of it; empty where a run prepares neither pictures nor recordings."""

    content: Tensors
    """Bytes or samples of the file."""
    prepared: Tensors
    """The model's inputs that the run prepares from the file, (1, ...)."""
    of_one_size: bool
    """Whether all inputs of this kind have one shape, so that these can replace others without other tokens."""


def probe_files(stored: StoredModel) -> ProbeFiles:
    """A generated picture or recording with the inputs that the run prepares from it."""
    config = stored.config
    if config is not None and isinstance(config.data, ImageConfig):
        chats = isinstance(config.data, PictureChatConfig)
        if chats and (spectrogram := chat_window(config.model)) is not None:
            wave = np.random.default_rng(0).normal(0.1, 0.2, int(SECONDS * spectrogram.rate)).astype(np.float32)
            content = {WAVE: torch.from_numpy(wave), RATE: torch.tensor(spectrogram.rate)}
            return ProbeFiles(content, {spectrogram.input_name: torch.from_numpy(spectrogram.extract([wave]))}, False)
        pixels = chat_pixels(config.data, config.model) if chats else Pixels.from_config(config.data, config.model)  # type: ignore[arg-type]
        if isinstance(pixels, CanvasPixels | MosaicPixels):  # torchvision's filter differs by a level
            return ProbeFiles({}, {}, False)
        png = _picture(pixels.channels)
        image = decode(png, pixels.channels)
        seen = pixels.scale(image)
        processed = pixels.processor_output(seen) if isinstance(pixels, PatchPixels) else pixels.clip([seen])
        values = torch.from_numpy(processed)
        content = {PICTURE: torch.frombuffer(bytearray(png), dtype=torch.uint8)}
        return ProbeFiles(content, {"pixel_values": values}, type(pixels) is Pixels)
    if config is not None and isinstance(config.data, AudioConfig):
        sound = Sound.from_config(config.data, config.model)
        window = window_of(config.model, sound.rate)
        wave = np.random.default_rng(0).normal(0.1, 0.2, int(SECONDS * sound.rate)).astype(np.float32)
        fitted = sound.standardise(wave)
        content = {WAVE: torch.from_numpy(wave), RATE: torch.tensor(sound.rate)}
        if window is None:
            return ProbeFiles(content, {"input_values": torch.from_numpy(fitted)[None]}, True)
        return ProbeFiles(content, {window.input_name: torch.from_numpy(window.extract([fitted]))}, True)
    return ProbeFiles({}, {}, False)


def _picture(channels: int) -> bytes:
    """A random PNG in colour with transparency, or in grey."""
    random, content = np.random.default_rng(0), io.BytesIO()
    coarse = random.integers(0, 256, (6, 9, 4 if channels == 3 else 1), dtype=np.uint8)
    image = pillow().fromarray(coarse.squeeze(), "RGBA" if channels == 3 else MODES[channels])
    image.resize(SIDES[::-1], pillow().Resampling.BICUBIC).save(content, "PNG")
    return content.getvalue()


VIDEOS = "video_preprocessor_config.json"
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers of resampling filters."""
STEPS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
"""Settings of every picture's preparation."""
NESTED_OF_RUNS = tuple(name for name in NESTED if name != "video_processor")
"""Parts of a processor's file of a run without videos."""
PROCESSOR_CLASS = "processor_class"
"""The field in a maker's file that names the processor of its image processor or feature extractor."""


def write_processor(stored: StoredModel, out: Path) -> None:
    """Write the settings that prepare pictures or recordings like the run. A run without either gets a copy of the
    files of the folder that the model was built from."""
    data = None if stored.config is None else stored.config.data
    if isinstance(data, (ImageConfig, AudioConfig)):
        files = (
            _picture_files(stored, data)
            if isinstance(data, ImageConfig)
            else {PREPROCESSOR: _sound_settings(stored, data)}
        )
        if stored.maker is not None:
            files = _add_maker_fields(files, stored.maker)
        for name, content in files.items():
            write_json(out / name, content)
    elif stored.maker is not None:
        for name in (PREPROCESSOR, VIDEOS, PROCESSOR):
            if is_file(stored.maker / name):
                shutil.copyfile(stored.maker / name, out / name)


def _add_maker_fields(files: dict[str, dict[str, Any]], maker: Path) -> dict[str, dict[str, Any]]:
    """``files`` with the maker's fields of the whole processor: its class, its tokens, and its settings of videos where
    the run has none."""
    of_maker = {name: json_file(maker / name) for name in (PREPROCESSOR, PROCESSOR) if is_file(maker / name)}
    processor_class = of_maker.get(PREPROCESSOR, {}).get(PROCESSOR_CLASS)
    if processor_class is not None:
        files[PREPROCESSOR] = {**files[PREPROCESSOR], PROCESSOR_CLASS: processor_class}
    written = NESTED if VIDEOS in files else NESTED_OF_RUNS
    fields = {name: value for name, value in of_maker.get(PROCESSOR, {}).items() if name not in written}
    if fields:
        files[PROCESSOR] = {**files.get(PROCESSOR, {}), **fields}
    return files


def _sound_settings(stored: StoredModel, data: AudioConfig) -> dict[str, Any]:
    assert stored.config is not None
    sound = Sound.from_config(data, stored.config.model)
    window = window_of(stored.config.model, sound.rate)
    return wave_extractor(sound.rate, sound.normalise) if window is None else dict(window.settings())


def _picture_files(stored: StoredModel, data: ImageConfig) -> dict[str, dict[str, Any]]:
    """The processor files' contents by file name."""
    assert stored.config is not None
    if not isinstance(data, PictureChatConfig):
        pixels = Pixels.from_config(data, stored.config.model)
        # CLIPImageProcessor supports every step of the run's preparation
        return {PREPROCESSOR: _square_settings(pixels, "CLIPImageProcessor")}
    pixels, model = chat_pixels(data, stored.config.model), stored.model.config
    if (window := chat_window(stored.config.model)) is not None and not window.fixed:
        assert isinstance(pixels, GridPixels | PatchPixels)
        files = {PREPROCESSOR: _grid_settings(pixels)} if isinstance(pixels, GridPixels) else _patch_files(pixels)
        sounds = {**window.settings(), "return_attention_mask": True}
        nested = {"image_processor": files[PREPROCESSOR], "feature_extractor": sounds}
        return {**files, PROCESSOR: {**files.get(PROCESSOR, {}), **nested}}
    if window is not None and window.filled:  # the whole processor needs mistral_common and its own tokens
        return {PREPROCESSOR: dict(window.settings())}
    if window is not None:
        sounds = {**window.settings(), "return_attention_mask": True, PROCESSOR_CLASS: "Qwen2AudioProcessor"}
        return {PREPROCESSOR: sounds, PROCESSOR: {PROCESSOR_CLASS: "Qwen2AudioProcessor", "audio_token": AUDIO}}
    if isinstance(pixels, GridPixels):  # the whole processor needs torchvision and its own tokens
        videos = {VIDEOS: _video_settings(pixels, data)} if sight_of(model.model_type).videos else {}
        return {PREPROCESSOR: _grid_settings(pixels), **videos}
    kind = type(stored.model).__name__.removesuffix("ForConditionalGeneration")
    if isinstance(pixels, PatchPixels):
        return _patch_files(pixels)
    if isinstance(pixels, PartPixels):
        whole = {"processor_class": f"{kind}Processor", "image_seq_len": pixels.parts.tokens}
        return {PREPROCESSOR: _parts_settings(pixels, kind), PROCESSOR: whole}
    if isinstance(pixels, CanvasPixels):
        shared = {name: getattr(model.vision_config, name) for name in ("patch_size", "pixel_shuffle_ratio")}
        return {PREPROCESSOR: _canvas_settings(pixels), PROCESSOR: {PROCESSOR_CLASS: "Llama4Processor", **shared}}
    if isinstance(pixels, MosaicPixels):
        return {PREPROCESSOR: _mosaic_settings(pixels), PROCESSOR: {PROCESSOR_CLASS: "Phi4MultimodalProcessor"}}
    if isinstance(pixels, TilePixels):
        return {PREPROCESSOR: _tile_settings(pixels), PROCESSOR: _whole_settings(kind, pixels.parts.tokens)}
    pictures, vision = _square_settings(pixels, "LlavaImageProcessor"), model.vision_config
    if kind == "Gemma3":
        pictures |= {"image_processor_type": "Gemma3ImageProcessor"}
        return {PREPROCESSOR: pictures, PROCESSOR: _whole_settings(kind, picture_tokens(model))}
    if kind == "PaliGemma":
        pictures |= {"image_processor_type": "SiglipImageProcessor", "image_seq_length": picture_tokens(model)}
        return {PREPROCESSOR: pictures, PROCESSOR: {"processor_class": "PaliGemmaProcessor"}}
    whole = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision.patch_size,
        "vision_feature_select_strategy": model.vision_feature_select_strategy,
        "image_token": PLACE,
        "num_additional_image_tokens": int(family_of(vision.model_type).has_summary),
    }
    return {PREPROCESSOR: pictures, PROCESSOR: whole}


def _whole_settings(kind: str, tokens: int) -> dict[str, Any]:
    """Settings of a processor that knows the tokens of a picture or tile."""
    return {"processor_class": f"{kind}Processor", "image_seq_length": tokens}


def _patch_files(pixels: PatchPixels) -> dict[str, dict[str, Any]]:
    grid = pixels.parts
    common = {**STEPS, "resample": BICUBIC, "do_convert_rgb": pixels.channels == 3}
    if isinstance(grid, PooledGrid):
        settings = {"patch_size": grid.patch, "pooling_kernel_size": grid.merge, "max_soft_tokens": grid.most}
        pictures = {"image_processor_type": "Gemma4ImageProcessor", **common, **settings, "do_normalize": False}
        return {PREPROCESSOR: pictures, PROCESSOR: _whole_settings("Gemma4", grid.most)}
    pictures = {
        "image_processor_type": "PixtralImageProcessor",
        **common,
        "size": {"longest_edge": grid.most},
        "patch_size": {"height": grid.side, "width": grid.side},  # as the whole processor tells it
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
    }
    places = {"patch_size": grid.patch, "spatial_merge_size": grid.merge}
    return {PREPROCESSOR: pictures, PROCESSOR: {"processor_class": "PixtralProcessor", **places}}


def _tile_settings(pixels: TilePixels) -> dict[str, Any]:
    return {
        **_square_settings(pixels, "GotOcr2ImageProcessor"),
        "resample": BICUBIC,
        "crop_to_patches": True,
        "min_patches": pixels.parts.fewest,
        "max_patches": pixels.parts.most,
    }


def _canvas_settings(pixels: CanvasPixels) -> dict[str, Any]:
    most = {"max_patches": pixels.parts.most, "resize_to_max_canvas": False}
    return {**_square_settings(pixels, "Llama4ImageProcessor"), "resample": BILINEAR, **most}


def _mosaic_settings(pixels: MosaicPixels) -> dict[str, Any]:
    most = {"dynamic_hd": pixels.parts.most, "patch_size": pixels.parts.patch}
    return {**_square_settings(pixels, "Phi4MultimodalImageProcessor"), "resample": BICUBIC, **most}


def _square_settings(pixels: Pixels, kind: str) -> dict[str, Any]:
    side, edge = {"height": pixels.size, "width": pixels.size}, pixels.edge
    crops, scaling = pixels.fit == "crop", pixels.scaling
    return {
        "image_processor_type": kind,
        **STEPS,
        "size": {"shortest_edge": edge} if crops else {"height": edge, "width": edge},
        "crop_size": side,
        "do_center_crop": crops or edge > pixels.size,
        "resample": FILTERS.index(scaling.resampling) if scaling else BILINEAR,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "do_convert_rgb": pixels.channels == 3,
    }


def _grid_settings(pixels: GridPixels) -> dict[str, Any]:
    grid = pixels.grid
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        **STEPS,
        "size": {"shortest_edge": grid.least, "longest_edge": grid.most},
        "patch_size": grid.patch,
        "merge_size": grid.merge,
        "temporal_patch_size": grid.frames,
        "resample": BICUBIC,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "do_convert_rgb": pixels.channels == 3,
    }


def _video_settings(pixels: GridPixels, data: PictureChatConfig) -> dict[str, Any]:
    grid, frames = pixels.grid, {"fps": data.frames_per_second, "min_frames": FEWEST, "max_frames": data.max_frames}
    common = {**_grid_settings(pixels), **frames, "do_sample_frames": True, "cap_pixels_per_frame": grid.has_timestamps}
    del common["image_processor_type"]
    if not grid.has_timestamps:
        return {"video_processor_type": "Qwen2VLVideoProcessor", **common}
    most = {  # bounds a video by pixels and each frame by places
        "size": {"shortest_edge": grid.least, "longest_edge": grid.most * data.max_frames},
        "max_video_tokens": grid.most // grid.side**2,
    }
    return {"video_processor_type": "Qwen3VLVideoProcessor", **common, **most}


def _parts_settings(pixels: PartPixels, kind: str) -> dict[str, Any]:
    return {
        "image_processor_type": f"{kind}ImageProcessor",
        **STEPS,
        "size": {"longest_edge": pixels.parts.longest},
        "max_image_size": {"longest_edge": pixels.size},
        "do_image_splitting": pixels.parts.splits,
        "resample": LANCZOS,
        "image_mean": list(pixels.mean),
        "image_std": list(pixels.std),
        "do_convert_rgb": pixels.channels == 3,
    }
