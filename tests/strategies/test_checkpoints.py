"""Checkpoints across mesh strategies and sizes, optimizer state included. Oracle: the uninterrupted plain loop."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.initial_weights import restore_optimizer, restore_weights
from tests.support.plain_training import assembled, norm_of, plain
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, trained

pytestmark = pytest.mark.slow

BEFORE, AFTER = 3, 4
SAMPLES = 12
TOPOLOGIES = {
    "fsdp 4": ParallelDims(dp_shard=4),
    "fsdp 3": ParallelDims(dp_shard=3),
    "hsdp 2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "ddp 2": ParallelDims(dp_replicate=2),
    "single": ParallelDims(),
}


def case_of(model: str, steps: int) -> Case:
    """Vocabulary, experts and norms that neither three nor four ranks can share evenly."""
    return Case(model=model, samples=SAMPLES, steps=steps)


def saved(model: str, dims: ParallelDims, folder: str) -> None:
    save_case(case_of(model, BEFORE), dims, folder)


def save_case(case: Case, dims: ParallelDims, folder: str) -> None:
    def keep(strategy: Any) -> None:
        shards = strategy.model_shards(), strategy.optimizer_shards()
        config = Path(folder) / f"config-{dist.get_rank()}.yaml"
        config.write_text("seed: 5\n")
        save(Path(folder), BEFORE, *shards, {"step": BEFORE}, config)

    trained(case, dims, on_end=keep)


def resumed(model: str, dims: ParallelDims, folder: str) -> Outcome:
    return resume_case(case_of(model, AFTER), dims, folder)


def resume_case(case: Case, dims: ParallelDims, folder: str) -> Outcome:
    def restore(strategy: Any) -> None:
        reader = CheckpointReader(Path(folder) / f"step-{BEFORE:08d}")
        restore_weights(reader, strategy)
        restore_optimizer(reader, strategy)

    return trained(case, dims, first_step=BEFORE, on_start=restore)


@functools.lru_cache(maxsize=None)
def uninterrupted(model: str, layers: int = 0) -> dict[str, Any]:
    return plain(replace(case_of(model, BEFORE + AFTER), layers=layers))


def check(results: list[Outcome], expected: dict[str, Any]) -> None:
    for result in results:
        for loss, truth in zip(result.losses, expected["losses"][BEFORE:], strict=True):
            assert abs(loss / truth - 1) < 1e-5
        for norm, truth in zip(result.norms, expected["norms"][BEFORE:], strict=True):
            assert abs(norm / truth - 1) < 1e-5
    weights = assembled([result.weights for result in results])
    off = norm_of(weights[name] - truth for name, truth in expected["weights"].items())
    assert off <= 1e-5 * norm_of(expected["weights"].values())


SOURCES = ("fsdp 4", "fsdp 3", "hsdp 2x2", "ddp 2")
PAIRS = tuple(product(SOURCES, ("mixtral", "gpt2")))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("source", "model"), PAIRS)
def test_any_mesh_strategy_goes_on_from_any_other(tmp_path: Path, model: str, source: str) -> None:
    writes = TOPOLOGIES[source]
    run_processes(writes.world_size, saved, model, writes, str(tmp_path))
    for name, reads in TOPOLOGIES.items():
        if name != source:
            check(run_processes(reads.world_size, resumed, model, reads, str(tmp_path)), uninterrupted(model))


def test_uneven_shards_are_whole_tensors_in_the_checkpoint(tmp_path: Path) -> None:
    dims = TOPOLOGIES["fsdp 3"]
    run_processes(3, saved, "gpt2", dims, str(tmp_path))
    reader = CheckpointReader(tmp_path / f"step-{BEFORE:08d}")
    expected = plain(case_of("gpt2", BEFORE))["weights"]
    assert set(reader.names("model")) == set(expected)
    for name, value in expected.items():
        assert reader.shape(name) == tuple(value.shape)
        assert reader.dtype(name) == torch.float32
    states = {name.rpartition("/")[2] for name in reader.names("optimizer")}
    assert states == {"exp_avg", "exp_avg_sq", "step"}
