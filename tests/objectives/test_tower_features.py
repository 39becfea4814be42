"""Features of a frozen tower that are computed once. Oracle: the run that computes them in every step."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.models.build import run_model
from mgpu_pipe.objectives.first_weights import RunStart
from mgpu_pipe.objectives.tower_features import LlavaFeatures, TowerFeatures
from mgpu_pipe.topology import BatchPlan
from mgpu_pipe.training.initial_weights import MeasuredWeights
from tests.objectives.test_vision_language import chats
from tests.support import small_runs
from tests.support.processes import run_processes

FROZEN = ("model.freeze=[vision]", "data.shift=0")
KEPT = (*FROZEN, "data.cache_features=true")
run = partial(small_runs.run, chats)


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
        names = (
            "train/loss",
            "train/grad_norm",
            "val/loss",
            "val/exact_match",
            "val/accuracy",
            "val/zero_shot_accuracy",
        )
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    run(folder, 1, "strategy=single", *FROZEN, "trainer.val_every_n_steps=2")
    return folder


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (2, ("strategy=fsdp",)),
        pytest.param(1, ("strategy=single",), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=ddp",), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=tp",), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=zero3",), marks=pytest.mark.exhaustive),
    ],
)
def test_the_run_is_the_one_that_computes_them_in_every_step(
    plain: Path, tmp_path: Path, processes: int, strategy: tuple[str, ...]
) -> None:
    """And one that goes on half-way, in its folder, without the tower."""
    given = [*strategy, *KEPT, "trainer.val_every_n_steps=2", "checkpoint.every_n_steps=2", "checkpoint.keep_last=0"]
    folder = tmp_path / "run"
    run(folder, processes, *given, trained=partial(_once, False))
    equal(folder, plain)
    saved = str(folder / "checkpoints" / "step-00000002")
    run_processes(processes, partial(_once, True), chats, str(folder), [*given, f"trainer.devices={processes}"], saved)
    equal(folder, plain)


@pytest.mark.slow
def test_other_pictures_or_another_model_have_a_file_of_their_own(tmp_path: Path) -> None:
    def name(*overrides: str) -> str:
        config = chats(tmp_path, *KEPT, *overrides)
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
    run(tmp_path / "first", 1, *given, "trainer.max_steps=2", "scheduler.total_steps=4")
    saved = tmp_path / "first" / "checkpoints" / "step-00000002"
    for kept in ("true", "false"):
        words = (*given, "trainer.max_steps=4", "model.freeze=[vision]", f"data.cache_features={kept}")
        run(tmp_path / kept, 1, *words, resume=saved)
    equal(tmp_path / "true", tmp_path / "false")
