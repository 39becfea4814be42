"""Saves by several real processes, loads by others, and what happens when one of them fails or is killed."""

from __future__ import annotations

import errno
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.selection import newest_valid
from mgpu_pipe.errors import CheckpointError, CheckpointSaveError
from mgpu_pipe.parallel.rank_exchange import exchange_json
from tests.checkpoint.support import (
    CUTS,
    config_file,
    cut_shards,
    empty_like,
    model_tensors,
    optimizer_tensors,
    save_alone,
)
from tests.support.processes import run_processes

pytestmark = pytest.mark.slow

OPERATIONS = ("create", "write", "sync", "sync_folder", "rename", "make_folder", "remove_folder")


def _save(root: Path, step: int, cut: str, seed: int | None = None) -> Path:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = step if seed is None else seed
    model = cut_shards(model_tensors(seed), CUTS[cut], rank, world_size)
    optimizer = cut_shards(optimizer_tensors(seed), CUTS[cut], rank, world_size)
    return save(root, step, model, optimizer, {"seed": seed}, config_file(root.parent))


def _check(folder: Path, cut: str, seed: int) -> None:
    """This process's local shards, read, equal plain slices of the whole tensors."""
    reader = CheckpointReader(folder)
    for kind, tensors in (("model", model_tensors(seed)), ("optimizer", optimizer_tensors(seed))):
        wanted = cut_shards(tensors, CUTS[cut], dist.get_rank(), dist.get_world_size())
        got = empty_like(wanted)
        reader.read(got, kind)
        for want, have in zip(wanted, got, strict=True):
            assert torch.equal(want.tensor, have.tensor), want.tensor_slice
        assert sorted(reader.names(kind)) == sorted(tensors)


def _exchange() -> list[Any]:
    rank = dist.get_rank()
    return exchange_json({"rank": rank, "text": "ä" * 1000 * rank, "float": 0.1 + rank, "none": None}, None)


def test_json_of_different_sizes_reaches_every_rank_in_order() -> None:
    expected = [{"rank": r, "text": "ä" * 1000 * r, "float": 0.1 + r, "none": None} for r in range(3)]
    assert run_processes(3, _exchange) == [expected] * 3


