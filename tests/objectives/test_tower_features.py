"""Features of frozen towers that are computed once. Oracle: the run that computes them in every step."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.checks.check_model import check_built
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import run_model
from mgpu_pipe.objectives.first_weights import RunStart
from mgpu_pipe.objectives.picture_keys import CONTRASTIVE
from mgpu_pipe.objectives.sample_group import SingleProcess
from mgpu_pipe.objectives.tower_features import (
    ClassifierFeatures,
    LlavaFeatures,
    PictureObjective,
    PooledFeatures,
    TowerFeatures,
)
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.training.initial_weights import MeasuredWeights
from tests.objectives import test_contrastive, test_image_classification
from tests.objectives.test_vision_language import chats
from tests.support import small_runs
from tests.support.processes import run_processes
from tests.support.sampling import sampled

IMAGE_FAMILIES = families_in_role("picture_classifier")

STILL = ("data.flip=false", "data.shift=0", "data.cache_features=true")
VIT = (test_image_classification.small_data, ("model.freeze=[vit.*]", *STILL))
CLIP = (test_contrastive.captioned, ("model.freeze=[vision]", *STILL))
LLAVA = (chats, ("model.freeze=[vision]", *STILL[1:]))
DATA = {"vit": VIT, "clip": CLIP, "llava": LLAVA}
METRICS = ("loss", "exact_match", "accuracy", "zero_shot_accuracy")


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the tower ran")


def _once(again: bool, *words: Any) -> dict[str, Any]:
    """A run whose tower is broken as soon as its features were measured; where it goes on ``again``, from the start."""
    measure = TowerFeatures.measure

    def measured(self: TowerFeatures, *args: Any) -> None:
        measure(self, *args)
        self._run = _never

    with mock.patch.object(TowerFeatures, "measure", _never if again else measured):
        return small_runs.trained(*words)


def rows(folder: Path) -> list[list[float]]:
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        names = ("train/loss", "train/grad_norm", *(f"val/{key}" for key in METRICS))
        return [[float(row[name]) for name in names if row.get(name)] for row in csv.DictReader(file)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(sorted((folder / "checkpoints").glob("step-*"))[-1])
    shards = {
        name: LocalShard(TensorSlice.whole(name, shape), shape, torch.empty(shape))
        for name in reader.names("model")
        for shape in [reader.shape(name)]
    }
    reader.read(list(shards.values()), "model")
    return {name: shard.tensor for name, shard in shards.items()}


def equal(folder: Path, plain: Path) -> None:
    for ours, truth in zip(rows(folder), rows(plain), strict=True):
        assert ours == pytest.approx(truth, rel=1e-5)
    expected, found = weights(plain), weights(folder)
    off = sum(float((found[name] - one).square().sum()) for name, one in expected.items()) ** 0.5
    assert off <= 1e-5 * sum(float(one.square().sum()) for one in expected.values()) ** 0.5


def run(kind: str, folder: Path, processes: int, *overrides: str, **options: Any) -> None:
    data, given = DATA[kind]
    small_runs.run(data, folder, processes, *given, *overrides, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of one process that computes the features in every step, once a kind."""
    made = dict[str, Path]()

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "run"
            run(kind, made[kind], 1, "strategy=single", "trainer.val_every_n_steps=2", "data.cache_features=false")
        return made[kind]

    return of


def cells() -> Sequence[Any]:
    every = [(kind, 2, f"strategy={name}") for kind in DATA for name in ("ddp", "fsdp", "tp", "zero3")]
    cases = [("llava", 1, "strategy=single"), *every]
    return sampled(cases, lambda kind, _, strategy: kind == "clip" and strategy == "strategy=fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes", "strategy"), cells())
