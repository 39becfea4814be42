"""Random changes of training pictures. Oracle: the pictures that torchvision 0.26 makes, and the definitions."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.augment import RAND_OPERATORS, augment, erase, rand_operator, random_crop_box, turn_hue
from mgpu_pipe.data.images.image_keys import AugmentConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.objectives.image_classification import ImageClassificationObjective
from tests.data.support import cut_batches
from tests.support.pictures import folder_of_classes, noise

MODEL = ("model=vit_tiny", "model.config.num_channels=3", "model.config.image_size=16", "model.config.patch_size=4")
ALL = (
    *("data.augment.crop_area=[0.08,1]", "data.flip=true", "data.augment.jitter=0.8", "data.augment.brightness=0.4"),
    *("data.augment.contrast=0.4", "data.augment.saturation=0.4", "data.augment.hue=0.1", "data.augment.rand_ops=2"),
    *("data.augment.erase=0.5", "data.augment.erase_with=noise", "objective.mixup=0.2", "objective.cutmix=1"),
)
TORCHVISION = {
    "identity": 460827678,
    "shear_x": 3737670295,
    "shear_y": 596561279,
    "translate_x": 2936080303,
    "translate_y": 2481457081,
    "rotate": 1889842108,
    "brightness": 1429590647,
    "color": 1394555894,
    "contrast": 2587603121,
    "sharpness": 201291978,
    "posterize": 1517490148,
    "solarize": 2837275423,
    "autocontrast": 1610327695,
    "equalize": 193950445,
}
"""CRC-32 of the pictures that torchvision's operators make of a picture at magnitude 20, in the negative direction."""
DRAWS = 4000


def crc(image: Image.Image) -> int:
    return zlib.crc32(np.asarray(image).tobytes())


def composed(tmp_path: Path, *overrides: str) -> RunConfig:
    root = tmp_path / "pictures"
    if not root.exists():
        folder_of_classes(root)
    given = ("objective=image_classification", "data=image_folder", f"data.paths=[{root}]", "data.global_batch_size=8")
    return compose([*MODEL, *given, f"data.cache_dir={tmp_path / 'cache'}", *overrides])[0]


def test_rand_augment_has_torchvisions_operators() -> None:
    picture = noise(5, 24)
    assert {name: crc(rand_operator(picture, name, 20, -1)) for name in RAND_OPERATORS} == TORCHVISION
    assert crc(turn_hue(picture, -0.3)) == 3121504371
    grey = picture.convert("L")
    assert turn_hue(grey, 0.3) is grey and crc(rand_operator(grey, "color", 20, 1)) == crc(grey)


def test_rand_augment_draws_each_operator_and_direction_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int]] = []

    def record(image: Image.Image, name: str, magnitude: int, sign: int) -> Image.Image:
        drawn.append((name, sign))
        return image

    monkeypatch.setattr("mgpu_pipe.data.images.augment.rand_operator", record)
    for number in range(DRAWS):
        augment(noise(1), AugmentConfig(rand_ops=2), np.random.default_rng(number))
    assert len(drawn) == 2 * DRAWS
    counts = np.array([drawn.count((name, sign)) for name in RAND_OPERATORS for sign in (1, -1)])
    expected = len(drawn) / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < 55.5, "chi-square of 27 degrees of freedom at 0.1%"


def test_a_crop_has_an_even_area_and_an_even_logarithm_of_its_shape() -> None:
    random = np.random.default_rng(0)
    boxes = np.array([random_crop_box((400, 200), (0.08, 0.4), (3 / 4, 4 / 3), random) for _ in range(DRAWS)])
    left, top, right, bottom = boxes.T
    across, down = right - left, bottom - top
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 400 and bottom.max() <= 200
    areas, shapes = across * down / (400 * 200), np.log(across / down)
    # At most 0.4 of 400 x 200 in these shapes is 206 pixels high: nearly every box that is drawn fits.
    grid = np.linspace(0, 1, 400)
    area, shape = np.meshgrid(0.08 + 0.32 * grid, np.log(3 / 4) + 2 * np.log(4 / 3) * grid)
    fits = (area * 80000 / np.exp(shape)) ** 0.5 <= 200
    for found, drawn in ((areas, area[fits]), (shapes, shape[fits])):
        assert abs(found.mean() - drawn.mean()) < 4 * drawn.std() / DRAWS**0.5
        assert found.std() == pytest.approx(drawn.std(), rel=0.05)
    free = (left / (400 - across))[across < 300]
    assert abs(free.mean() - 0.5) < 4 * 12**-0.5 / len(free) ** 0.5
    narrow = random_crop_box((10, 100), (0.9, 1.0), (3 / 4, 4 / 3), random)
    assert narrow == (0, 43, 10, 56), "no box fits: the middle part of the shape that is nearest"


