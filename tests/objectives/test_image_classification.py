"""Image classification. Oracle: transformers' own model, one sample at a time, in one process; for mixed pictures the
cross-entropy of soft targets in float64, and the definitions of the draws."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.samples import SampleSet, random_of
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import config_fields
from mgpu_pipe.objectives.class_keys import ImageClassificationConfig
from mgpu_pipe.objectives.image_classification import MIX_SEED, ImageClassificationObjective, MixedSamples, cut_box
from mgpu_pipe.report.compare_runs import PNG, encoded_of
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.shrink import shrink
from tests.objectives.harness import check_classes, check_evaluated, check_logits, exported_model
from tests.support import small_runs
from tests.support.command import mgpu, run_folder
from tests.support.needs import need_digits
from tests.support.pictures import folder_of_classes
from tests.support.sampling import one_in

IMAGE_FAMILIES = families_in_role("picture_classifier")

PICTURES = ("objective=image_classification", "data=digits", "model=vit_tiny", "logger=none", "trainer.progress=off")
VIT = (*PICTURES, "objective.label_smoothing=0.1")
TARGET = "vit.layers.1.mlp.fc2"


SMALL = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 32, "patch_size": 8, "depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2, "embed_dim": 16},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0},
}
NOISELESS = {name: value for name, value in SMALL.items() if "drop" in name}
WINDOWS = {"image_size": 16, "patch_size": 2, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "embed_dim": 16}
UNITS = {"masked_unit_size": [2, 2], "masked_unit_attention": [True, False], "num_heads": [1, 2], "num_query_pool": 1}
NARROWING = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
OWN = {
    **dict.fromkeys(("swin", "swinv2"), WINDOWS),
    "hiera": {**UNITS, "image_size": [32, 32], "patch_stride": [4, 4], "depths": [1, 1], "embed_dim": 16},
    "pvt_v2": {**NARROWING, "image_size": 32},
}
"""Families whose sizes have a number for each stage."""


def made(family: str) -> ImageClassificationObjective:
    known = config_fields(family) or set()
    given = {**NOISELESS, **OWN[family]} if family in OWN else SMALL
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in known}
    if "vision_config" in known:
        tower = AutoConfig.for_model(family).vision_config
        fields["vision_config"] = {name: value for name, value in SMALL.items() if hasattr(tower, name)}
    names = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    model = build_meta(ModelConfig(type=family, config={**fields, **names}), "AutoModelForImageClassification")
    return ImageClassificationObjective(materialise(model, 1, "cpu"), None, lambda step: 1.0, 0.2)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "vit" else pytest.mark.exhaustive) for one in IMAGE_FAMILIES]
)
def test_a_batch_is_its_samples_alone_and_the_metrics_are_counts(family: str) -> None:
    """In every family that the objective lets pass, in training mode."""
    objective = made(family)
    batch = objective.random_batch(3, 2, 6, 0, packed=False)
    assert batch["labels"][-1] == -100
    together = objective.micro_batch_loss(batch).detach()
    alone = objective.reference_loss(objective.model, objective.model, batch).loss_sum
    assert float(together) == pytest.approx(float(alone), rel=1e-5)
    check_classes(objective, batch)


@pytest.mark.parametrize("family", one_in(4, IMAGE_FAMILIES))
def test_verify_makes_a_small_run_of_every_family(family: str) -> None:
    given = ("objective=image_classification", "data=digits", "model=hf", "model.path=null", f"model.type={family}")
    small = shrink(compose([*given, "strategy=fsdp", "trainer.devices=2"])[0], ParallelDims(dp_shard=2))
    assert build_meta(small.config.model, "AutoModelForImageClassification").config.model_type == family


def small_data(folder: Path, *overrides: str) -> RunConfig:
    root = folder / "pictures"
    if not root.exists():
        folder_of_classes(root, each=20)
    shape = ("model.config.image_size=16", "model.config.patch_size=4", "data.global_batch_size=8")
    given = ("data=image_folder", f"data.paths=[{root}]", f"data.cache_dir={folder / 'cache'}", "data.flip=true")
    more = ("trainer.max_steps=4", "data.validation_fraction=0.2", "data.shift=2", "objective.label_smoothing=0.1")
    return compose([*PICTURES, *given, *shape, *more, *overrides])[0]


@pytest.mark.slow
def test_mixup_draws_by_seed_and_sample_and_leaves_held_out_pictures(tmp_path: Path) -> None:
    """However the batch is cut; shares and partners are those of the Beta distribution and of all pictures."""

    def opened(split: Any, *overrides: str) -> Any:
        config = small_data(tmp_path, *overrides)
        return ImageClassificationObjective.samples(config, prepare(config).open(config, split))

    mixed, plain = opened("train", "objective.mixup=0.4"), opened("train")
    indices, numbers = np.arange(40), 100 + np.arange(40)
    whole, own = mixed.batch(indices, numbers), plain.batch(indices, numbers)
    again = mixed.batch(indices[7:9], numbers[7:9])
    assert all(torch.equal(whole[name][7:9], value) for name, value in again.items())
    shares, labels = whole["shares"], own["labels"]
    assert torch.equal(whole["labels"], labels) and 0 <= shares.min() < 0.1 and 0.9 < shares.max() <= 1
    assert abs(float(shares.mean()) - 0.5) < 0.2 and bool((whole["other_labels"] != labels).any())
    at = int((shares < 0.9).nonzero()[0])
    other = (whole["pixel_values"][at] - shares[at] * own["pixel_values"][at]) / (1 - shares[at])
    every = plain.batch(np.arange(len(plain)), np.full(len(plain), numbers[at]))
    partner = (every["pixel_values"] - other).abs().flatten(1).amax(1)
    assert partner.min() < 1e-4 and every["labels"][partner.argmin()] == whole["other_labels"][at]
    held, usual = opened("validation", "objective.mixup=0.4"), opened("validation")
    given, truth = (one.batch(np.arange(3), -1 - np.arange(3)) for one in (held, usual))
    assert all(torch.equal(given[name], value) for name, value in truth.items())
    assert bool((given["shares"] == 1).all())


run = partial(small_runs.run, small_data)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy_is_evaluated_exported_and_fine_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    metrics = small_runs.run_moved(small_data, tmp_path, "val/accuracy")
    check_evaluated(
        tmp_path / "second",
        capsys,
        f"loss           {metrics['val/loss']:.6f} nats a sample",
        f"accuracy       {100 * metrics['val/accuracy']:.2f}%",
        "over           12 samples of 12 held-out samples",
    )
    exported = exported_model(tmp_path / "second", AutoModelForImageClassification, capsys)
    assert exported.config.id2label == {0: "dark", 1: "light", 2: "stripes"}
    pixels = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    check_logits(tmp_path / "second", exported, pixel_values=pixels)
    config = small_data(tmp_path)
    held_out: Any = prepare(config).open(config, "validation")
    picture = held_out._data.picture(1)
    seen = AutoImageProcessor.from_pretrained(tmp_path / "out")(picture, return_tensors="pt")["pixel_values"]
    assert torch.allclose(seen, held_out.batch(np.array([1]), np.array([-1]))["pixel_values"], atol=1e-6)
    # The folder is trained on, with its classes and its own mean and deviation of the channels.
    (tmp_path / "out" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.2], "image_std": [0.3]}))
    config = small_data(tmp_path, "model=hf", f"model.path={tmp_path / 'out'}")
    shown = prepare(config).open(config, "validation").batch(np.arange(2), -1 - np.arange(2))["pixel_values"]
    usual = small_data(tmp_path)
    before = prepare(usual).open(usual, "validation").batch(np.arange(2), -1 - np.arange(2))["pixel_values"]
    assert torch.allclose(shown * 0.3 + 0.2, before * 0.5 + 0.5, atol=1e-6)


@pytest.mark.slow
def test_a_folder_of_other_classes_gets_a_new_head(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    from mgpu_pipe.inference.open import load_run

    torch.manual_seed(2)
    sizes = {
        name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    seven = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_channels=1, num_labels=7))  # type: ignore[call-arg]
    seven.save_pretrained(tmp_path / "seven")
    given = ("model=hf", f"model.path={tmp_path / 'seven'}", "optimizer.lr=0", "data.classes=[dark,light,stripes]")
    run(tmp_path / "alone", 1, *given, "strategy=single")
    run(tmp_path / "cut", 2, *given, "strategy=fsdp")
    alone, cut = (dict(load_run(tmp_path / name).model.named_parameters()) for name in ("alone", "cut"))
    for name, value in seven.named_parameters():
        assert torch.equal(alone[name], cut[name]), name
        assert name.startswith("classifier.") or torch.equal(alone[name], value), name
    assert (
        alone["classifier.weight"].shape == (3, 32) and 0.01 < float(alone["classifier.weight"].detach().std()) < 0.03
    )


@pytest.mark.slow
def test_four_steps_of_the_experiment(cache: Path, tmp_path: Path) -> None:
    need_digits()
    short = ("trainer.max_steps=4", "trainer.val_every_n_steps=4", "scheduler.warmup_steps=1", "logger=none")
    done = mgpu(cache, tmp_path, "experiment=vit_digits", "trainer.devices=2", *short)
    folder = run_folder(done)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["status"] == "finished" and summary["model"]["class"] == "ViTForImageClassification"
    metrics = summary["metrics"]
    assert 0 <= metrics["val/accuracy"] < metrics["val/top5_accuracy"] < 1
    confusion = np.array(summary["found"]["confusion"])
    assert confusion.shape == (10, 10) and confusion.sum() == 359
    assert np.trace(confusion) == pytest.approx(359 * metrics["val/accuracy"])
    samples, report = summary["samples"], (folder / "report.html").read_text(encoding="utf-8")
    assert len(samples) == 12 and all(f'base64,{sample["image"]}"' in report for sample in samples)
    assert all(base64.b64decode(sample["image"]).startswith(b"\x89PNG") for sample in samples)
    assert all(sample["text"].endswith(", wrong") for sample in samples), "those first that the model gets wrong"
    assert "Confusion" in report and "what it was taken for" in report
    hostile = {**samples[0], "image": samples[0]["image"] + '"><script>'}
    others = (hostile, {"image": "https://x"})
    assert encoded_of(samples[0], "image", PNG) and not any(encoded_of(one, "image", PNG) for one in others)
    assert "1,438 samples to train on, 359 held out" in " ".join(done.split())


CLASSES, SIDE = 3, 16


class Numbered:
    """Pictures of one value, their index."""

    def __len__(self) -> int:
        return 30

    def batch(self, indices: NDArray[np.int64], numbers: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        values = torch.from_numpy(indices).float()[:, None, None, None].expand(-1, 1, SIDE, SIDE)
        return {"pixel_values": values.clone(), "labels": torch.from_numpy(indices % CLASSES)}


def mixed(numbers: NDArray[np.int64], **keys: float) -> dict[str, torch.Tensor]:
    samples = MixedSamples(cast(SampleSet, Numbered()), ImageClassificationConfig(**keys), 3)  # type: ignore[arg-type]
    return samples.batch(numbers % 30, numbers)


def test_cutmix_takes_a_rectangle_and_its_share_of_the_label() -> None:
    numbers = np.arange(2000)
    batch = mixed(numbers, cutmix=1.0)
    pictures, shares, own = batch["pixel_values"], batch["shares"], torch.from_numpy(numbers % 30)
    foreign = pictures != own[:, None, None, None]
    # The partner may be the sample itself, or one of its value; everywhere else the share is that of the pixels.
    partner = torch.where(foreign.flatten(1).any(1), pictures.flatten(1).sub(own[:, None]).sum(1), 0)
    cut = foreign.flatten(1).any(1)
    assert torch.allclose(1 - shares[cut], foreign.flatten(1).float().mean(1)[cut], atol=1e-6)
    others = (partner[cut] / foreign.flatten(1).sum(1)[cut]).round().long() + own[cut]
    assert torch.equal(batch["other_labels"][cut], others % CLASSES)
    for picture in foreign[cut][:50, 0]:
        rows, columns = picture.nonzero().T
        assert len(rows) == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1), "one rectangle"
    again = mixed(numbers[7:9], cutmix=1.0)
    assert all(torch.equal(batch[name][7:9], value) for name, value in again.items()), "however the batch is cut"


def test_the_draws_are_those_of_their_distributions() -> None:
    numbers = np.arange(4000)
    both = mixed(numbers, cutmix=1.0, mixup=0.2, mix_probability=0.8, cutmix_probability=0.25)
    spread = both["pixel_values"].flatten(1)
    values = torch.tensor([len(row.unique()) for row in spread])
    own = spread[:, 0] == torch.from_numpy(numbers % 30)
    assert abs(float(((values == 1) & own & (both["shares"] == 1)).float().mean()) - 0.2) < 0.05, "mix_probability"
    # A box of even area, part of which may lie outside: two values, but for those without a pixel.
    assert abs(float((values == 2).float().mean()) - 0.8 * 0.25) < 0.05, "cutmix_probability"
    only = mixed(numbers, mixup=0.4)
    for number in (0, 7, 99):  # the draws of runs before there was CutMix
        draw = random_of(3 ^ MIX_SEED, number)
        share, partner = float(draw.beta(0.4, 0.4)), int(draw.integers(30))
        assert float(only["shares"][number]) == pytest.approx(share, abs=1e-7)
        shown = share * (number % 30) + (1 - share) * partner
        assert float(only["pixel_values"][number, 0, 0, 0]) == pytest.approx(shown, abs=1e-4)
    held = mixed(-1 - numbers[:3], cutmix=1.0)
    assert bool((held["shares"] == 1).all()) and bool((held["other_labels"] == -100).all())


def test_a_box_is_cut_off_at_the_border() -> None:
    assert cut_box(16, 8, 0.75, (8, 4)) == (4, 2, 12, 6)  # half of each side
    assert cut_box(16, 8, 0.75, (0, 7)) == (0, 5, 4, 8)
    assert cut_box(16, 8, 1.0, (3, 3)) == (3, 3, 3, 3), "nothing"


def test_the_loss_is_the_cross_entropy_of_soft_targets() -> None:
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"image_size": SIDE, "patch_size": 8, "num_channels": 1}
    names = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    model = build_meta(ModelConfig(type="vit", config={**fields, **sizes, **names}), "AutoModelForImageClassification")
    whole = materialise(model, 1, "cpu").eval()
    objective = ImageClassificationObjective(whole, None, lambda step: 1.0, label_smoothing=0.1, mixed=True)
    batch = mixed(np.arange(6), cutmix=1.0)
    logs = whole(pixel_values=batch["pixel_values"]).logits.double().log_softmax(-1)
    own, other = (torch.eye(CLASSES, dtype=torch.float64)[batch[name]] for name in ("labels", "other_labels"))
    shares = batch["shares"].double()[:, None]
    targets = 0.9 * (shares * own + (1 - shares) * other) + 0.1 / CLASSES
    assert float(objective.micro_batch_loss(batch).detach()) == pytest.approx(
        float(-(targets * logs.detach()).sum()), rel=1e-6
    )
