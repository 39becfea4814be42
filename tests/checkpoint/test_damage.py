"""Damaged and lying checkpoints: found, named by file and chunk, never believed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, record_of
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.selection import check_step
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointError
from tests.checkpoint.support import cut_shards, empty_like, flip_bit, model_tensors, rewrite, save_alone, whole

MODEL = "model-00000.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_alone(tmp_path_factory.mktemp("run") / "checkpoints", 3)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "step-00000003"))


def _read(folder: Path, verify: str = "full") -> None:
    CheckpointReader(folder, verify).read(empty_like(cut_shards(model_tensors(3), whole)), "model")  # type: ignore


@pytest.mark.parametrize("name", [MODEL, "optimizer-00000.safetensors", "state.json", "config.yaml", "manifest.json"])
def test_a_flipped_bit_anywhere_is_found(name: str, folder: Path) -> None:
    size = (folder / name).stat().st_size
    for position in {0, 9, size // 2, size - 1}:
        flip_bit(folder / name, position)
        info = check_step(folder, "full")
        assert not info.whole and name in info.faults[0], position
        flip_bit(folder / name, position)
    assert check_step(folder, "full").whole


def test_a_damaged_chunk_is_named_when_it_is_read_and_only_then(folder: Path) -> None:
    flip_bit(folder / MODEL, CHUNK_BYTES + 5)
    with pytest.raises(CheckpointError, match=rf"{MODEL}: chunk 1 of 2 \(from byte {CHUNK_BYTES}\) is damaged"):
        _read(folder)
    assert "chunk 1 of 2" in check_step(folder, "full").faults[0]
    assert check_step(folder, "size").whole
    _read(folder, "size")
    rows = LocalShard(TensorSlice("embed.weight", (0, 0), (9, 512)), (2100, 512), torch.zeros(9, 512))
    CheckpointReader(folder).read([rows], "model")
    assert torch.equal(rows.tensor, model_tensors(3)["embed.weight"][:9])


@pytest.mark.parametrize("keep", [0, 1, 7, 4096, -1])
def test_a_truncated_file_is_found_without_reading_it(keep: int, folder: Path) -> None:
    size = (folder / MODEL).stat().st_size
    os.truncate(folder / MODEL, keep if keep >= 0 else size - 1)
    for verify in ("full", "size"):
        with pytest.raises(CheckpointError, match=f"{MODEL}: has .* bytes, the manifest says {size}"):
            CheckpointReader(folder, verify)
    with pytest.raises(CheckpointError, match=MODEL):
        _read(folder, "off")


@pytest.mark.parametrize("name", [MODEL, "state.json", "config.yaml"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: the file is missing"):
        CheckpointReader(folder)


def test_a_folder_without_a_manifest_is_no_checkpoint(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        CheckpointReader(folder)


@pytest.mark.parametrize("name", [MODEL, "state.json", "manifest.json"])
def test_a_symbolic_link_is_refused_even_to_the_right_bytes(name: str, folder: Path) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    for verify in ("full", "size", "off"):
        with pytest.raises(CheckpointError, match=f"{name}: is a symbolic link"):
            _read(folder, verify)


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_a_file_of_another_step_is_told_apart(verify: str, folder: Path, tmp_path: Path) -> None:
    other = save_alone(tmp_path / "checkpoints", 4)
    shutil.copy(other / MODEL, folder / MODEL)
    with pytest.raises(CheckpointError, match=f"{MODEL}: (chunk 0|is a file of step 4)"):
        _read(folder, verify)


def test_a_file_of_another_run_of_the_same_step_is_told_apart(folder: Path, tmp_path: Path) -> None:
    shutil.copy(save_alone(tmp_path / "checkpoints", 3, seed=9) / MODEL, folder / MODEL)
    with pytest.raises(CheckpointError, match="damaged or of another save"):
        _read(folder)


def test_the_manifest_of_another_step_is_told_apart(folder: Path, tmp_path: Path) -> None:
    shutil.copy(save_alone(tmp_path / "checkpoints", 4) / "manifest.json", folder / "manifest.json")
    with pytest.raises(CheckpointError):
        CheckpointReader(folder)
    with pytest.raises(CheckpointError, match="step is 3, the manifest says 4"):
        CheckpointReader(folder, "off")
    assert "its manifest is of step 4" in check_step(tmp_path / "checkpoints" / "step-00000004", "full", 5).faults[0]


def _tensor(manifest: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = manifest["tensors"]["model"]["norm.weight"]
    return tensor


def _rename_file(manifest: dict[str, Any], name: str) -> None:
    manifest["files"][name] = manifest["files"].pop(MODEL)
    for tensor in manifest["tensors"]["model"].values():
        for tensor_slice in tensor["boxes"]:
            tensor_slice[2] = name


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "parent folder": (lambda m: _rename_file(m, "../" + MODEL), "not a file name in this folder"),
    "absolute path": (lambda m: _rename_file(m, "/etc/passwd"), "not a file name"),
    "the folder itself": (lambda m: _rename_file(m, ".."), "not a file name"),
    "inner folder": (lambda m: _rename_file(m, "a/b"), "not a file name"),
    "zero byte": (lambda m: _rename_file(m, "a\0b"), "not a file name"),
    "empty name": (lambda m: _rename_file(m, ""), "not a file name"),
    "the manifest": (lambda m: _rename_file(m, "manifest.json"), "not a file name"),
    "future version": (lambda m: m.update(format_version=2), "reads version 1"),
    "true as version": (lambda m: m.update(format_version=True), "reads version 1"),
    "text as version": (lambda m: m.update(format_version="1"), "reads version 1"),
    "no state": (lambda m: m["files"].pop("state.json"), "lists no state.json"),
    "unknown key": (lambda m: m.update(extra=1), "has the keys"),
    "negative size": (lambda m: m["files"][MODEL].update(size=-1), "not a size"),
    "size in gigabytes": (lambda m: m["files"][MODEL].update(size=8 << 30), "chunk hashes for 8589934592 bytes"),
    "other size": (lambda m: m["files"]["state.json"].update(size=3), "the manifest says 3"),
    "no hashes": (lambda m: m["files"][MODEL].update(sha256=[]), "0 chunk hashes"),
    "no hash": (lambda m: m["files"][MODEL].update(sha256=["x", "y"]), "not SHA-256"),
    "other shape": (lambda m: _tensor(m).update(shape=[34]), "hold 33 of the 34 elements"),
    "other dims": (lambda m: _tensor(m).update(shape=[33, 1]), "dimensions"),
    "no boxes": (lambda m: _tensor(m).update(boxes=[]), "0 slices"),
    "overlap": (lambda m: _tensor(m)["boxes"].append([[1], [3], MODEL]), "overlap"),
    "unknown file": (lambda m: _tensor(m)["boxes"][0].__setitem__(2, "model-00009.safetensors"), "not a tensor file"),
    "state as weights": (lambda m: _tensor(m)["boxes"][0].__setitem__(2, "state.json"), "not a tensor file"),
    "unknown dtype": (lambda m: _tensor(m).update(dtype="F33"), "unknown dtype"),
    "other dtype": (lambda m: _tensor(m).update(dtype="I32"), "the manifest says I32"),
    "tensor not there": (
        lambda m: m["tensors"]["model"].update({"head": {"shape": [2], "dtype": "F32", "boxes": [[[0], [2], MODEL]]}}),
        "holds nothing under head@0",
    ),
    "box not there": (
        lambda m: _tensor(m).update(boxes=[[[0], [3], MODEL], [[3], [30], MODEL]]),
        r"holds F32 \[33\] under",
    ),
    "wrong type": (lambda m: m.update(tensors=[]), "not a JSON object"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str, folder: Path) -> None:
    change, message = LIES[lie]
    rewrite(folder, change)
    tensors = model_tensors(3)
    if lie == "tensor not there":
        tensors["head"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(folder).read(empty_like(cut_shards(tensors, whole)), "model")


def test_a_manifest_changed_after_the_save_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"norm.weight"', '"norm.height"'))
    with pytest.raises(CheckpointError, match="its root hash differs"):
        CheckpointReader(folder, "off")


def test_a_header_that_claims_gigabytes_is_refused_also_under_a_manifest_that_vouches_for_it(folder: Path) -> None:
    data = bytearray((folder / MODEL).read_bytes())
    data[:8] = (8 << 30).to_bytes(8, "little")
    (folder / MODEL).write_bytes(data)
    record = record_of(data)
    rewrite(folder, lambda m: m["files"].update({MODEL: {"size": record.size, "sha256": list(record.sha256)}}))
    with pytest.raises(CheckpointError, match=f"{MODEL}: header: claims 8589934592 bytes"):
        _read(folder)
