"""Saving beside training: what is saved, when one waits for another, and where errors go.

Oracle: the values that the tensors had when the save was asked for. The disk is slowed down by an event that the test
sets, so that training certainly goes on while the write is under way.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint.background import HostCopies
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.selection import list_steps, ruined_steps
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.errors import CheckpointSaveError, NonFiniteError
from mgpu_pipe.training.save_and_resume import Checkpointer
from tests.checkpoint.support import config_file, cut_shards, empty_like, rows
from tests.support.processes import run_processes

Tensors = dict[str, torch.Tensor]


class Trained:
    """Stands for a strategy: tensors that change in place at every step."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights: Tensors = {
            "large": torch.randn(300, 4000, generator=generator),
            "turned": torch.randn(30, 40, generator=generator).t(),
            "half": torch.randn(17, generator=generator).bfloat16(),
        }
        self.moments: Tensors = {"large/exp_avg": torch.zeros(300, 4000), "large/step": torch.tensor(0.0)}

    def step(self) -> None:
        for tensor in (*self.weights.values(), *self.moments.values()):
            tensor.add_(1.0)

    def values(self) -> Tensors:
        return {name: tensor.clone() for name, tensor in (*self.weights.items(), *self.moments.items())}

    def model_shards(self) -> list[LocalShard]:
        return cut_shards(self.weights, rows, _rank(), _world_size())

    def optimizer_shards(self) -> list[LocalShard]:
        return cut_shards(self.moments, rows, _rank(), _world_size())

    def state_entries(self) -> dict[str, Any]:
        return {}

    def shards_written(self) -> None:
        pass


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def checkpointer(folder: Path, **options: Any) -> Checkpointer:
    config_file(folder)
    more = {name: options.pop(name) for name in ("before_manifest", "patience_s", "start_step") if name in options}
    config = CheckpointConfig(every_n_steps=1, **options)
    return Checkpointer(config, RunPaths(folder), {"global_batch_size": 4}, **more)


@contextmanager
def slow_disk(only: Callable[[], bool] = lambda: True) -> Iterator[threading.Event]:
    """Every write waits for the event."""
    event, write = threading.Event(), files.write

    def wait_and_write(descriptor: int, data: files.Buffer) -> None:
        if only():
            event.wait(60)
        write(descriptor, data)

    files.write = wait_and_write
    try:
        yield event
    finally:
        event.set()
        files.write = write


@contextmanager
def full_disk(only: Callable[[], bool] = lambda: True, room: int = 1_000_000) -> Iterator[None]:
    """After ``room`` bytes the disk is full."""
    write, left = files.write, [room]

    def fill(descriptor: int, data: files.Buffer) -> None:
        left[0] -= memoryview(data).nbytes
        if only() and left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor, data)

    files.write = fill
    try:
        yield
    finally:
        files.write = write


def check(folder: Path, step: int, expected: Tensors) -> None:
    """The step holds exactly these values."""
    reader = CheckpointReader(folder / "checkpoints" / f"step-{step:08d}")
    for kind in ("model", "optimizer"):
        shards = cut_shards({name: expected[name] for name in reader.names(kind)}, rows)
        got = empty_like(shards)
        reader.read(got, kind)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, got, strict=True)), step


def steps_in(folder: Path) -> list[int]:
    return [info.step for info in list_steps(folder / "checkpoints", "full") if info.whole]


def test_the_values_are_those_of_the_saves_step_though_training_goes_on(tmp_path: Path) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, keep_last=0)
    with slow_disk() as go:
        expected = trained.values()
        saver.save(trained, 3, {})
        for _ in range(5):
            trained.step()
        assert steps_in(tmp_path) == [] and saver.last_path is None
        go.set()
        saver.finish(8)
    check(tmp_path, 3, expected)
    assert saver.last_path == tmp_path / "checkpoints" / "step-00000003"


def test_each_save_waits_for_the_one_before_and_has_its_own_values(tmp_path: Path) -> None:
    trained, saver, expected = Trained(), checkpointer(tmp_path, keep_last=0), {}
    for step in range(1, 6):
        trained.step()
        expected[step] = trained.values()
        saver.save(trained, step, {})
    trained.step()
    saver.finish(6)
    for step, values in expected.items():
        check(tmp_path, step, values)


