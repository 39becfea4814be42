"""Checkpoints of cut models, read and written by other strategies. Oracle: the uninterrupted plain loop.

``make test`` has test_any_to_any in their place: what every strategy reads and writes is one checkpoint, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.topology import ParallelDims
from tests.strategies import test_checkpoints as mesh
from tests.support.processes import run_processes
from tests.support.training import Case

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@dataclass(frozen=True)
class Way:
    """A topology, and how its cases differ."""

    dims: ParallelDims
    case: dict[str, Any] = field(default_factory=dict)


CUT = {
    "pp2 x tp2 x dp_shard2": Way(ParallelDims(pp=2, tp=2, dp_shard=2), {"micro_batches": 2}),
    "ep2 x tp2 x dp_shard2": Way(ParallelDims(ep=2, tp=2, dp_shard=2)),
    "pp2 zbv x cp2": Way(ParallelDims(pp=2, cp=2), {"micro_batches": 2, "schedule": "zbv"}),
    "tp4, sequence": Way(ParallelDims(tp=4), {"options": {"sequence_parallel": True}}),
}
OTHERS = {
    "single": Way(ParallelDims()),
    "fsdp 3": Way(ParallelDims(dp_shard=3)),
    "zero3 2": Way(ParallelDims(dp_shard=2), {"zero_stage": 3}),
}
LAYERS = 4
"""Enough for two stages a rank."""


def case_of(model: str, steps: int, way: Way) -> Case:
    return replace(mesh.case_of(model, steps), layers=LAYERS, **way.case)


def saved(model: str, way: Way, folder: str) -> None:
    mesh.save_case(case_of(model, mesh.BEFORE, way), way.dims, folder)


def resumed(model: str, way: Way, folder: str) -> Any:
    return mesh.resume_case(case_of(model, mesh.AFTER, way), way.dims, folder)


def goes_on(tmp_path: Path, model: str, source: Way, targets: list[Way]) -> None:
    run_processes(source.dims.world_size, saved, model, source, str(tmp_path))
    expected = mesh.uninterrupted(model, LAYERS)
    for way in targets:
        mesh.check(run_processes(way.dims.world_size, resumed, model, way, str(tmp_path)), expected)


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


@pytest.mark.parametrize(("model", "source"), [("mixtral", "fsdp 3"), ("gpt2", "zero3 2"), ("llama", "single")])
def test_a_cut_model_reads_what_other_strategies_saved(tmp_path: Path, model: str, source: str) -> None:
    ways = [way for name, way in CUT.items() if model == "mixtral" or not name.startswith("ep")]
    goes_on(tmp_path, model, OTHERS[source], ways)