def test_the_run_is_the_one_that_computes_them_in_every_step(
    plain: Callable[[str], Path], tmp_path: Path, kind: str, processes: int, strategy: str
) -> None:
    """And one that goes on half-way, in its folder, without the tower."""
    more = (strategy, "trainer.val_every_n_steps=2", "checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    folder = tmp_path / "run"
    run(kind, folder, processes, *more, trained=partial(_once, False))
    equal(folder, plain(kind))
    saved, (data, given) = str(folder / "checkpoints" / "step-00000002"), DATA[kind]
    words = [*given, *more, f"trainer.devices={processes}"]
    run_processes(processes, partial(_once, True), data, str(folder), words, saved)
    equal(folder, plain(kind))


def objective_of(kind: str, family: str) -> tuple[PictureObjective, Callable[[Any], torch.Tensor]]:
    if kind == "vit":
        classifier = test_image_classification.made(family)
        classifier.model.requires_grad_(False).get_submodule("classifier").requires_grad_(True)
        classifier.features = ClassifierFeatures(classifier.model)

        def loss(batch: Any) -> torch.Tensor:
            return classifier.micro_batch_loss(batch)

        return classifier, loss
    towers = test_contrastive.made(family)
    towers.model.get_submodule("vision_model").requires_grad_(False)
    towers.features = PooledFeatures(towers.model)

    def met(batch: Any) -> torch.Tensor:
        towers.gather_features([batch], 1, SingleProcess())
        return towers.micro_batch_loss(batch)

    return towers, met


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *(pytest.param("vit", one, marks=() if one == "vit" else pytest.mark.exhaustive) for one in IMAGE_FAMILIES),
        *(
            pytest.param("clip", one, marks=() if one == "clip" else pytest.mark.exhaustive)
            for one in CONTRASTIVE.families
        ),
    ],
)
def test_loss_and_gradients_of_every_family(kind: str, family: str, tmp_path: Path) -> None:
    objective, loss = objective_of(kind, family)
    features = objective.features
    assert features is not None
    features.check()
    batch = objective.random_batch(3, 0, 6, 12, packed=False) | {"shown": torch.tensor([3, 1, 0, 2, 5, -1])}

    def measured() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        objective.model.zero_grad()
        total = loss(batch)
        total.backward()  # type: ignore[no-untyped-call]
        grads = {name: one.grad.clone() for name, one in objective.model.named_parameters() if one.grad is not None}
        return total.detach(), grads

    batch = {name: value[:5] for name, value in batch.items()}
    expected, truth = measured()
    table = features._tables["train"] = np.zeros((6, *features._shape), np.float32)
    with features.on_split("train"):
        with (tmp_path / "rows").open("wb") as features._measured:
            features.is_measuring = True
            measured()
            features.is_measuring = False
        with mock.patch("mgpu_pipe.objectives.tower_features.MERGE_BYTES", 1):  # a row at a time
            features._merge(tmp_path / "rows", table)
        with mock.patch.object(features, "_run", side_effect=AssertionError("the tower ran")):
            found, grads = measured()
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    size = torch.stack([one.norm() for one in truth.values()]).norm()
    assert grads.keys() == truth.keys() and len(truth) >= 2
    for name, one in truth.items():
        assert (grads[name] - one).norm() <= 1e-5 * one.norm() + 1e-7 * size, name


def config(*overrides: str) -> RunConfig:
    return compose(["objective=image_classification", "data=digits", "model=vit_tiny", *overrides])[0]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), "its tower learns; use model.freeze=[vit.*], or false"),
        (("model.freeze=[vit.layers.*]",), "its tower learns; use model.freeze=[vit.*], or false"),
    ],
)
def test_a_classifier_that_learns_below_its_last_layer_is_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_built(config("data.shift=0", "data.cache_features=true", *overrides))
    assert str(raised.value) == f"data.cache_features=true: {told}"


@pytest.mark.slow
def test_other_pictures_or_another_model_have_a_file_of_their_own(tmp_path: Path) -> None:
    def name(*overrides: str) -> str:
        config = chats(tmp_path, *LLAVA[1], *overrides)
        plan, weights = BatchPlan.resolve(config.data, 1), MeasuredWeights(config, None, None, "loaded")
        start = RunStart(config, tmp_path, prepare(config), plan, 0, 4, "fp32", weights.digest)
        return LlavaFeatures(run_model(config)).file(start, "train").name

    first = name()
    assert name() == first
    others = [name("model.config.vision_feature_layer=[-2]"), name("data.mean=[0.1]"), name("seed=7")]
    (tmp_path / "p" / "dark" / "0.png").write_bytes((tmp_path / "p" / "light" / "3.png").read_bytes())
    others.append(name())
    assert len({first, *others}) == 5


@pytest.mark.slow
def test_a_tower_that_learned_before_it_was_frozen_is_measured_as_it_is_now(tmp_path: Path) -> None:
    given = ("strategy=single", "optimizer.lr=1e-2", "data.shift=0")
    small_runs.run(chats, tmp_path / "first", 1, *given, "trainer.max_steps=2", "scheduler.total_steps=4")
    saved = tmp_path / "first" / "checkpoints" / "step-00000002"
    for kept in ("true", "false"):
        words = (*given, "trainer.max_steps=4", "model.freeze=[vision]", f"data.cache_features={kept}")
        small_runs.run(chats, tmp_path / kept, 1, *words, resume=saved)
    equal(tmp_path / "true", tmp_path / "false")