def test_the_last_save_is_committed_when_it_returns_and_comes_after_the_one_before(tmp_path: Path) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, keep_last=1)
    saver.save(trained, 1, {})
    trained.step()
    saver.save(trained, 2, {}, last=True)
    assert steps_in(tmp_path) == [1, 2] and saver.last_path == tmp_path / "checkpoints" / "step-00000002"
    check(tmp_path, 2, trained.values())


def test_the_memory_of_the_copies_is_used_again() -> None:
    tensors = {"a": torch.randn(100, 30), "b": torch.randn(7, 5).t(), "c": torch.tensor(2.0), "d": torch.zeros(0, 3)}
    shards = [LocalShard(TensorSlice.whole(n, tuple(t.shape)), tuple(t.shape), t) for n, t in tensors.items()]
    copies = HostCopies()
    first = copies.take(shards)
    for shard, copy in zip(shards, first, strict=True):
        assert (
            torch.equal(shard.tensor, copy.tensor)
            and copy.tensor.is_contiguous()
            and copy.tensor_slice == shard.tensor_slice
        )
        shard.tensor.add_(1)
    size = copies.nbytes
    second = copies.take(shards)
    assert [p.tensor.data_ptr() for p in second if p.tensor.numel()] == [
        p.tensor.data_ptr() for p in first if p.tensor.numel()
    ]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, second, strict=True))
    assert size == copies.nbytes <= sum(t.nbytes for t in tensors.values()) + 64 * len(tensors)


def _train_and_save_beside(folder: Path) -> list[int]:
    """Training's own collectives run while the save's do; every rank changes its tensors meanwhile."""
    trained, saver = Trained(), checkpointer(folder, keep_last=0)
    expected = {}
    for step in range(1, 13):
        trained.step()
        total = torch.ones(1000)
        dist.all_reduce(total)
        assert bool((total == dist.get_world_size()).all())
        if step % 3 == 0:
            expected[step] = trained.values()
            saver.save(trained, step, {"train/loss": float(step)})
    saver.finish(12)
    dist.barrier()
    for step, values in expected.items():
        check(folder, step, values)
    return list(expected)


@pytest.mark.slow
def test_collectives_of_training_and_of_saving_do_not_meet(tmp_path: Path) -> None:
    assert run_processes(3, _train_and_save_beside, tmp_path) == [[3, 6, 9, 12]] * 3
    assert steps_in(tmp_path) == [3, 6, 9, 12]


def _skip_while_rank_1_writes(folder: Path) -> list[int | None]:
    trained, saver = Trained(), checkpointer(folder, keep_last=0, when_busy="skip")
    begun: list[int | None] = []
    with slow_disk(lambda: dist.get_rank() == 1) as go:
        for step in (1, 2, 3):
            trained.step()
            saver.save(trained, step, {})
            begun.append(saver.last_step)
        go.set()
        saver.save(trained, 4, {}, last=True)  # the last is never left out
        saver.finish(4)
    return begun


def test_a_save_that_comes_too_early_is_left_out_by_all_ranks_if_one_is_busy(tmp_path: Path) -> None:
    assert run_processes(2, _skip_while_rank_1_writes, tmp_path) == [[1, 1, 1]] * 2
    assert steps_in(tmp_path) == [1, 4]


def test_leaving_out_a_save_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, when_busy="skip")
    with slow_disk() as go, caplog.at_level(logging.WARNING):
        saver.save(trained, 1, {})
        saver.save(trained, 2, {})
        go.set()
        saver.finish(3)
    assert "the checkpoint of step 2 is left out" in caplog.text and "checkpoint.when_busy=skip" in caplog.text


def _full_on_rank_1(folder: Path, **options: Any) -> tuple[bool, str]:
    """What the save after one that failed on rank 1 says, and whether training was asked to stop before it."""
    trained, saver = Trained(), checkpointer(folder, keep_last=0, **options)
    saver.save(trained, 1, {})
    saver.finish(1)
    with full_disk(lambda: dist.get_rank() == 1):
        saver.save(trained, 2, {})
        assert saver._background is not None and saver._background._thread is not None
        saver._background._thread.join()
    stop = saver.must_stop
    trained.step()
    try:
        saver.save(trained, 3, {})
        saver.finish(3)
    except CheckpointSaveError as error:
        return stop, str(error)
    check(folder, 3, trained.values())
    return stop, ""