def test_four_replicas_write_each_tensor_once_and_share_the_work(tmp_path: Path) -> None:
    folders = run_processes(4, _save, tmp_path / "checkpoints", 5, "whole")
    assert folders == [tmp_path / "checkpoints" / "step-00000005"] * 4
    names: list[str] = []
    for path in sorted(folders[0].glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names += list(file.keys())
    expected = {**model_tensors(), **optimizer_tensors()}
    assert sorted(name.split("@")[0] for name in names) == sorted(expected)
    assert len(list(folders[0].glob("*.safetensors"))) > 4


@pytest.mark.parametrize(("source", "target"), [("rows", "columns"), ("fused", "flat"), ("flat", "rows")])
def test_three_ranks_save_and_two_load_other_cuts_bit_equal(source: str, target: str, tmp_path: Path) -> None:
    folder = run_processes(3, _save, tmp_path / "checkpoints", 5, source)[0]
    run_processes(2, _check, folder, target, 5)


def test_a_missing_file_of_a_rank_is_named_whatever_is_checked(tmp_path: Path) -> None:
    folder = run_processes(2, _save, tmp_path / "checkpoints", 5, "rows")[0]
    (folder / "model-00001.safetensors").unlink()
    for verify in ("full", "size"):
        with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: the file is missing"):
            CheckpointReader(folder, verify)
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: the file is missing"):
        CheckpointReader(folder, "off").read(empty_like(cut_shards(model_tensors(5), CUTS["whole"])), "model")
    assert newest_valid(tmp_path / "checkpoints") is None


def test_the_tensors_do_not_depend_on_who_saved_them(tmp_path: Path) -> None:
    alone = CheckpointReader(save_alone(tmp_path / "alone" / "checkpoints", 5))
    sharded = CheckpointReader(run_processes(3, _save, tmp_path / "sharded" / "checkpoints", 5, "flat")[0])
    for kind in ("model", "optimizer"):
        described = [
            {name: (tensor.shape, tensor.dtype) for name, tensor in reader.manifest.tensors[kind].items()}
            for reader in (alone, sharded)
        ]
        assert described[0] == described[1]


def _fail_on_rank_1(root: Path, spoil: str) -> tuple[str, str, int]:
    """Save with rank 1's disk spoiled; what this rank got, and what is left."""
    undo = SPOILED[spoil]() if dist.get_rank() == 1 else None
    try:
        _save(root, 7, "rows")
    except CheckpointSaveError as error:
        cause = error.__cause__
        number = cause.errno if isinstance(cause, OSError) else 0
        return str(error), ",".join(sorted(path.name for path in root.iterdir())), number or 0
    finally:
        if undo:
            undo()
    raise AssertionError("the save did not fail")


def _full_disk() -> Callable[[], None]:
    create = files.create
    files.create = lambda path: os.open("/dev/full", os.O_WRONLY)

    def undo() -> None:
        files.create = create

    return undo


def _file_size_limit() -> Callable[[], None]:
    """The kernel takes a part of the data, then no more: a short write, then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _defect() -> Callable[[], None]:
    write = files.write

    def fail(descriptor: int, data: files.Buffer) -> None:
        raise ZeroDivisionError("a defect")

    files.write = fail

    def undo() -> None:
        files.write = write

    return undo


SPOILED = {"full": _full_disk, "limit": _file_size_limit, "defect": _defect}


@pytest.mark.parametrize(
    ("spoil", "number", "words"),
    [
        ("full", errno.ENOSPC, "No space left on device"),
        ("limit", errno.EFBIG, "File too large"),
        ("defect", 0, "ZeroDivisionError: a defect"),
    ],
)
def test_an_error_on_one_rank_fails_the_save_on_all_and_leaves_the_last_good_one(
    spoil: str, number: int, words: str, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    save_alone(root, 6)
    results = run_processes(3, _fail_on_rank_1, root, spoil)
    for message, left, _ in results:
        assert message == results[0][0] and words in message and "rank 1" in message and "step 7" in message
        assert left == "step-00000006"
    if number:
        assert "model-00001.safetensors" in results[0][0]
        assert [result[2] for result in results] == [0, number, 0]
    found = newest_valid(root)
    assert found is not None and found.step == 6


def _save_into_read_only(root: Path) -> str:
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write anywhere; nobody may not
    try:
        _save(root, 7, "whole")
    except CheckpointSaveError as error:
        return str(error)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    raise AssertionError("the save did not fail")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_read_only_folder_fails_the_save_on_all_ranks(open_folder: Path) -> None:
    root = open_folder / "checkpoints"
    save_alone(root, 6)
    root.chmod(0o555)
    try:
        messages = run_processes(2, _save_into_read_only, root)
    finally:
        root.chmod(0o755)
    assert messages[0] == messages[1]
    assert "rank 0" in messages[0] and "Permission denied" in messages[0] and "step-00000007.partial" in messages[0]
    assert [path.name for path in root.iterdir()] == ["step-00000006"]


def _replace_and_fail(root: Path) -> None:
    """Rank 1's disk is full while a step that exists already is saved once more."""
    with pytest.raises(CheckpointSaveError):
        undo = _full_disk() if dist.get_rank() == 1 else None
        try:
            _save(root, 6, "rows", seed=99)
        finally:
            if undo:
                undo()
    _save(root, 6, "rows", seed=100)
    _check(root / "step-00000006", "whole", 100)


def test_a_step_that_exists_is_replaced_and_kept_if_the_new_save_fails(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_alone(root, 6)
    with_failure = run_processes(2, _replace_and_fail, root)
    assert with_failure == [None, None]
    assert [path.name for path in root.iterdir()] == ["step-00000006"]


def _save_until_killed(root: Path, step: int, seed: int, killed_rank: int, after: int) -> int:
    """Save, SIGKILL ``killed_rank`` before its file operation number ``after``; how many there were, if it lives."""
    count = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal count
            if count == after and dist.get_rank() == killed_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return operation(*args)

        return call

    for name in OPERATIONS:
        setattr(files, name, counted(getattr(files, name)))
    shards = cut_shards(_few(seed), CUTS["rows"], dist.get_rank(), dist.get_world_size())
    save(root, step, shards, shards[:1], {"seed": seed}, config_file(root.parent))
    return count


def _few(seed: int) -> dict[str, torch.Tensor]:
    tensors = model_tensors(seed)
    return {name: tensors[name] for name in ("qkv.weight", "norm.weight")}


def _killed(root: Path, step: int, seed: int, world_size: int, killed_rank: int, after: int) -> bool:
    try:
        run_processes(world_size, _save_until_killed, root, step, seed, killed_rank, after)
    except AssertionError as error:
        assert world_size > 1 or "rank 0 died" in str(error)
        return True
    return False


def _seed_of_newest(root: Path, step: int) -> int:
    """The seed of the newest whole checkpoint, whose values are held against that seed's."""
    found = newest_valid(root, "stop", "full")
    assert found is not None and found.step <= step
    reader = CheckpointReader(found.path)
    seed = int(reader.state["seed"]) if "seed" in reader.state else found.step
    wanted = cut_shards(_few(seed), CUTS["whole"])
    got = empty_like(wanted)
    reader.read(got, "model")
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, got, strict=True))
    return seed


@pytest.mark.parametrize("step", [6, 7])
def test_a_save_killed_before_any_of_its_file_operations_leaves_the_old_or_the_new_one(
    step: int, tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    save_alone(root, 6)  # in the case of step 6 it is replaced
    seeds: list[int] = []
    after = 0
    while _killed(root, step, 50 + after, 1, 0, after):
        seeds.append(_seed_of_newest(root, step))
        after += 1
    assert after > 15 and 6 in seeds
    assert _seed_of_newest(root, step) == 50 + after
    assert sorted(path.name for path in root.iterdir()) == sorted({"step-00000006", f"step-{step:08d}"})


def test_killing_one_of_two_ranks_leaves_a_partial_that_is_never_taken(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_alone(root, 6)
    assert _killed(root, 7, 7, 2, 1, 2)
    assert (root / "step-00000007.partial").exists()
    assert _seed_of_newest(root, 7) == 6
    run_processes(2, _save, root, 8, "rows")
    assert sorted(path.name for path in root.iterdir()) == ["step-00000006", "step-00000008"]
