"""Oracle: the whole tensors that the local shards were cut from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.host_bytes import exchange_json
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import WorkerError
from mgpu_pipe.verify.comparison import check_covered, fill, from_rank_0, squared_errors, whole_errors
from tests.support.processes import run_processes


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(5, 4, generator=generator),
        "w/step": torch.tensor(7.0),
        "odd": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(3, generator=generator).bfloat16(),
    }


def halves() -> list[LocalShard]:
    """Rank 0 has two rows of ``w``, rank 1 three; both have the scalar."""
    first, rows = ((0, 2), (2, 3))[dist.get_rank()]
    return [
        LocalShard(TensorSlice("w", (first, 0), (rows, 4)), (5, 4), torch.zeros(rows, 4)),
        LocalShard(TensorSlice("w/step", (), ()), (), torch.zeros(())),
    ]


def exchanged() -> dict[str, object]:
    full = from_rank_0(tensors() if dist.get_rank() == 0 else {})
    shards = halves()
    fill(shards, full)
    expected = {name: full[name] for name in ("w", "w/step")}
    exact = whole_errors("weights", exchange_json(squared_errors(shards, expected), None), expected)
    if dist.get_rank() == 1:
        shards[0].tensor[2, 3] += 0.5
        shards[1].tensor += 2.0
    off = whole_errors("weights", exchange_json(squared_errors(shards, expected), None), expected)
    try:
        check_covered("weights", shards[: 2 - dist.get_rank()][dist.get_rank() :], expected)
        fault = ""
    except WorkerError as error:
        fault = str(error)
    return {"full": full, "exact": exact, "off": off, "fault": fault}


def test_pieces_are_filled_from_and_compared_with_the_whole() -> None:
    for result in run_processes(2, exchanged):
        for name, tensor in tensors().items():
            assert result["full"][name].dtype == tensor.dtype
            assert torch.equal(result["full"][name], tensor)
        assert result["exact"] == {"w": 0.0, "w/step": 0.0}
        assert result["off"] == pytest.approx({"w": 0.5, "w/step": 2.0})  # the worst copy of the scalar
        assert "pieces of the weights do not make up w: 1 slices hold 8 of the 20 elements" in result["fault"]


def test_a_gradient_that_no_rank_has_counts_as_zero() -> None:
    full = {"w": torch.full((4,), 2.0)}
    assert whole_errors("gradient", [[]], full, partial=True) == {"w": 4.0}
    extra = LocalShard(TensorSlice.whole("unused", (2,)), (2,), torch.tensor([3.0, 4.0]))
    assert whole_errors("gradient", [squared_errors([extra], {})], {}, partial=True) == {"unused": 5.0}


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    full = {"w": torch.zeros(2)}
    shard = LocalShard(TensorSlice.whole("w", (2,)), (2,), torch.tensor([float("nan"), 0.0]))
    assert whole_errors("weights", [squared_errors([shard], full)], full) == {"w": float("inf")}