def test_a_failed_save_stops_all_ranks_and_names_the_last_good_one(tmp_path: Path) -> None:
    results = run_processes(2, _full_on_rank_1, tmp_path)
    for stop, message in results:
        assert stop and message == results[0][1]
        assert "step 2" in message and "rank 1" in message and "No space left on device" in message
        assert "the last good one is" in message and "step-00000001" in message
    assert steps_in(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def _go_on_after_a_full_disk(folder: Path) -> tuple[bool, str]:
    return _full_on_rank_1(folder, on_save_error="continue")


def test_a_run_that_goes_on_after_a_failed_save_saves_the_next(tmp_path: Path) -> None:
    assert run_processes(2, _go_on_after_a_full_disk, tmp_path) == [(False, "")] * 2
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_failed_save_that_is_gone_on_after_is_told_loudly(
    async_save: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, on_save_error="continue", async_save=async_save)
    saver.save(trained, 1, {})
    saver.finish(0)
    with caplog.at_level(logging.WARNING), full_disk():
        saver.save(trained, 2, {})
        saver.finish(5)
    assert caplog.text.count("WARNING: the checkpoint of step 2 could not be written") == 1
    assert "No space left on device" in caplog.text and "the last good one is" in caplog.text
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("on_save_error", ["stop", "continue"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("async_save", [True, False])
def test_the_runs_last_save_fails_it_either_way(
    on_save_error: str, last: bool, async_save: bool, tmp_path: Path
) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, on_save_error=on_save_error, async_save=async_save)
    with full_disk(), pytest.raises(CheckpointSaveError, match="step 5 could not be written"):
        saver.save(trained, 5, {}, last=last)
        saver.finish(5)


def test_what_must_be_on_the_disk_first_is_there_before_the_manifest(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    partial = tmp_path / "checkpoints" / "step-00000001.partial"

    def look() -> None:
        seen.append(sorted(path.name for path in partial.iterdir()))

    saver = checkpointer(tmp_path, before_manifest=look)
    saver.save(Trained(), 1, {})
    saver.finish(1)
    data = ["config.yaml", "model-00000.safetensors", "optimizer-00000.safetensors", "state.json"]
    assert seen == [data] and steps_in(tmp_path) == [1]


def test_metrics_that_cannot_be_written_fail_the_save(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "metrics.csv")

    saver = checkpointer(tmp_path, before_manifest=fail)
    with pytest.raises(CheckpointSaveError, match=r"metrics\.csv"):
        saver.save(Trained(), 1, {})
        saver.finish(1)
    assert steps_in(tmp_path) == []


def test_old_ones_are_deleted_after_the_new_one_is_committed(tmp_path: Path) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, keep_last=1)
    saver.save(trained, 1, {})
    saver.finish(0)
    with slow_disk() as go:
        saver.save(trained, 2, {})
        assert steps_in(tmp_path) == [1]
        go.set()
        saver.finish(2)
    assert steps_in(tmp_path) == [1, 2]
    saver.step_was_finite(3)
    assert steps_in(tmp_path) == [2]


def test_a_save_that_a_finite_step_has_followed_when_it_is_committed_is_enough_by_itself(tmp_path: Path) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, keep_last=1)
    saver.save(trained, 1, {})
    saver.finish(0)
    saver.step_was_finite(2)
    with slow_disk() as go:
        saver.save(trained, 2, {})
        saver.step_was_finite(3)
        go.set()
        saver.finish(3)
    assert steps_in(tmp_path) == [2]


WINDOW = StepBatch(step=2, first_sample=8, num_samples=4, micro_batches=[], loss_denominator=1)


@pytest.mark.parametrize("async_save", [True, False])
def test_weights_that_the_next_step_shows_to_be_ruined_are_not_the_last_good_ones(
    async_save: bool, tmp_path: Path
) -> None:
    """Finite in every bit, and the loss of step 3 is not."""
    trained, saver = Trained(), checkpointer(tmp_path, keep_last=1, keep_best=1, async_save=async_save)
    for step, loss in ((1, 2.0), (2, 1.0)):  # measured before the update that ruins
        saver.step_was_finite(step)
        saver.save(trained, step, {"val/loss": loss})
        trained.step()
    saver.let_finish()
    assert "the last good checkpoint is" in str(error := saver.not_finite("the loss", WINDOW)), error
    assert str(tmp_path / "checkpoints" / "step-00000001") in str(error)
    assert steps_in(tmp_path) == [1, 2] and ruined_steps(tmp_path / "checkpoints") == {2}
    again = checkpointer(tmp_path, keep_last=1, keep_best=1, start_step=1, async_save=async_save)
    again.step_was_finite(2)
    again.save(trained, 2, {"val/loss": 1.5})
    again.step_was_finite(3)
    again.finish(3)
    again.step_was_finite(4)
    assert steps_in(tmp_path) == [2] and ruined_steps(tmp_path / "checkpoints") == set()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["large", "half", "large/exp_avg"])
