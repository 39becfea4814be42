"""A save's copies of tensors on a device, and a checkpoint that is read into such tensors; dry on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from mgpu_pipe.checkpoint.background import HostCopies
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from tests.checkpoint.support import config_file


def test_copies_are_complete_and_those_of_a_gpu_page_locked(device: torch.device) -> None:
    tensors = {"a": torch.randn(1000, 300, device=device), "b": torch.randn(70, 50, device=device).t()}
    shards = [LocalShard(TensorSlice.whole(n, tuple(t.shape)), tuple(t.shape), t) for n, t in tensors.items()]
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    copies = HostCopies()
    taken = copies.take(shards)
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(shard.tensor, expected[shard.tensor_slice.name]) for shard in taken)
    assert taken[0].tensor.is_pinned() == (device.type == "cuda")
    copies.release()


def test_tensors_on_a_device_are_saved_and_filled_there(device: torch.device, tmp_path: Path) -> None:
    base = torch.rand(3000, 2000, device=device)
    shards = [LocalShard(TensorSlice.whole("t", (2000, 3000)), (2000, 3000), base.t())]
    folder = save(tmp_path / "checkpoints", 1, shards, [], {}, config_file(tmp_path))
    target = torch.zeros(3000, 2000, device=device)
    CheckpointReader(folder).read([LocalShard(shards[0].tensor_slice, (2000, 3000), target.t())], "model")
    assert torch.equal(target, base)
