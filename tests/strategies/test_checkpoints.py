"""Checkpoints across strategies and sizes, optimizer state included. Oracle: the uninterrupted plain loop.

``make test`` has test_any_to_any in place of most: all strategies read and write the same checkpoint, byte for byte.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.save_and_resume import restore_optimizer, restore_weights
from tests.support.plain_training import assembled, norm_of, plain
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, trained

pytestmark = pytest.mark.slow

BEFORE, AFTER = 3, 4
SAMPLES = 12


@dataclass(frozen=True)
class Way:
    """A topology, and how its cases differ."""

    dims: ParallelDims
    case: dict[str, Any] = field(default_factory=dict)


WHOLE = {
    "fsdp 4": Way(ParallelDims(dp_shard=4)),
    "fsdp 3": Way(ParallelDims(dp_shard=3)),
    "hsdp 2x2": Way(ParallelDims(dp_replicate=2, dp_shard=2)),
    "ddp 2": Way(ParallelDims(dp_replicate=2)),
    "single": Way(ParallelDims()),
}
LAYERS = 4
"""Of a model that is cut: enough for two stages a rank."""
CUT = {
    "pp2 x tp2 x dp_shard2": Way(ParallelDims(pp=2, tp=2, dp_shard=2), {"micro_batches": 2, "layers": LAYERS}),
    "ep2 x tp2 x dp_shard2": Way(ParallelDims(ep=2, tp=2, dp_shard=2), {"layers": LAYERS}),
    "pp2 zbv x cp2": Way(ParallelDims(pp=2, cp=2), {"micro_batches": 2, "schedule": "zbv", "layers": LAYERS}),
    "tp4, sequence": Way(ParallelDims(tp=4), {"options": {"sequence_parallel": True}, "layers": LAYERS}),
}
OTHERS = {
    "single": Way(ParallelDims(), {"layers": LAYERS}),
    "fsdp 3": Way(ParallelDims(dp_shard=3), {"layers": LAYERS}),
    "zero3 2": Way(ParallelDims(dp_shard=2), {"zero_stage": 3, "layers": LAYERS}),
}


def case_of(model: str, steps: int, way: Way | None = None) -> Case:
    """Vocabulary, experts and norms that neither three nor four ranks can share evenly."""
    return replace(Case(model=model, samples=SAMPLES, steps=steps), **(way.case if way else {}))


def saved(model: str, way: Way, folder: str) -> None:
    def keep(strategy: Any) -> None:
        shards = strategy.model_shards(), strategy.optimizer_shards()
        config = Path(folder) / f"config-{dist.get_rank()}.yaml"
        config.write_text("seed: 5\n")
        save(Path(folder), BEFORE, *shards, {"step": BEFORE}, config)

    trained(case_of(model, BEFORE, way), way.dims, on_end=keep)


def resumed(model: str, way: Way, folder: str) -> Outcome:
    def restore(strategy: Any) -> None:
        reader = CheckpointReader(Path(folder) / f"step-{BEFORE:08d}")
        restore_weights(reader, strategy)
        restore_optimizer(reader, strategy)

    return trained(case_of(model, AFTER, way), way.dims, first_step=BEFORE, on_start=restore)


@functools.lru_cache(maxsize=None)
def uninterrupted(model: str, layers: int) -> dict[str, Any]:
    return plain(replace(case_of(model, BEFORE + AFTER), layers=layers))


def goes_on(tmp_path: Path, model: str, source: Way, targets: list[Way]) -> None:
    run_processes(source.dims.world_size, saved, model, source, str(tmp_path))
    expected = uninterrupted(model, source.case.get("layers", 0))
    for way in targets:
        check(run_processes(way.dims.world_size, resumed, model, way, str(tmp_path)), expected)


def check(results: list[Outcome], expected: dict[str, Any]) -> None:
    for result in results:
        for loss, truth in zip(result.losses, expected["losses"][BEFORE:], strict=True):
            assert abs(loss / truth - 1) < 1e-5
        for norm, truth in zip(result.norms, expected["norms"][BEFORE:], strict=True):
            assert abs(norm / truth - 1) < 1e-5
    weights = assembled([result.weights for result in results])
    off = norm_of(weights[name] - truth for name, truth in expected["weights"].items())
    assert off <= 1e-5 * norm_of(expected["weights"].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["mixtral", "gpt2"])
@pytest.mark.parametrize("source", [name for name in WHOLE if name != "single"])
def test_any_mesh_strategy_goes_on_from_any_other(tmp_path: Path, model: str, source: str) -> None:
    goes_on(tmp_path, model, WHOLE[source], [way for name, way in WHOLE.items() if name != source])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        ("gpt2", "pp2 x tp2 x dp_shard2", "tp4, sequence"),
        ("mixtral", "ep2 x tp2 x dp_shard2", "pp2 zbv x cp2"),
        ("llama", "tp4, sequence", "pp2 x tp2 x dp_shard2"),
        ("gpt2", "pp2 zbv x cp2", "pp2 x tp2 x dp_shard2"),
    ],
)
def test_what_a_cut_model_saved_any_other_strategy_reads(tmp_path: Path, model: str, source: str, target: str) -> None:
    goes_on(tmp_path, model, CUT[source], [*OTHERS.values(), CUT[target]])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "source"), [("mixtral", "fsdp 3"), ("gpt2", "zero3 2"), ("llama", "single")])
def test_a_cut_model_reads_what_other_strategies_saved(tmp_path: Path, model: str, source: str) -> None:
    ways = [way for name, way in CUT.items() if model == "mixtral" or not name.startswith("ep")]
    goes_on(tmp_path, model, OTHERS[source], ways)


def test_uneven_shards_are_whole_tensors_in_the_checkpoint(tmp_path: Path) -> None:
    run_processes(3, saved, "gpt2", WHOLE["fsdp 3"], str(tmp_path))
    reader = CheckpointReader(tmp_path / f"step-{BEFORE:08d}")
    expected = plain(case_of("gpt2", BEFORE))["weights"]
    assert set(reader.names("model")) == set(expected)
    for name, value in expected.items():
        assert reader.shape(name) == tuple(value.shape)
        assert reader.dtype(name) == torch.float32
    states = {name.rpartition("/")[2] for name in reader.names("optimizer")}
    assert states == {"exp_avg", "exp_avg_sq", "step"}
