"""Every instant at which a save can be cut short, by the end of a process or of the machine.

Oracle: whatever a crash leaves, loading finds the checkpoint from before or the new one, whole, by its values; and once
the save has returned, the new one. ``tests/checkpoint/crash.py`` says what a crash may leave. Deliberately wrong orders
have to be caught by the same check, or it would prove nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint import save as save_module
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.selection import list_steps, newest_valid, prune
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import CheckpointConfig
from mgpu_pipe.errors import CheckpointError, CheckpointSaveError
from mgpu_pipe.training.save_and_resume import Checkpointer
from tests.checkpoint.crash import Disk, Killed, Operation, Recorder, State, build, digest, interleavings, tree_of
from tests.checkpoint.support import config_file, cut_shards, rows
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tables import TOLD

pytestmark = pytest.mark.slow

MOST_STATES = 60
"""Of one prefix, where there are more than these, the extremes and as many random ones are taken."""


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(6, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def save_seed(run: Path, step: int, seed: int) -> Path:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = cut_shards(tensors(seed), rows, rank, size)
    moments = cut_shards({"a/exp_avg": tensors(seed)["a"] * 2}, rows, rank, size)
    return save(run / "checkpoints", step, model, moments, {"seed": seed}, run / "config.yaml")


def found_seed(run: Path) -> int | None:
    """The seed of what loading takes, every value of it compared; fails where any step that has its name is damaged."""
    steps = list_steps(run / "checkpoints", "full")
    for info in steps:
        assert info.whole, info.faults
    if not steps:
        return None
    reader = CheckpointReader(steps[-1].path)
    seed = int(reader.state["seed"])
    for kind, wanted in (("model", tensors(seed)), ("optimizer", {"a/exp_avg": tensors(seed)["a"] * 2})):
        shards = [
            LocalShard(TensorSlice.whole(n, tuple(t.shape)), tuple(t.shape), torch.zeros_like(t))
            for n, t in wanted.items()
        ]
        reader.read(shards, kind)
        assert all(torch.equal(shard.tensor, wanted[shard.tensor_slice.name]) for shard in shards)
        assert sorted(reader.names(kind)) == sorted(wanted)
    return seed


@dataclass
class Replay:
    """Rebuilds crash states and judges them; counts what it did."""

    scratch: Path
    start: Path
    """A copy of the run's folder from before the first operation."""
    prefixes: int = 0
    states: int = 0
    most_states: int = MOST_STATES
    _judged: dict[bytes, int | None] = field(default_factory=dict)
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    def judge(self, operations: Sequence[Operation], allowed: Callable[[int], set[int | None]], since: int = 0) -> None:
        """Every prefix of at least ``since`` operations leaves one of the seeds that ``allowed`` names for it."""
        disk = Disk(self.start)
        for count in range(len(operations) + 1):
            if count:
                disk.apply(operations[count - 1])
            if count < since:
                continue
            self.prefixes += 1
            for state in (disk.seen_by_processes(), *disk.crash_states(self._chance, self.most_states)):
                seed = self._seed_in(state)
                assert seed in allowed(count), (
                    f"after {count} of {len(operations)} operations loading finds {seed}, not one of {allowed(count)}; "
                    f"next: {operations[count : count + 1]}; the disk: {[path for path, _ in state]}"
                )

    def _seed_in(self, state: State) -> int | None:
        key = digest(state)
        if key not in self._judged:
            folder = self.scratch / str(self.states)
            folder.mkdir()
            build(state, folder)
            seed = found_seed(folder)
            before = newest_valid(folder / "checkpoints", "stop", "size")
            layout.clean(folder / "checkpoints")  # what the next save does first
            after = newest_valid(folder / "checkpoints", "stop", "size")
            assert (before and before.step) == (after and after.step), "cleaning up lost the checkpoint"
            files.remove_folder(folder)
            self._judged[key] = seed
            self.states += 1
        return self._judged[key]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config_file(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def told() -> Callable[[str, Replay], None]:
    def tell(what: str, replay: Replay) -> None:
        TOLD.append(f"{what}: {replay.prefixes} prefixes, {replay.states} different disks, all old or new")

    return tell


def replay_of(run: Path) -> Replay:
    """To be made before anything is recorded: keeps a copy of the folder as it is."""
    start, scratch = run.with_name("start"), run.with_name("scratch")
    start.mkdir()
    build(tree_of(run), start)
    scratch.mkdir()
    return Replay(scratch, start)


def check_save(
    run: Path, step: int, seed: int, old: int | None, keep_last: int = 0, most_states: int = MOST_STATES
) -> Replay:
    """Record a save, and the deletion of what is not kept, and judge every prefix."""
    replay = replay_of(run)
    replay.most_states = most_states
    with Recorder(run) as recorder:
        save_seed(run, step, seed)
        returned = len(recorder.operations)
        prune(run / "checkpoints", keep_last, followed_before=step + 1)
    operations = recorder.operations
    assert seen_after(replay.start, operations) == tree_of(run), "the recorder missed something"
    replay.judge(operations, lambda count: {seed} if count >= returned else {old, seed})
    return replay


def seen_after(start: Path, operations: Iterable[Operation]) -> State:
    disk = Disk(start)
    for operation in operations:
        disk.apply(operation)
    return disk.seen_by_processes()


def test_the_first_save_of_a_run(run: Path, told: Any) -> None:
    told("first save", check_save(run, 10, seed=1, old=None))


def test_a_save_and_the_deletion_of_the_one_before(run: Path, told: Any) -> None:
    save_seed(run, 5, 0)
    save_seed(run, 10, 1)
    replay = check_save(run, 20, seed=2, old=1, keep_last=1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000020"]
    told("save and retention", replay)


def test_a_save_that_replaces_its_own_step(run: Path, told: Any) -> None:
    save_seed(run, 10, 1)
    told("replacing save", check_save(run, 10, seed=2, old=1))


class Trained:
    """Stands for a strategy that holds the values of a seed."""

    def __init__(self, seed: int) -> None:
        self.values = tensors(seed)

    def model_shards(self) -> list[LocalShard]:
        return cut_shards(self.values, rows)

    def optimizer_shards(self) -> list[LocalShard]:
        return cut_shards({"a/exp_avg": self.values["a"] * 2}, rows)

    def state_entries(self) -> dict[str, Any]:
        return {}

    def shards_written(self) -> None:
        pass


def test_a_save_beside_training_and_its_retention(run: Path, told: Any) -> None:
    save_seed(run, 10, 1)
    replay, trained = replay_of(run), Trained(2)
    config = CheckpointConfig(every_n_steps=10, keep_last=1)
    saver = Checkpointer(config, RunPaths(run), {"global_batch_size": 1, "seed": 2})
    with Recorder(run) as recorder:
        saver.save(trained, 20, {})
        for value in trained.values.values():
            value.zero_()
        saver.finish(20)
    assert seen_after(replay.start, recorder.operations) == tree_of(run)
    everything = len(recorder.operations)
    replay.judge(recorder.operations, lambda count: {2} if count == everything else {1, 2})
    told("save beside training", replay)


def _steps_left(old: set[int], returned: int) -> Callable[[int], set[int | None]]:
    """What may be loaded after ``count`` operations: step 3 is sure once its save returned."""
    return lambda count: {3} if count >= returned else {*old, 3}


@pytest.mark.parametrize(
    ("step", "stride"),
    [
        pytest.param(10, 6, id="10, some"),
        *(pytest.param(step, 1, id=f"{step}", marks=pytest.mark.exhaustive) for step in (10, 20)),
    ],
)
def test_a_save_after_one_that_was_killed_at_any_of_its_operations(
    step: int, stride: int, run: Path, told: Any
) -> None:
    """The machine may stop during the second save with nothing flushed of what the killed one did."""
    save_seed(run, 10, 1)
    replay, pristine = replay_of(run), tree_of(run)
    replay.most_states = 12  # of each of some thousand prefixes
    kill_before, killed = 0, True
    while killed:
        files.remove_folder(run)
        run.mkdir()
        build(pristine, run)
        with Recorder(run, kill_before=kill_before) as recorder:
            try:
                save_seed(run, step, 2)
                killed = False
            except Killed:
                pass
            recorder.kill_before = None
            first = len(recorder.operations)
            between = found_seed(run)
            save_seed(run, 30, 3)
            returned = len(recorder.operations)
            prune(run / "checkpoints", 1)
        old = {1, 2} if killed else {2}
        assert between in old
        replay.judge(recorder.operations, _steps_left(old, returned), since=first)
        kill_before += 4 * stride if kill_before < 16 else stride  # every instant of the commit, some of the writing
    told(f"killed save of step {step}, then a save", replay)


def _record_in_processes(run: Path) -> list[Operation]:
    """A save by all processes; this process's operations."""
    with Recorder(run, process=dist.get_rank()) as recorder:
        meet = save_module.exchange_json

        def counted(value: object, group: Any) -> list[Any]:
            replies = meet(value, group)
            recorder.epoch += 1
            return replies

        save_module.exchange_json = counted
        save_seed(run, 20, 2)
    return recorder.operations


def test_a_save_by_three_processes_in_any_order_of_their_operations(run: Path, told: Any) -> None:
    save_seed(run, 10, 1)
    replay = replay_of(run)
    replay.most_states = 20
    by_process = run_processes(3, _record_in_processes, run)
    operations = sorted((op for found in by_process for op in found), key=lambda op: op.at)
    assert {op.path for op in operations} >= {
        f"checkpoints/step-00000020.partial/model-{rank:05d}.safetensors" for rank in range(3)
    }
    assert seen_after(replay.start, operations) == tree_of(run)
    for order in (operations, *interleavings(operations, random.Random(3), 1)):
        replay.judge(order, lambda count: {2} if count >= len(operations) else {1, 2})
    told("three processes, 2 orders", replay)


def _nothing(*arguments: Any) -> None:
    pass


def _flush_no_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "sync", _nothing)


def _flush_no_folder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "sync_folder", _nothing)


