"""What an export says of pictures and recordings. Oracle: transformers' own processors, from a file to the arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoFeatureExtractor, AutoImageProcessor, CLIPImageProcessor

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.images.decode_image import decode
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.errors import MgpuError
from mgpu_pipe.inference import processor_files
from mgpu_pipe.inference.export_folder import export_folder
from mgpu_pipe.inference.open import StoredModel, read_from
from mgpu_pipe.inference.processor_files import write_processor
from mgpu_pipe.models.build import materialise, run_model
from tests.models.tiny import write_folder

THEIRS = {
    "image_processor_type": "ViTImageProcessor",
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.9, 0.8, 0.7],
    "resample": 3,
    "size": {"height": 64, "width": 64},
    "do_convert_rgb": None,
    "processor_class": "CLIPProcessor",
}
FOLDERS: dict[str, dict[str, object]] = {
    "none": {},
    "its own file": {"preprocessor_config.json": THEIRS},
    "inside of a processor's": {"processor_config.json": {"image_processor": THEIRS}},
}
OWN = ("data.mean=[0.4,0.5,0.6]", "data.std=[0.2,0.25,0.3]", "data.fit=crop")


def stored_of(folder: Path, files: Mapping[str, object], *overrides: str) -> StoredModel:
    """A run that started from a model folder with these files."""
    given = ("logger=none", *overrides)
    model = materialise(run_model(compose(given)[0]), 3, "cpu").eval()
    write_folder(model, folder)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    plain = [text for text in given if not text.startswith("model")]
    config = compose([*plain, "model=hf", f"model.path={folder}"])[0]
    twin = run_model(config).eval()
    return StoredModel(twin, read_from(model), folder, None, config, 1, maker=folder)


def seeing(folder: Path, files: Mapping[str, object], *overrides: str) -> StoredModel:
    fields = ("model.config.num_channels=3", "model.config.image_size=16")
    data = ("objective=image_classification", "data=digits")
    return stored_of(folder, files, "model=vit_tiny", *fields, *data, *overrides)


def pictures(folder: Path) -> dict[str, Path]:
    random = np.random.default_rng(0)
    colours = random.integers(0, 256, (40, 53, 4), dtype=np.uint8)
    made = {
        "RGB": Image.fromarray(colours[..., :3]),
        "RGBA": Image.fromarray(colours),
        "L": Image.fromarray(colours[..., 0]),
        "LA": Image.fromarray(colours[..., :2], "LA"),
        "palette": Image.fromarray(colours[..., :3]).quantize(16),
        "clear palette": Image.fromarray(colours[..., :3]).quantize(16),
        "CMYK": Image.fromarray(colours, "CMYK"),
        "wide": Image.fromarray(colours[:7, :, :3]),
    }
    made["clear palette"].info["transparency"] = 3
    files = {}
    for name, image in made.items():
        files[name] = folder / f"{name}.{'tif' if name == 'CMYK' else 'png'}"
        image.save(files[name])
    return files


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), OWN], ids=["the folder's", "its own"])
@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_pictures_are_prepared_as_in_the_run(
    tmp_path: Path, files: Mapping[str, object], overrides: tuple[str, ...]
) -> None:
    stored = seeing(tmp_path / "model", files, *overrides)
    assert stored.config is not None and isinstance(stored.config.data, ImageConfig)
    pixels = Pixels.from_config(stored.config.data, stored.config.model)
    mean = (0.4, 0.5, 0.6) if overrides else tuple(THEIRS["image_mean"]) if files else (0.5,) * 3  # type: ignore[arg-type]
    assert pixels.mean == mean
    (tmp_path / "out").mkdir()
    write_processor(stored, tmp_path / "out")
    processor: Any = AutoImageProcessor.from_pretrained(tmp_path / "out")
    for name, file in pictures(tmp_path).items():
        ours = pixels.array(pixels.scale(decode(file.read_bytes(), 3)))
        theirs = processor(Image.open(file), return_tensors="np")["pixel_values"][0]
        assert np.abs(ours - theirs).max() < 1e-5, name
    if "preprocessor_config.json" in files:
        assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["processor_class"]


@pytest.mark.parametrize("size", [(16, 16), (17, 40), (40, 17), (33, 34), (301, 7), (5, 211), (24, 100)])
def test_the_middle_is_the_one_that_clip_cuts(size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8))
    pixels = Pixels(16, 3, (0.5,) * 3, (0.5,) * 3, "crop")
    processor = CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size=16, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    theirs = processor(image, return_tensors="np")["pixel_values"][0]
    assert np.abs(pixels.array(pixels.scale(image)) - theirs).max() < 1e-5


STANDARD: dict[str, object] = {"do_normalize": True, "do_resize": True, "image_mean": [0.48, 0.45, 0.4]}
STANDARD |= {"image_std": [0.26, 0.25, 0.27]}
CUT = {"crop_size": 224, "do_center_crop": True, "resample": 3}
PUBLISHED: dict[str, dict[str, object]] = {
    "clip-vit-base-patch32": {"feature_extractor_type": "CLIPFeatureExtractor", **CUT, "size": 224},
    "llava-1.5": {**CUT, "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}},
    "siglip-base": {
        "image_processor_type": "SiglipImageProcessor",
        "resample": 3,
        "size": {"height": 224, "width": 224},
    },
    "swin-tiny": {"feature_extractor_type": "ViTFeatureExtractor", "resample": 3, "size": 224},
    "vit-base": {"image_processor_type": "ViTImageProcessorFast", "size": 224},
    "dinov2-base": {"image_processor_type": "BitImageProcessor", **CUT, "size": {"shortest_edge": 256}},
    "convnext-tiny": {
        "feature_extractor_type": "ConvNextFeatureExtractor",
        "resample": 3,
        "size": 224,
        "crop_pct": 0.9,
    },
    "convnext-384": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
    "deit-base": {"feature_extractor_type": "DeiTFeatureExtractor", **CUT, "size": 256},
    "beit-base": {"feature_extractor_type": "BeitFeatureExtractor", **CUT, "do_center_crop": False, "size": 224},
    "of lists": {"image_processor_type": "ViTImageProcessor", "size": [224, 224]},
    "cut by lists": {"image_processor_type": "CLIPImageProcessor", **CUT, "size": [256, 256], "crop_size": [224, 224]},
    "-1 to 1": {"image_processor_type": "ViTImageProcessor", "size": 224, "rescale_factor": 1 / 127.5},
    "0 to 1": {"image_processor_type": "ViTImageProcessor", "size": 224, "do_normalize": False},
    "0 to 255": {"image_processor_type": "BitImageProcessor", "size": 224, "do_rescale": False},
}
"""What is in the preprocessor_config.json of published models."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_pictures_are_prepared_as_a_published_folder_states(tmp_path: Path, name: str) -> None:
    import transformers

    settings, side = {**STANDARD, **PUBLISHED[name]}, 384 if name.endswith("384") else 224
    kind = str(settings.get("image_processor_type") or settings["feature_extractor_type"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "image_size": side}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    config = compose(["objective=image_classification", "data=digits", "model=hf", f"model.path={tmp_path}"])[0]
    pixels = Pixels.from_config(config.data, config.model)  # type: ignore[arg-type]
    stem = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    processor = getattr(transformers, f"{stem}Pil").from_pretrained(tmp_path)
    written = CLIPImageProcessor(**processor_files._square_settings(pixels, "CLIPImageProcessor"))
    for size in ((301, 217), (224, 224), (100, 480)):
        image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8))
        ours, most = pixels.array(pixels.scale(image)), float(1e-6 / min(pixels.std))
        for theirs in (processor, written):
            assert np.abs(ours - theirs(image, return_tensors="np")["pixel_values"][0]).max() < most


