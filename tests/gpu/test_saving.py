"""A save's copies of tensors on a device, and a checkpoint that is read into such tensors; dry on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from mgpu_pipe.checkpoint.background import HostCopies
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from tests.checkpoint.support import config_file
from tests.support.tables import TOLD

Context = Callable[[], AbstractContextManager[None]]


def shards_of(tensors: dict[str, torch.Tensor]) -> list[LocalShard]:
    return [LocalShard(TensorSlice.whole(n, tuple(t.shape)), tuple(t.shape), t) for n, t in tensors.items()]


def test_copies_are_complete_and_those_of_a_gpu_page_locked(device: torch.device, no_waits: Context) -> None:
    tensors = {"a": torch.randn(1000, 300, device=device), "b": torch.randn(70, 50, device=device).t()}
    shards = shards_of(tensors)
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    copies = HostCopies()
    copies.reserve(shards)
    copies.take(shards)  # once without a demand: memory and streams are made
    copies.wait()
    with no_waits():
        taken = copies.take(shards)
        copies.before_writing()
        for tensor in tensors.values():
            tensor.zero_()
    copies.wait()
    assert all(torch.equal(shard.tensor, expected[shard.tensor_slice.name]) for shard in taken)
    assert taken[0].tensor.is_pinned() == (device.type == "cuda")
    copies.release()


def test_a_save_stalls_training_for_less_than_its_copies_take(device: torch.device) -> None:
    """On a GPU training goes on until its next update; the figures are told."""
    wide = device.type == "cuda"
    shards = shards_of({f"{at}": torch.randn(1 << (26 if wide else 16), device=device) for at in range(8)})
    copies = HostCopies()
    copies.reserve(shards)
    copies.take(shards)
    copies.wait()
    began = time.perf_counter()
    copies.take(shards)
    stalled = time.perf_counter() - began
    copies.wait()
    copied = time.perf_counter() - began
    size = sum(shard.tensor.nbytes for shard in shards)
    copies.release()
    TOLD.append(
        f"a save's copies of {size / 2**20:.0f} MiB on {device.type}: training stalls for {1000 * stalled:.1f} ms, "
        f"they are made after {1000 * copied:.1f} ms"
    )


def test_tensors_on_a_device_are_saved_and_filled_there(device: torch.device, tmp_path: Path) -> None:
    base = torch.rand(3000, 2000, device=device)
    shards = [LocalShard(TensorSlice.whole("t", (2000, 3000)), (2000, 3000), base.t())]
    folder = save(tmp_path / "checkpoints", 1, shards, [], {}, config_file(tmp_path))
    target = torch.zeros(3000, 2000, device=device)
    CheckpointReader(folder).read([LocalShard(shards[0].tensor_slice, (2000, 3000), target.t())], "model")
    assert torch.equal(target, base)
