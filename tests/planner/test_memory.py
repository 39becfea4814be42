"""Oracles: the tensors that torch's own optimizer and modules hold, and the bytes that the benchmarks measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import axes_memory
from benchmarks.memory.axes_memory import activation_share, norm_bytes
from benchmarks.traffic import data_parallel_bytes, zero_bytes
from mgpu_pipe.architectures.formulas.kept_memory import optimizer_bytes, state_bytes
from mgpu_pipe.config.group_keys import OptimizerConfig
from mgpu_pipe.optim.moving_average import WeightAverage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LLAMA_SMALL = 8_392_960
"""Parameters, weights not tied."""


def measured(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}-cpu.json").read_text())["rows"]


def test_one_process_keeps_what_adamw_keeps() -> None:
    model = torch.nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    kept = state_bytes(4 * 64 * 32, 64 * 32, 1)
    moments = [value for value in optimizer.state[model.weight].values() if value.ndim]
    assert kept.weights == model.weight.nbytes
    assert model.weight.grad is not None and kept.gradients == model.weight.grad.nbytes
    assert kept.optimizer == sum(moment.nbytes for moment in moments)
    assert kept.total == 16 * 64 * 32
    keys = OptimizerConfig()
    assert optimizer_bytes(keys) == 8
    keys.ema.decay = 0.9
    with WeightAverage(0.9).updated(optimizer):
        optimizer.step()
    state = [value for value in optimizer.state[model.weight].values() if value.ndim]
    assert optimizer_bytes(keys) * 64 * 32 == sum(value.nbytes for value in state)


@pytest.mark.parametrize(
    "row", measured("zero_bytes"), ids=lambda row: f"{row['strategy']}-{row['precision']}-{row['processes']}"
)
def test_zero_keeps_and_sends_what_was_measured(row: dict[str, Any]) -> None:
    stage = int(row["strategy"][-1])
    kept, _, sent = zero_bytes.closed_forms(stage, row["precision"], row["processes"], LLAMA_SMALL)
    assert kept / 1e6 * row["kept ratio"] == pytest.approx(row["kept MB"], rel=1e-9)
    assert sent / 1e6 * row["sent ratio"] == pytest.approx(row["sent MB"], rel=1e-9)
    assert row["kept ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "row", measured("data_parallel_bytes"), ids=lambda row: f"{row['strategy']}-{row['precision']}-{row['processes']}"
)
def test_data_parallelism_keeps_and_sends_what_was_measured(row: dict[str, Any]) -> None:
    kept, sent = data_parallel_bytes.closed_forms(row["strategy"], row["precision"], row["processes"], LLAMA_SMALL)
    assert kept / 1e6 * row["kept ratio"] == pytest.approx(row["kept MB"], rel=1e-9)
    assert sent / 1e6 * row["sent ratio"] == pytest.approx(row["sent MB"], rel=1e-9)


def test_tensor_parallelism_splits_all_but_the_norms() -> None:
    rows = {(row["axes"], row["processes"]): row["closed form MB"] * 1e6 for row in measured("axes_memory")}
    norms = norm_bytes(axes_memory.ROWS * axes_memory.TOKENS, axes_memory.WIDTH)
    alone = 2 * rows["tp, sequence", 2]
    assert activation_share(alone, norms, tp=4) == pytest.approx(rows["tp", 4])
    assert activation_share(alone, norms, tp=4, sequence_parallel=True) == pytest.approx(rows["tp, sequence", 4])
    assert activation_share(alone, norms, cp=4) == pytest.approx(rows["cp ring", 4])
