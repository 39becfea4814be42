"""One process: what is saved comes back, in any cut, dtype and memory layout; the oracle is plain torch slicing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES
from mgpu_pipe.checkpoint.live_tensors import DTYPES, SLICE_BYTES, host_bytes, select
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointError, CheckpointSaveError
from tests.checkpoint.support import (
    CUTS,
    config_file,
    cut_shards,
    empty_like,
    model_tensors,
    optimizer_tensors,
    save_alone,
    whole,
)


def test_a_checkpoint_holds_exactly_the_files_of_the_design(tmp_path: Path) -> None:
    folder = save_alone(tmp_path / "checkpoints", 100)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    names = ["config.yaml", "manifest.json", "model-00000.safetensors", "optimizer-00000.safetensors", "state.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-00000100"]
    assert (folder / "config.yaml").read_text() == config_file(tmp_path).read_text()


def test_the_state_comes_back_with_every_bit(tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path / "checkpoints", 3))
    assert reader.state == {"samples_consumed": 96, "learning_rate": 0.1 + 0.2, "step": 3, "format_version": 1}
    assert reader.config_text == config_file(tmp_path).read_text()


def test_the_safetensors_library_loads_the_files(tmp_path: Path) -> None:
    folder = save_alone(tmp_path / "checkpoints", 3)
    loaded = load_file(folder / "optimizer-00000.safetensors")
    tensors = optimizer_tensors(3)
    assert len(loaded) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[TensorSlice.whole(name, tuple(tensor.shape)).key], tensor)


def test_equal_content_makes_equal_files(tmp_path: Path) -> None:
    first, second = save_alone(tmp_path / "a" / "checkpoints", 3), save_alone(tmp_path / "b" / "checkpoints", 3)
    assert [p.read_bytes() for p in sorted(first.iterdir())] == [p.read_bytes() for p in sorted(second.iterdir())]
    other = save_alone(tmp_path / "c" / "checkpoints", 3, seed=4)
    assert CheckpointReader(first).manifest.root == CheckpointReader(second).manifest.root
    assert CheckpointReader(first).manifest.root != CheckpointReader(other).manifest.root


@pytest.mark.parametrize("verify", ["full", "size", "off"])
@pytest.mark.parametrize("cut", CUTS)
def test_any_rank_of_any_cut_reads_its_slices(cut: str, verify: str, tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path / "checkpoints", 3), verify)  # type: ignore[arg-type]
    for kind, tensors in (("model", model_tensors(3)), ("optimizer", optimizer_tensors(3))):
        for rank in range(3):
            wanted = cut_shards(tensors, CUTS[cut], rank, 3)
            got = empty_like(wanted)
            reader.read(got, kind)
            for want, have in zip(wanted, got, strict=True):
                assert torch.equal(want.tensor, have.tensor), want.tensor_slice


def test_blocks_of_a_four_dimensional_tensor_agree_with_slicing(tmp_path: Path) -> None:
    value = torch.arange(7 * 6 * 5 * 9, dtype=torch.int64).reshape(7, 6, 5, 9)
    shards = [LocalShard(TensorSlice.whole("t", (7, 6, 5, 9)), (7, 6, 5, 9), value)]
    folder = save(tmp_path / "checkpoints", 1, shards, [], {}, config_file(tmp_path))
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        low = [int(torch.randint(n, (), generator=generator)) for n in value.shape]
        room = [n - lo for n, lo in zip(value.shape, low, strict=True)]
        size = [int(torch.randint(1, most + 1, (), generator=generator)) for most in room]
        tensor_slice = TensorSlice("t", tuple(low), tuple(size))
        target = torch.zeros(size, dtype=torch.int64)
        CheckpointReader(folder).read([LocalShard(tensor_slice, (7, 6, 5, 9), target)], "model")
        assert torch.equal(target, select(value, tensor_slice.offsets, tensor_slice.shape)), tensor_slice


def test_columns_far_apart_and_close_together_are_read(tmp_path: Path) -> None:
    tensors = {"wide": torch.rand(40, 9000), "narrow": torch.rand(70_000, 40)}
    folder = save(tmp_path / "checkpoints", 1, cut_shards(tensors, whole), [], {}, config_file(tmp_path))
    for rank in range(2):
        wanted = cut_shards(tensors, CUTS["columns"], rank, 2)
        got = empty_like(wanted)
        CheckpointReader(folder).read(got, "model")
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, got, strict=True))
        far_apart = CheckpointReader(folder, "size")
        far_apart.read(got[:1], "model")
        assert far_apart.bytes_read <= got[0].tensor.nbytes + 400


def test_a_slice_of_rows_reads_its_own_bytes_and_the_header_alone(tmp_path: Path) -> None:
    big = torch.rand(4 * CHUNK_BYTES // 4 // 256, 256)
    folder = save(tmp_path / "checkpoints", 1, cut_shards({"w": big}, whole), [], {}, config_file(tmp_path))
    reader = CheckpointReader(folder, "size")
    tensor_slice = TensorSlice("w", (1000, 0), (2000, 256))
    target = torch.zeros(2000, 256)
    reader.read([LocalShard(tensor_slice, tuple(big.shape), target)], "model")
    assert torch.equal(target, big[1000:3000])
    assert target.nbytes <= reader.bytes_read <= target.nbytes + 400
    full = CheckpointReader(folder, "full")
    full.read([LocalShard(tensor_slice, tuple(big.shape), target)], "model")
    assert full.bytes_read == CHUNK_BYTES  # rows 1000 to 3000 and the header lie in the first chunk


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_survives(name: str, tmp_path: Path) -> None:
    value = (torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) * 9).to(DTYPES[name])
    shards = [
        LocalShard(TensorSlice.whole("t", (6, 5)), (6, 5), value),
        LocalShard(TensorSlice.whole("s", ()), (), value[2, 3]),
    ]
    folder = save(tmp_path / "checkpoints", 1, shards, [], {}, config_file(tmp_path))
    got = [LocalShard(p.tensor_slice, p.global_shape, torch.zeros_like(p.tensor)) for p in shards]
    reader = CheckpointReader(folder)
    reader.read(got, "model")
    for want, have in zip(shards, got, strict=True):
        assert have.tensor.reshape(-1).view(torch.uint8).tolist() == want.tensor.reshape(-1).view(torch.uint8).tolist()
    assert reader.dtype("t") == DTYPES[name] and reader.shape("t") == (6, 5) and reader.shape("s") == ()


def test_stored_values_are_converted_to_the_live_dtype(tmp_path: Path) -> None:
    tensors = model_tensors(3)
    reader = CheckpointReader(save_alone(tmp_path / "checkpoints", 3))
    for dtype in (torch.bfloat16, torch.float64):
        got = cut_shards({name: torch.zeros_like(t, dtype=dtype) for name, t in tensors.items()}, whole)
        reader.read(got, "model")
        for shard in got:
            assert torch.equal(shard.tensor, tensors[shard.tensor_slice.name].to(dtype))


def test_views_and_parameters_are_saved_and_filled_in_place(tmp_path: Path) -> None:
    base = torch.rand(30, 20)
    parameter = torch.nn.Parameter(torch.rand(8, 4))
    shards = [
        LocalShard(TensorSlice.whole("t", (10, 30)), (10, 30), base.t()[::2]),
        LocalShard(TensorSlice.whole("p", (8, 4)), (8, 4), parameter),
    ]
    folder = save(tmp_path / "checkpoints", 1, shards, [], {}, config_file(tmp_path))
    other, live = torch.zeros(30, 20), torch.nn.Parameter(torch.zeros(8, 4))
    memory = live.data_ptr()
    CheckpointReader(folder).read(
        [
            LocalShard(shards[0].tensor_slice, (10, 30), other.t()[::2]),
            LocalShard(shards[1].tensor_slice, (8, 4), live),
        ],
        "model",
    )
    assert torch.equal(other[:, ::2], base[:, ::2]) and not other[:, 1::2].any()
    assert torch.equal(live, parameter) and live.data_ptr() == memory and live.requires_grad


def test_a_kernel_that_takes_less_than_it_was_given_is_given_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:70_001]))
    reader = CheckpointReader(save_alone(tmp_path / "checkpoints", 3))
    got = empty_like(cut_shards(model_tensors(3), whole))
    reader.read(got, "model")
    assert all(torch.equal(shard.tensor, model_tensors(3)[shard.tensor_slice.name]) for shard in got)


def test_a_large_view_reaches_the_disk_in_bounded_slices() -> None:
    view = torch.rand(3000, 2000).t()
    parts = [bytes(part) for part in host_bytes(view)]
    assert len(parts) > 2 and max(map(len, parts)) <= SLICE_BYTES
    assert b"".join(parts) == view.contiguous().numpy().tobytes()


def test_a_checkpoint_of_another_model_is_refused_with_all_differences(tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path / "checkpoints", 3))
    other = {"qkv.weight": torch.zeros(96, 32), "norm.weight": torch.zeros(34), "head.weight": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError) as caught:
        reader.read(cut_shards(other, whole), "model")
    assert "head.weight is not in the checkpoint" in str(caught.value)
    assert "norm.weight has the shape [33] in the checkpoint and [34] here" in str(caught.value)
    assert not other["qkv.weight"].any()
    with pytest.raises(CheckpointError, match=r"experts is only in the checkpoint"):
        reader.require({name: t.shape for name, t in model_tensors().items() if name != "experts"}, "model")
    reader.require({name: t.shape for name, t in model_tensors().items()}, "model")


def test_what_json_cannot_hold_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    shards = cut_shards(model_tensors(), whole)
    for state in ({"loss": float("nan")}, {"x": object()}, {"step": 2}):
        with pytest.raises(CheckpointSaveError, match="step 1 could not be written"):
            save(tmp_path / "checkpoints", 1, shards, [], state, config_file(tmp_path))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_pieces_that_are_not_what_they_say_are_refused(tmp_path: Path) -> None:
    tensor_slice = TensorSlice.whole("t", (4,))
    for tensor, words in (
        (torch.zeros(5), r"shape \[5\]"),
        (torch.zeros(4, device="meta"), "meta"),
        (torch.zeros(4, dtype=torch.complex64), "complex64"),
    ):
        with pytest.raises(CheckpointSaveError, match=words):
            save(tmp_path / "checkpoints", 1, [LocalShard(tensor_slice, (4,), tensor)], [], {}, config_file(tmp_path))


def test_the_manifest_is_json_that_others_can_read(tmp_path: Path) -> None:
    folder = save_alone(tmp_path / "checkpoints", 3)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tensors"]["model"]["norm.weight"] == {
        "shape": [33],
        "dtype": "F32",
        "boxes": [[[0], [33], "model-00000.safetensors"]],
    }
    assert manifest["files"]["state.json"]["size"] == (folder / "state.json").stat().st_size