@pytest.mark.parametrize("async_save", [True, False])
def test_what_is_not_finite_is_never_saved_whatever_goes_on_after_errors(
    value: float, where: str, async_save: bool, tmp_path: Path
) -> None:
    trained = Trained()
    saver = checkpointer(tmp_path, keep_last=1, on_save_error="continue", async_save=async_save)
    saver.step_was_finite(1)
    saver.save(trained, 1, {})
    tensors = trained.moments if "/" in where else trained.weights
    tensors[where].view(-1)[-1] = value
    saver.step_was_finite(2)
    with pytest.raises(NonFiniteError, match=f"{where} is not finite after step 2 .samples 4 to 7.*step-00000001"):
        saver.save(trained, 2, {})
        saver.finish(2)
    assert steps_in(tmp_path) == [1] and not list(tmp_path.glob("checkpoints/*.partial"))


def _save_what_rank_1_ruined(folder: Path, async_save: bool) -> tuple[str, list[int], bool]:
    trained, saver = Trained(), checkpointer(folder, async_save=async_save)
    saver.save(trained, 1, {})
    if dist.get_rank() == 1:
        trained.weights["half"][-1] = float("nan")  # the last rows are its
    told, stops = "", False
    try:
        saver.save(trained, 2, {})
        if saver._background is not None and saver._background._thread is not None:
            saver._background._thread.join()
            stops = saver.must_stop
        saver.finish(2)
    except NonFiniteError as error:
        told = str(error)
    return told, steps_in(folder), stops or not async_save


@pytest.mark.parametrize("async_save", [True, False])
def test_all_ranks_refuse_what_is_not_finite_on_one(async_save: bool, tmp_path: Path) -> None:
    found = run_processes(2, _save_what_rank_1_ruined, tmp_path, async_save)
    assert found[0] == found[1], "the same checkpoint is named by all"
    told, steps, stops = found[0]
    assert "the weight half is not finite after step 2" in told
    assert "step-00000001" in told and steps == [1] and stops


def test_the_best_one_stays_too(tmp_path: Path) -> None:
    trained, saver = Trained(), checkpointer(tmp_path, keep_last=1, keep_best=1, best_metric="val/loss")
    for step, loss in enumerate((3.0, 1.0, 2.0, 1.5), 1):
        saver.save(trained, step, {"val/loss": loss})
    saver.save(trained, 5, {})
    saver.finish(5)
    assert steps_in(tmp_path) == [2, 4, 5]
    saver.step_was_finite(6)
    assert steps_in(tmp_path) == [2, 5]


def test_a_training_that_fails_lets_the_save_come_to_its_end(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    with slow_disk() as go:
        saver.save(Trained(), 1, {})
        threading.Timer(0.2, go.set).start()
        saver.let_finish()
    assert steps_in(tmp_path) == [1]


def test_a_save_that_fails_while_training_fails_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = checkpointer(tmp_path)
    with caplog.at_level(logging.WARNING), full_disk():
        saver.save(Trained(), 1, {})
        saver.let_finish()
    assert "WARNING: the checkpoint of step 1 could not be written" in caplog.text


def test_a_save_that_is_given_up_when_training_fails_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = checkpointer(tmp_path, patience_s=0.1)
    with caplog.at_level(logging.WARNING), slow_disk() as go:
        saver.save(Trained(), 1, {})
        saver.let_finish()
        go.set()
        saver.finish(1)
    assert "the checkpoint of step 1 was not written within 0.1 s (launch.stop_timeout)" in caplog.text


def test_a_disk_that_is_gone_leaves_the_saves_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(tmp_path))

    saver = checkpointer(tmp_path)
    monkeypatch.setattr("mgpu_pipe.training.save_and_resume.newest_valid", gone)
    with full_disk(), pytest.raises(CheckpointSaveError, match=r"step 1 could not be written.*Stale file handle"):
        saver.save(Trained(), 1, {}, last=True)