def _flush_no_entries(patch: pytest.MonkeyPatch) -> None:
    """The folder above is flushed, the checkpoint's own is not."""
    sync_folder = files.sync_folder
    patch.setattr(files, "sync_folder", lambda path: None if path.suffix == layout.PARTIAL else sync_folder(path))


def _leave_the_rename_unflushed(patch: pytest.MonkeyPatch) -> None:
    sync_folder = files.sync_folder
    patch.setattr(files, "sync_folder", lambda path: None if path.name == "checkpoints" else sync_folder(path))


def _manifest_before_data(patch: pytest.MonkeyPatch) -> None:
    """The manifest, and with it the name, is there before the data is flushed."""
    late: list[Callable[[], None]] = []
    sync, commit = files.sync, layout.commit

    def flush_later() -> None:
        for flush in late:
            flush()

    def later(descriptor: int) -> None:
        kept = files.os.dup(descriptor)
        late.append(lambda: sync(kept))

    def commit_first(root: Path, step: int) -> Path:
        folder = commit(root, step)
        flush_later()
        return folder

    patch.setattr(files, "sync", later)
    patch.setattr(layout, "commit", commit_first)


def _name_before_manifest(patch: pytest.MonkeyPatch) -> None:
    commit, write_manifest = layout.commit, save_module._write_manifest

    def rename_first(folder: Path, step: int, *rest: Any) -> None:
        commit(folder.parent, step)
        write_manifest(layout.step_folder(folder.parent, step), step, *rest)

    patch.setattr(save_module, "_write_manifest", rename_first)
    patch.setattr(layout, "commit", _nothing)


