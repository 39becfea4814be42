"""fp16 with its loss scale, and bf16_true. Oracles: the plain fp32 loop; one process of the same precision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.traffic.collectives import Counted, _Mode
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.step import MicroBatchStop
from tests.support.plain_training import assembled, norm_of, plain
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, trained

CASE = Case(model="llama", micro_batches=2)
TWO = ParallelDims(dp_shard=2)


def weights_error(results: list[Any], expected: dict[str, torch.Tensor]) -> float:
    found = assembled([result.weights for result in results])
    off = norm_of(found[name].double() - value.double() for name, value in expected.items())
    return off / norm_of(expected.values())


def gradient_error(results: list[Any], expected: dict[str, torch.Tensor]) -> float:
    found = assembled([result.gradients for result in results])
    off = norm_of(found[name].double() - value.double() for name, value in expected.items())
    return off / norm_of(expected.values())


def check_precision(case: Case, dims: ParallelDims, dtype: torch.dtype) -> None:
    expected = plain(replace(case, precision="fp32"))
    alone = run_processes(1, trained, case, ParallelDims())
    found = run_processes(dims.world_size, trained, case, dims)
    assert {shard.tensor.dtype for shard in found[0].weights} == {dtype}
    for results in (alone, found):
        assert all(abs(a / b - 1) < 2e-3 for a, b in zip(results[0].losses, expected["losses"], strict=True))
    assert 0 < weights_error(found, expected["weights"]) <= 1.5 * weights_error(alone, expected["weights"])


def test_fp16_keeps_fp32_weights_and_is_as_good_as_one_fp16_process() -> None:
    check_precision(replace(CASE, precision="fp16"), TWO, torch.float32)


@pytest.mark.slow
def test_bf16_true_is_bf16_throughout() -> None:
    case = replace(CASE, precision="bf16_true")
    check_precision(case, ParallelDims(dp_replicate=2), torch.bfloat16)
    (alone,) = run_processes(1, trained, case, ParallelDims())
    states = {shard.tensor.dtype for shard in alone.optimizer if not shard.tensor_slice.name.endswith("/step")}
    assert states == {torch.bfloat16}


def sent_and_trained(case: Case, dims: ParallelDims) -> tuple[dict[str, float], Outcome]:
    """Bytes that this process sends for losses and gradients, by what they are."""
    counted = Counted()

    def watch(strategy: Any) -> None:
        run = strategy.run_step

        def run_step(batch: Any) -> Any:
            with _Mode(counted):
                return run(batch)

        strategy.run_step = run_step

    with mock.patch.object(MicroBatchStop, "should_leave", return_value=False):  # asks by the clock
        outcome = trained(case, dims, on_start=watch)
    return dict(counted.sent), outcome


def halved(case: Case, dims: ParallelDims) -> tuple[dict[str, float], dict[str, float], Outcome]:
    """What is sent with gradients in fp32 and in bf16, and the outcome of the latter."""
    wide, _ = sent_and_trained(case, dims)
    return wide, *sent_and_trained(replace(case, reduce="bf16"), dims)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "micro_batches", "dims"),
    [
        (None, 2, TWO),
        pytest.param(None, 1, ParallelDims(dp_replicate=2), marks=pytest.mark.exhaustive),
        pytest.param(None, 1, ParallelDims(dp_replicate=2, dp_shard=2), marks=pytest.mark.exhaustive),
        pytest.param(1, 2, TWO, marks=pytest.mark.exhaustive),
        pytest.param(2, 2, TWO, marks=pytest.mark.exhaustive),
        (3, 2, TWO),
    ],
)
def test_gradients_in_bf16_are_half_the_bytes_and_within_its_bound(stage: Any, micro_batches: int, dims: Any) -> None:
    case = replace(CASE, precision="bf16", zero_stage=stage, micro_batches=micro_batches, steps=2)
    expected = plain(replace(case, precision="fp32"))["gradients"]
    (alone,) = run_processes(1, trained, replace(case, zero_stage=None), ParallelDims())
    found = run_processes(dims.world_size, halved, case, dims)
    for wide, narrow, _ in found:
        assert wide.keys() == narrow.keys() and any(name.startswith("gradients") for name in wide)
        for name, size in wide.items():
            assert narrow[name] == (size / 2 if name.startswith("gradients") else size), name
    errors = [gradient_error(results, expected) for results in ([alone], [outcome for *_, outcome in found])]
    assert 0 < errors[1] <= 1.5 * errors[0]


def overflowing() -> dict[str, Any]:
    """One step whose scale is too large for rank 1 alone, then steps with what it became."""
    seen: dict[str, Any] = {}

    def too_large(strategy: Any) -> None:
        # One rank's gradients overflow fp16; the others' do not.
        strategy._loss_scale.value = 2.0**24 if dist.get_rank() == 1 else 2.0**16
        seen["before"] = [shard.tensor.clone() for shard in strategy.model_shards()]

    def note(strategy: Any) -> None:
        seen["after"] = [shard.tensor.clone() for shard in strategy.model_shards()]
        seen["state"] = strategy.state_entries()

    outcome = trained(replace(CASE, precision="fp16", steps=1), TWO, on_start=too_large, on_end=note)
    same = all(torch.equal(a, b) for a, b in zip(seen["before"], seen["after"], strict=True))
    return {"norms": outcome.norms, "same": same, "state": seen["state"]}


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    for rank, result in enumerate(run_processes(2, overflowing)):
        assert len(result["norms"]) == 1 and not math.isfinite(result["norms"][0]), "a skipped step is a step"
        assert result["same"]
        assert result["state"] == {"loss_scale": {"value": 2.0**23 if rank else 2.0**15, "updates": 0}}