@pytest.mark.slow
def test_an_export_from_a_folder_is_checked_from_a_file_to_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = seeing(tmp_path / "model", FOLDERS["its own file"], *OWN)
    export_folder(stored, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["image_mean"] == [0.4, 0.5, 0.6]

    def other(pixels: Pixels, kind: str) -> dict[str, Any]:
        return {**plain(pixels, kind), "do_convert_rgb": True, "image_mean": [0.41, 0.5, 0.6]}

    plain = processor_files._square_settings
    monkeypatch.setattr(processor_files, "_square_settings", other)
    with pytest.raises(MgpuError, match="the processor makes other pixel_values of a file than the run"):
        export_folder(seeing(tmp_path / "second", {}, *OWN), tmp_path / "other")
    assert not (tmp_path / "other").exists()


HEARD = {
    "wav2vec2": ("model=wav2vec2_tiny", "objective=ctc"),
    "whisper": ("model=whisper_tiny", "objective=speech_seq2seq"),
}
EXTRACTORS: dict[str, dict[str, object]] = {
    "none": {},
    "its own file": {"preprocessor_config.json": {"sampling_rate": 8000, "do_normalize": False}},
    "inside of a processor's": {
        "processor_config.json": {"feature_extractor": {"sampling_rate": 8000, "do_normalize": False}}
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("files", EXTRACTORS.values(), ids=EXTRACTORS)
@pytest.mark.parametrize("kind", HEARD)
def test_recordings_are_prepared_as_in_the_run(tmp_path: Path, files: Mapping[str, object], kind: str) -> None:
    stored = stored_of(tmp_path / "model", files, *HEARD[kind], "data=spoken_digits")
    config: RunConfig = stored.config  # type: ignore[assignment]
    sound = Sound.from_config(config.data, config.model)  # type: ignore[arg-type]
    assert sound.rate == (8000 if files else 16000)
    (tmp_path / "out").mkdir()
    write_processor(stored, tmp_path / "out")
    extractor: Any = AutoFeatureExtractor.from_pretrained(tmp_path / "out")
    wave = np.random.default_rng(0).normal(0.3, 0.2, 3000).astype(np.float32)
    [theirs] = extractor(wave, sampling_rate=sound.rate, return_tensors="np")[stored.model.main_input_name]
    window, fitted = LogMel.from_model(config.model, sound.rate), sound.standardise(wave)
    ours = fitted if window is None else window.extract([fitted])[0]
    assert theirs.shape == ours.shape and np.abs(ours - theirs).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEARD)
def test_an_export_of_a_model_that_hears_is_checked(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_of(tmp_path / "model", {}, *HEARD[kind], "data=spoken_digits")
    if kind == "whisper":
        export_folder(stored, tmp_path / "out")
        return
    monkeypatch.setattr(processor_files, "wave_extractor", lambda rate, normalise: wrong(rate))
    with pytest.raises(MgpuError, match="the processor makes other input_values of a file than the run"):
        export_folder(stored, tmp_path / "out")


def wrong(rate: int) -> dict[str, object]:
    return {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": rate, "do_normalize": False}


def test_a_model_that_reads_keeps_what_its_folder_has(tmp_path: Path) -> None:
    stored = stored_of(tmp_path / "model", {"processor_config.json": {"a": 1}}, "model=llama_tiny")
    (tmp_path / "out").mkdir()
    write_processor(stored, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "processor_config.json").read_text()) == {"a": 1}
    assert torch.is_tensor(stored.read("lm_head.weight", torch.float32))