def _delete_before_commit(patch: pytest.MonkeyPatch) -> None:
    commit = layout.commit

    def delete_first(root: Path, step: int) -> Path:
        for other in layout.committed_steps(root):
            layout.delete(root, other)
        return commit(root, step)

    patch.setattr(layout, "commit", delete_first)


def _delete_in_place(patch: pytest.MonkeyPatch) -> None:
    """The files go before the name."""

    def in_place(root: Path, step: int) -> None:
        files.remove_folder(layout.step_folder(root, step))

    patch.setattr(layout, "delete", in_place)


def _replace_in_place(patch: pytest.MonkeyPatch) -> None:
    """The old one of the same step goes before the new one has its name."""

    def commit(root: Path, step: int) -> Path:
        final = layout.step_folder(root, step)
        if final.exists():
            files.remove_folder(final)
        files.rename(layout.step_folder(root, step, layout.PARTIAL), final)
        files.sync_folder(root)
        return final

    patch.setattr(layout, "commit", commit)


WRONG_ORDERS = {
    "no file flushed": (_flush_no_file, 20),
    "no folder flushed": (_flush_no_folder, 20),
    "entries not flushed": (_flush_no_entries, 20),
    "rename not flushed": (_leave_the_rename_unflushed, 20),
    "manifest before data": (_manifest_before_data, 20),
    "name before manifest": (_name_before_manifest, 20),
    "old deleted before the commit": (_delete_before_commit, 20),
    "files deleted before their name": (_delete_in_place, 20),
    "replaced in place": (_replace_in_place, 10),
}


@pytest.mark.parametrize("order", one_in(3, WRONG_ORDERS))
def test_a_wrong_order_is_caught(order: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, step = WRONG_ORDERS[order]
    save_seed(run, 5, 0)
    save_seed(run, 10, 1)
    with monkeypatch.context() as patch:
        spoil(patch)
        with pytest.raises((AssertionError, CheckpointError, CheckpointSaveError)) as caught:
            check_save(run, step, seed=2, old=1, keep_last=1, most_states=16)
    assert "the recorder missed" not in str(caught.value) and "model of the disk" not in str(caught.value)
