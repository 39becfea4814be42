"""Bytes that ranks keep and send. Oracles: the tensors of torch's own optimizer, and what benchmarks measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import axes_memory
from benchmarks.memory.axes_memory import activation_share, norm_bytes
from benchmarks.traffic import axes_bytes, data_parallel_bytes, expert_bytes, zero_bytes
from benchmarks.traffic.closed_forms import expert_traffic
from mgpu_pipe.architectures.formulas.kept_memory import all_reduced, exchanged_bytes, optimizer_bytes, state_bytes
from mgpu_pipe.config.group_keys import OptimizerConfig
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.optim.moving_average import WeightAverage
from tests.support.processes import run_processes
from tests.support.sampling import sampled

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
    with WeightAverage(0.9).follow(optimizer):
        optimizer.step()
    state = [value for value in optimizer.state[model.weight].values() if value.ndim]
    assert optimizer_bytes(keys) * 64 * 32 == sum(value.nbytes for value in state)


@pytest.mark.parametrize(
    "row",
    [*measured("zero_bytes"), *measured("data_parallel_bytes")],
    ids=lambda row: f"{row['strategy']}-{row['precision']}-{row['processes']}",
)
def test_data_parallelism_keeps_and_sends_what_was_measured(row: dict[str, Any]) -> None:
    strategy, how = row["strategy"], (row["precision"], row["processes"], LLAMA_SMALL)
    if strategy.startswith("zero"):
        kept, _, sent = zero_bytes.closed_forms(int(strategy[-1]), *how)
        assert row["kept ratio"] == pytest.approx(1, abs=1e-3)
    else:
        kept, sent = data_parallel_bytes.closed_forms(strategy, *how)
    assert kept / 1e6 * row["kept ratio"] == pytest.approx(row["kept MB"], rel=1e-9)
    assert sent / 1e6 * row["sent ratio"] == pytest.approx(row["sent MB"], rel=1e-9)


def test_tensor_parallelism_splits_all_but_the_norms() -> None:
    rows = {(row["axes"], row["processes"]): row["closed form MB"] * 1e6 for row in measured("axes_memory")}
    norms = norm_bytes(axes_memory.ROWS * axes_memory.TOKENS, axes_memory.WIDTH)
    alone = 2 * rows["tp, sequence", 2]
    assert activation_share(alone, norms, tp=4) == pytest.approx(rows["tp", 4])
    assert activation_share(alone, norms, tp=4, sequence_parallel=True) == pytest.approx(rows["tp, sequence", 4])
    assert activation_share(alone, norms, cp=4) == pytest.approx(rows["cp ring", 4])


@pytest.mark.parametrize("axes", axes_bytes.CASES)
def test_a_step_on_these_axes_sends_what_was_counted(axes: str) -> None:
    case, fields = axes_bytes.CASES[axes], resolved_fields(compose([f"model={axes_bytes.MODEL}"])[0].model)
    calls, sent = Counter[str](), Counter[str]()
    for stage in range(case.pp):
        for name, (number, size) in axes_bytes.closed_form(case, stage, fields).items():
            calls[name] += number * case.world // case.pp
            sent[name] += int(size * case.world // case.pp)
    rows = {row["collective"]: row for row in measured("axes_bytes") if row["axes"] == axes}
    assert dict(calls) == {name: row["calls"] for name, row in rows.items()}
    assert dict(sent) == {name: row["sent bytes"] for name, row in rows.items()}


@pytest.mark.slow
@pytest.mark.parametrize("axes", sampled([(axes,) for axes in axes_bytes.CASES], lambda axes: axes == "tp2 x cp2"))
def test_a_step_sends_what_the_closed_form_says(axes: str) -> None:
    case, fields = axes_bytes.CASES[axes], resolved_fields(compose([f"model={axes_bytes.MODEL}"])[0].model)
    for (found,) in run_processes(case.world, axes_bytes.measure, [case]):
        expected = axes_bytes.closed_form(case, found["stage"], fields)
        assert {name: (found["calls"][name], found["sent"][name]) for name in found["calls"]} == expected


def test_expert_parallelism_sends_what_was_counted() -> None:
    rows = measured("expert_bytes")
    config = expert_bytes.CONFIG
    passes = config["num_hidden_layers"] * expert_bytes.MICRO_BATCHES
    for world in {row["processes"] for row in rows}:
        by_name = {row["collective"]: row for row in rows if row["processes"] == world}
        elsewhere = by_name["dispatch_tokens"]["sent bytes"] // (4 * config["hidden_size"])
        expected = expert_traffic(passes, config["num_local_experts"], config["hidden_size"], world, elsewhere)
        assert expected == {name: (row["calls"], row["sent bytes"]) for name, row in by_name.items()}


def test_a_ring_sends_nothing_alone_and_all_but_its_part_together() -> None:
    assert exchanged_bytes(12, 1) == all_reduced(12, 1) == 0
    assert (exchanged_bytes(12, 4), all_reduced(12, 4)) == (9, 18)
