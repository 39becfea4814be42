"""Muon under every strategy that cuts matrices. Oracle: torch.optim.Muon and torch.optim.AdamW in the plain loop.

Each strategy goes on from one process's checkpoint, and writes it again bit for bit. In bf16 the oracle computes in
fp32, and the error is held against that of one process.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.topology import ParallelDims
from tests.strategies.test_optimizers import Way, hold
from tests.support.plain_training import assembled, norm_of, plain
from tests.support.processes import run_processes
from tests.support.training import MUON, Case, trained

OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "adamw_lr": 3e-4}
MICRO = {"micro_batches": 2}
WAYS = {
    "single": ParallelDims(),
    "ddp 2": ParallelDims(dp_replicate=2),
    "fsdp 2": ParallelDims(dp_shard=2),
    "fsdp 4": ParallelDims(dp_shard=4),
    "hsdp 2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "tp 2": ParallelDims(tp=2),
    "tp 2 x dp_shard 2": ParallelDims(tp=2, dp_shard=2),
    "pp 2": ParallelDims(pp=2),
    "pp 2 x tp 2": ParallelDims(pp=2, tp=2),
    "cp 2": ParallelDims(cp=2),
    "tp 4": ParallelDims(tp=4),
    "ep 2": ParallelDims(dp_shard=2, ep=2),
    "ep 2 of 4": ParallelDims(dp_shard=4, ep=2),
    "tp 2 x dp_shard 2 x ep 4": ParallelDims(tp=2, dp_shard=2, ep=4),
}
CELLS = [
    (name, model)
    for name, dims in WAYS.items()
    for model in ("llama", "gpt2", "mixtral")
    if model == "mixtral" or dims.ep == 1
]
QUICK = [("tp 2 x dp_shard 2", "gpt2"), ("fsdp 2", "mixtral")]


def way_of(name: str, model: str) -> Way:
    return Way(WAYS[name], {"model": model, **(MICRO if WAYS[name].pp > 1 else {})})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.exhaustive) for cell in CELLS]
)
def test_muon_is_one_process_and_goes_on_from_its_checkpoint(name: str, model: str, tmp_path: Path) -> None:
    """Fused queries, keys and values under tensor parallelism, experts cut by width, by number, and by FSDP2."""
    hold(way_of(name, model), [MUON], tmp_path)


def in_bf16(way: Way) -> Any:
    case = Case(optimizer=MUON, optimizer_options=OPTIONS, precision="bf16", layers=2, **way.case)
    return trained(case, way.dims)


@functools.lru_cache(maxsize=None)
def error_in_bf16(name: str, model: str) -> float:
    way = way_of(name, model)
    results = run_processes(way.dims.world_size, in_bf16, way)
    torch.set_num_threads(1)
    expected = plain(Case(optimizer=MUON, optimizer_options=OPTIONS, layers=2, model=model))["weights"]
    weights = assembled([result.weights for result in results])
    return norm_of(weights[name] - value for name, value in expected.items()) / norm_of(expected.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fsdp 2", "tp 2"])
def test_in_bf16_a_strategy_is_as_near_to_fp32_as_one_process(name: str) -> None:
    alone = error_in_bf16("single", "llama")
    assert 0 < error_in_bf16(name, "llama") <= 1.5 * alone + 1e-7
