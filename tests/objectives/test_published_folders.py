"""Folders of vision-language models as their makers publish them. Oracle: transformers' own processors and models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mgpu_pipe.architectures.find import image_token
from mgpu_pipe.architectures.pictures import PooledGrid, RowGrid
from mgpu_pipe.architectures.tiles import Canvas, Mosaic, Tiles, mosaic_tokens
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.grids import chat_pixels
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.parts import CanvasPixels, MosaicPixels
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import builder_of
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs
from tests.objectives.harness import check_written, generated
from tests.objectives.test_vision_language import CLASS
from tests.support import small_runs
from tests.support.canvas_of_maker import canvases_of_maker, maker, mosaics_of_maker
from tests.support.pictures import SIZES, write_chats
from tests.support.sampling import one_in, sampled
from tests.support.vision_folders import FOLDERS, model_inputs, prepared_by_maker, write_folder

GIVEN = ("objective=vision_language", "logger=none", "trainer.progress=off", "model=hf", "data=picture_chats")


def chats(folder: Path, *overrides: str) -> RunConfig:
    """Conversations with none, one or two pictures, of four sizes, for the model in ``folder / "model"``."""
    write_chats(folder)
    given = (f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.seq_len=160", "data.validation_fraction=0.4", "optimizer.lr=1e-3", "data.packing=none")
    steps = ("trainer.max_steps=2", "data.global_batch_size=4", "data.num_workers=0")
    path = () if any(word.startswith("model.path=") for word in overrides) else (f"model.path={folder / 'model'}",)
    return compose([*GIVEN, *path, *given, *more, *steps, *overrides])[0]


run = partial(small_runs.run, chats)


def transformers_class(family: str) -> Any:
    """transformers' class of a family's model. Eager attention: Phi-4's tower says that it is causal to the other."""
    import transformers

    return getattr(transformers, builder_of(family, CLASS))


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form of transformers' processors."""
    from mgpu_pipe.data.text.conversations import as_parts

    return [{**message, "content": as_parts(message["content"])} for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("family", one_in(2, list(FOLDERS)))
def test_rows_and_logits_are_those_of_the_makers_processor(family: str, tmp_path: Path) -> None:
    folder = write_folder(family, tmp_path / "model")
    config = chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = prepare(config)
    samples, every = prepared.open(config, "train"), np.arange(len(SIZES) + 2)
    batch = samples.batch(every, every)
    shown = [[name] for name in SIZES] + [["wide", "high"], []]
    rows = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    model = transformers_class(family).from_pretrained(folder, attn_implementation="eager").eval()
    kind = build_picture_inputs(build_meta(config.model, CLASS).config)
    with torch.no_grad():
        logits = model(**kind.inputs(batch)).logits
    for row, names in enumerate(shown):
        images = [Image.open(tmp_path / f"{name}.png") for name in names]
        made = prepared_by_maker(family, folder, in_parts(rows[row]), images)
        ids = torch.tensor([made.pop("input_ids")])
        assert batch["input_ids"][row, : ids.shape[1]].tolist() == ids[0].tolist()
        made = model_inputs(family, made, ids == image_token(model.config))
        if family == "mistral3" and names == ["small"]:
            continue  # of one place, for which transformers' model fails
        with torch.no_grad():
            alone = model(input_ids=ids, attention_mask=torch.ones_like(ids), **made).logits[0]
        assert torch.allclose(logits[row, : ids.shape[1]], alone, rtol=0, atol=2e-5)


def test_crops_beside_a_picture_are_refused(tmp_path: Path) -> None:
    folder = write_folder("gemma3", tmp_path / "model")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "do_pan_and_scan": True}))
    config = chats(tmp_path)
    with pytest.raises(ConfigError, match="crops next to each picture; set do_pan_and_scan to false"):
        chat_pixels(config.data, config.model)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["internvl", "mistral3", "gemma4", "llama4", "phi4_multimodal"])
def test_a_changed_picture_keeps_its_places(model: str) -> None:
    changes = ("data.random_crop=0.2", "data.flip=true", "data.augment.crop_area=[0.1,0.3]")
    config = compose(["objective=vision_language", f"model={model}_tiny", "data=digit_questions", *changes])[0]
    assert isinstance(config.data, PictureChatConfig)
    pixels: Any = chat_pixels(config.data, config.model)
    for side in ((40, 12), (9, 70)):
        image = Image.new("RGB" if pixels.channels == 3 else "L", side)
        whole, changed = pixels.scale(image), pixels.augment(image, config.data, np.random.default_rng(0))
        assert pixels.clip([changed]).shape == pixels.clip([whole]).shape