def test_the_jitter_draws_each_factor_evenly() -> None:
    grey, keys = Image.new("RGB", (2, 2), (100, 100, 100)), AugmentConfig(brightness=0.4)
    values = np.array(
        [np.asarray(augment(grey, keys, np.random.default_rng(number)))[0, 0, 0] for number in range(DRAWS)]
    )
    assert 60 <= values.min() < 61 and 139 <= values.max() <= 140
    assert abs(values.mean() - 100) < 4 * 80 / (12 * DRAWS) ** 0.5 + 0.5 and values.std() == pytest.approx(
        23.1, rel=0.05
    )
    some = AugmentConfig(brightness=0.4, jitter=0.25)
    still = sum(augment(grey, some, np.random.default_rng(number)) is grey for number in range(DRAWS))
    assert abs(still / DRAWS - 0.75) < 0.03
    coloured, turned = noise(3), AugmentConfig(hue=0.5, saturation=0.5, contrast=0.5)
    assert len({crc(augment(coloured, turned, np.random.default_rng(number))) for number in range(9)}) == 9


@pytest.mark.parametrize("filling", ["mean", "noise"])
def test_an_erased_part_has_the_area_and_shape_of_its_keys(filling: Any) -> None:
    keys, areas, shapes, noises = AugmentConfig(erase=0.5, erase_with=filling), [], [], []
    for number in range(DRAWS // 2):
        values = np.full((3, 60, 60), 7, np.float32)
        erase(values, keys, np.random.default_rng(number))
        rows, columns = np.nonzero((values != 7).all(0))
        if len(rows):
            down, across = np.ptp(rows) + 1, np.ptp(columns) + 1
            assert len(rows) == down * across, "one whole rectangle"
            areas.append(down * across / 3600)
            shapes.append(down / across)
            noises.append(values[:, rows, columns].ravel())
    filled = np.concatenate(noises)
    assert abs(len(areas) / (DRAWS // 2) - 0.5) < 0.05
    assert min(areas) > 0.015 and max(areas) < 0.34 and min(shapes) > 0.25 and max(shapes) < 4
    assert (filled == 0).all() if filling == "mean" else abs(filled.mean()) < 0.01 and abs(filled.std() - 1) < 0.01


def test_any_number_of_ranks_and_a_resume_see_the_same_pictures(tmp_path: Path) -> None:
    config = composed(tmp_path, *ALL, "data.validation_fraction=0.2")
    prepared = prepare(config)
    plain = composed(tmp_path, "data.validation_fraction=0.2")
    assert prepared.digest != prepare(plain).digest and prepared.validation_digest == prepare(plain).validation_digest

    def pictures(micro: int, ranks: int, start: int = 0, chosen: RunConfig = config) -> dict[str, torch.Tensor]:
        """Every field of four steps, in the global order."""
        batches = cut_batches(chosen, ImageClassificationObjective.samples, micro, ranks, start)
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    whole, resumed = pictures(8, 1), pictures(2, 2, start=16)
    for name, values in pictures(2, 2).items():
        assert torch.equal(values, whole[name]), name
        assert torch.equal(resumed[name], whole[name][16:]), name
    own = pictures(8, 1, chosen=plain)
    assert torch.equal(own["labels"], whole["labels"]) and not torch.equal(own["pixel_values"], whole["pixel_values"])
    held, still = (
        prepare(one).open(one, "validation").batch(np.arange(2), -1 - np.arange(2)) for one in (config, plain)
    )
    assert torch.equal(held["pixel_values"], still["pixel_values"]), "an evaluation changes no picture"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("crop_area=[0.5,0.2]",), "crop_area=[0.5, 0.2]: give two numbers, [least,most], 0 <= least <= most <= 1"),
        (("crop_area=[0.1]",), "crop_area=[0.1]: give two numbers"),
        (("crop_area=[0,1]",), "crop_area=[0.0, 1.0]: no area is no picture; let the least be above 0"),
        (("crop_shape=[0,1]",), "crop_shape=[0.0, 1.0]: give two numbers, [least,most], 0.01 <= least"),
        (("erase_area=[0.1,1.5]",), "erase_area=[0.1, 1.5]: give two numbers"),
        (("erase_shape=[3,1]",), "erase_shape=[3.0, 1.0]: give two numbers"),
        (("rand_magnitude=31",), "rand_magnitude=31: use a number of at most 30"),
        (("hue=0.6",), "hue=0.6: use a number of at most 0.5"),
        (("crop_area=[0.1,1]", "data.random_crop=0.5"), "data.random_crop crops already; use data.random_crop=1"),
    ],
)
def test_ranges_that_cannot_work_are_refused(tmp_path: Path, overrides: tuple[str, ...], told: str) -> None:
    keys = [key if key.startswith("data.") else f"data.augment.{key}" for key in overrides]
    with pytest.raises(ConfigErrors) as refused:
        preflight(composed(tmp_path, *keys))
    assert told in str(refused.value)
    assert [str(error) for error in AugmentConfig(erase=0.5).errors(False, can_erase=False)] == [
        "data.augment.erase=0.5: the pictures of a conversation are cut into patches; use 0"
    ]