@pytest.mark.parametrize(("fewest", "most"), [(1, 12), (1, 6), (2, 9), (4, 4)])
def test_pictures_have_as_many_tiles_as_transformers_cuts(fewest: int, most: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    tiles, random = Tiles(448, 256, fewest, most), np.random.default_rng(most)
    for height, width in [(1, 1), (1, 999), (3000, 2), (448, 896), *random.integers(1, 3000, (200, 2)).tolist()]:
        across, down = get_optimal_tiled_canvas((height, width), (448, 448), fewest, most)
        assert tiles.places(height, width) == (down, across)


def test_canvases_are_those_of_transformers() -> None:
    largest, random = Canvas(336, 144, 1, 16), np.random.default_rng(0)
    canvases = torch.tensor(maker().find_supported_resolutions(16, maker().SizeDict(height=336, width=336)))
    for height, width in [(1, 1), (1, 999), (3000, 2), (336, 672), *random.integers(1, 4000, (200, 2)).tolist()]:
        canvas = maker().get_best_fit((height, width), canvases)
        rooms = [min(max(length, 336), room) for length, room in zip((height, width), canvas, strict=True)]
        fitted = maker().get_max_res_without_distortion((height, width), rooms)
        assert tuple(336 * tiles for tiles in largest.places(height, width)) == tuple(canvas.tolist())
        assert largest.scaled_size(height, width) == tuple(max(int(side), 1) for side in fitted)
    pixels = CanvasPixels(16, 3, (0.5,) * 3, (0.4,) * 3, "squash", Canvas(16, 4, 1, 6))
    settings = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.4] * 3, "max_patches": 6}
    for seed, side in enumerate([(12, 40), (33, 15), (5, 6), (70, 50), (16, 16)]):
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*side, 3), np.uint8))
        for by_torch, levels in ((False, 0), (True, 1)):  # torch's filter differs from Pillow's by a level
            found = canvases_of_maker([image], settings, by_torch)["pixel_values"].numpy()
            assert np.abs(pixels.clip([image]) - found).max() <= levels * 1.6 / (255 * 0.4)


def test_mosaics_are_those_of_transformers() -> None:
    settings = {"image_mean": [0.5] * 3, "image_std": [0.4] * 3, "dynamic_hd": 6, "patch_size": 4}
    settings["size"] = {"height": 16, "width": 16}
    pixels = MosaicPixels(16, 3, (0.5,) * 3, (0.4,) * 3, "squash", Mosaic(16, 0, 1, 6, 4))
    random = np.random.default_rng(0)
    for side in [(12, 40), (33, 15), (16, 16), (70, 50), (17, 80), *random.integers(5, 90, (40, 2)).tolist()]:
        image = Image.fromarray(random.integers(0, 256, (*side, 3), np.uint8))
        if not all(places := pixels.parts.places(*side)):
            with pytest.raises(ValueError, match="aspect ratio is very extreme"):
                mosaics_of_maker([image], settings)
            continue
        for by_torch, levels in ((False, 1e-3), (True, 1)):  # torch's filter differs from Pillow's by a level
            made = mosaics_of_maker([image], settings, by_torch)
            found = made["image_pixel_values"][0].roll(-1, 0).numpy()
            assert np.abs(pixels.clip([image]) - found).max() <= levels * 1.6 / (255 * 0.4)
        down, across = (size // 16 for size in made["image_sizes"][0].tolist())
        seen = made["image_attention_mask"][0, 1:].reshape(down, across, 4, 4).transpose(1, 2).reshape(4 * down, -1)
        assert (seen[: places[0], : places[1]] == 1).all() and int(seen.sum()) == np.prod(places)
        assert mosaic_tokens(*places, 4) == made["num_img_tokens"][0] - 16 * 17 + 2 * 3
    largest = Mosaic(448, 0, 1, 36, 14)
    for height, width in [(1, 1), (9000, 200), (448, 896), *random.integers(100, 9000, (200, 2)).tolist()]:
        down, across = largest.places(height, width)
        tiles = tuple(-(-side // 32) for side in (down, across))
        assert not down or tiles == largest.tiles(height, width)


def test_pictures_have_as_many_places_as_transformers_gives() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    rows, pooled, random = RowGrid(14, 2, 3, 1540), PooledGrid(16, 3, 3, 280), np.random.default_rng(0)
    for height, width in [(1, 1), (1, 999), (3000, 2), (1540, 1541), *random.integers(1, 4000, (200, 2)).tolist()]:
        found = get_resize_output_image_size(np.empty((3, height, width), np.bool_), 1540, 28, "channels_first")
        assert tuple(28 * places for places in rows.places(height, width)) == found
        found = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
        assert tuple(48 * places for places in pooled.places(height, width)) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", sampled([(name,) for name in FOLDERS], lambda family: family in ("mistral3", "phi4_multimodal"))
)
def test_a_published_folder_is_tuned_evaluated_exported_and_answers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    from mgpu_pipe.cli.main import main

    write_folder(family, tmp_path / "model")
    metrics = run(tmp_path / "run", 1, "strategy=single")
    tuned, pictures = tmp_path / "run", [tmp_path / "wide.png", tmp_path / "high.png"]
    assert main(["eval", str(tuned), "--device", "cpu"]) == 0
    asked, out = "Compare <image> and <image>.", tmp_path / "out"
    answer = generated(tuned, capsys, asked, *pictures)
    assert main(["export", str(tuned), "--out", str(out)]) == 0
    loaded = transformers_class(family).from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    exported, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert generated(out, capsys, asked, *pictures) == answer
    message = [{"role": "user", "content": asked}]
    made = prepared_by_maker(family, out, in_parts(message), [Image.open(picture) for picture in pictures], True)
    ids = torch.tensor([made.pop("input_ids")])
    made = model_inputs(family, made, ids == image_token(exported.config))
    check_written(exported, AutoTokenizer.from_pretrained(out), answer, ids, **made)
    again = run(tmp_path / "again", 1, f"model.path={out}", "optimizer.lr=0", "strategy=single")
    assert again["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)
