"""Saves checkpoints: all ranks write their tensor slices into a partial folder, which is renamed when it is complete.

The order makes a save safe against a crash at any instant: flush every data file, then the manifest, then the folder's
entries, then rename, then flush the parent folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.checkpoint import file_operations as files
from mgpu_pipe.checkpoint import layout
from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, FileRecord, record_of
from mgpu_pipe.checkpoint.live_tensors import all_finite, dtype_name, host_bytes
from mgpu_pipe.checkpoint.manifest import Manifest, StoredTensor
from mgpu_pipe.checkpoint.save_plan import RankShards, ShardRecord, plan_files
from mgpu_pipe.checkpoint.strict_json import canonical
from mgpu_pipe.checkpoint.tensor_file import Entry, file_order, write_tensor_file
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointSaveError
from mgpu_pipe.parallel.rank_exchange import exchange_json, rank_and_size

if TYPE_CHECKING:
    import torch.distributed as dist


_log = logging.getLogger(__name__)


Plan = Mapping[str, Mapping[str, StoredTensor]]
"""``[kind][name]``: the file of each tensor slice."""
WrittenFile = tuple[str, int, list[str]]
"""Name, size in bytes and chunk hashes."""


class NotFinite(Exception):
    """A tensor to save contains infinity or NaN; ``what`` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not finite")
        self.what = what


def save(
    root: Path,
    step: int,
    model: Sequence[LocalShard],
    optimizer: Sequence[LocalShard],
    state: Mapping[str, Any],
    config_file: Path,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of ``step`` and return its folder. A collective call over ``group``.

    Args:
        root: the run's ``checkpoints`` folder, made if missing; the same on all ranks, on a shared file system.
        step: completed optimizer steps.
        model: this rank's local shards of the weights.
        optimizer: this rank's local shards of the optimizer's state, named ``<parameter>/<state key>``.
        state: the content of state.json (JSON values), from rank 0; the save adds ``step`` and ``format_version``.
        config_file: rank 0 copies it to config.yaml.
        group: the process group that saves; None is the world, or only this process without a world.

    Raises:
        CheckpointSaveError: on all ranks, if anything failed on any rank. Committed steps stay, and the partial folder
            is removed.
        NotFinite: on all ranks, if a weight or optimizer state is infinite or NaN on any rank. Committed steps stay,
            and the partial folder is removed.
    """
    shards = RankShards(model, optimizer)
    plan = Planner().plan(root, step, shards, group)
    return write(root, step, plan, shards, state, config_file, group)


class Planner:
    """Plans which rank writes which tensor slice, and reuses the plan while all ranks' shards stay the same."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._plan: Plan = {}

    def plan(self, root: Path, step: int, shards: RankShards, group: dist.ProcessGroup | None) -> Plan:
        """The files of a save, the same on all ranks. A collective call with the arguments of :func:`save`.

        Raises:
            CheckpointSaveError: on all ranks, if a rank's local shards cannot be saved, or all local shards together
                do not cover every tensor exactly once.
        """
        failed = _failure(root, step)
        entries: list[ShardRecord] = []

        def digest() -> str:
            entries.extend(shard_records(shards))
            return hashlib.sha256(canonical([item.to_json() for item in entries])).hexdigest()

        digests = run_on_all_ranks(digest, failed, group)
        if digests != self._digests:
            replies = run_on_all_ranks(lambda: [item.to_json() for item in entries], failed, group)
            self._plan = plan_files([[ShardRecord.from_json(item) for item in reply] for reply in replies])
            self._digests = digests
        return self._plan


def write(
    root: Path,
    step: int,
    plan: Plan,
    shards: RankShards,
    state: Mapping[str, Any],
    config_file: Path,
    group: dist.ProcessGroup | None = None,
    before_manifest: Callable[[], None] = lambda: None,
) -> Path:
    """Write the planned files and commit the step. A collective call over ``group``; see :func:`save`.

    Args:
        shards: at least those that the plan assigns to this rank.
        before_manifest: called on rank 0 after all data is on the disk and before the manifest is written.
    """
    rank, _ = rank_and_size(group)
    folder = layout.step_folder(root, step, layout.PARTIAL)
    failed = _failure(root, step)

    def begin() -> None:
        if rank == 0:
            _make_partial_folder(root, folder)

    def write_mine() -> dict[str, Any]:
        texts = _texts(step, state, config_file) if rank == 0 else {}
        try:
            return {"files": write_files(folder, rank, step, plan, shards, texts)}
        except NotFinite as error:
            return {"files": [], "not_finite": error.what}

    def finish() -> None:
        if rank == 0:
            before_manifest()
            _write_manifest(folder, step, plan, [file for part in written for file in part["files"]])
            layout.commit(root, step)

    try:
        run_on_all_ranks(begin, failed, group)
        written = run_on_all_ranks(write_mine, failed, group)
        _require_finite(written)
        run_on_all_ranks(finish, failed, group)
    except (CheckpointSaveError, NotFinite):
        if rank == 0:
            _clean_up(root)
        exchange_json(None, group)  # all ranks wait until the partial folder is removed
        raise
    return layout.step_folder(root, step)


def _require_finite(written: Sequence[Mapping[str, Any]]) -> None:
    for part in written:
        if "not_finite" in part:
            raise NotFinite(part["not_finite"])


def run_on_all_ranks(action: Callable[[], object], what: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Run one part of a save on every rank and raise on all if it fails on any. A collective call.

    Args:
        action: this rank's part; all ranks get its result (JSON).
        what: description of the failure for the error.

    Returns:
        Every rank's result, in the order of ranks.

    Raises:
        CheckpointSaveError: on all ranks, with the first failing rank's message. On a failing rank, the cause is its
            exception.
    """
    cause: Exception | None = None
    reply: dict[str, object] = {}
    try:
        reply["result"] = action()
    except Exception as error:  # after any error, the other ranks must not wait for this one
        cause = error
        reply["error"] = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    replies = exchange_json(reply, group)
    for rank, other in enumerate(replies):
        if "error" in other:
            raise CheckpointSaveError(f"{what} (rank {rank}: {other['error']})") from cause
    return [other["result"] for other in replies]


def _failure(root: Path, step: int) -> str:
    return f"the checkpoint of step {step} could not be written to {root}"


def planned_shards(plan: Plan, shards: RankShards) -> RankShards:
    """The shards that the plan assigns to this rank of the world."""
    rank, _ = rank_and_size(None)

    def take_assigned(kind: str, of_kind: Sequence[LocalShard]) -> list[LocalShard]:
        name = layout.tensor_file_name(kind, rank)
        mine = {part for tensor in plan[kind].values() for part, file in tensor.tensor_slices if file == name}
        return [shard for shard in of_kind if shard.tensor_slice in mine]

    return RankShards(*(take_assigned(kind, of_kind) for kind, of_kind in shards.by_kind.items()))


def shard_records(shards: RankShards) -> list[ShardRecord]:
    """Records of this rank's shards; ValueError for a wrong shape, no data, or an unknown dtype."""
    entries: list[ShardRecord] = []
    for kind, of_kind in shards.by_kind.items():
        for shard in of_kind:
            if tuple(shard.tensor.shape) != shard.tensor_slice.shape or shard.tensor.device.type == "meta":
                raise ValueError(
                    f"{shard.tensor_slice.key} of shape {list(shard.tensor_slice.shape)} is given a tensor of shape "
                    f"{list(shard.tensor.shape)} on {shard.tensor.device}"
                )
            entries.append(ShardRecord(kind, shard.tensor_slice, tuple(shard.global_shape), dtype_name(shard.tensor)))
    return entries


def write_files(
    folder: Path, rank: int, step: int, plan: Plan, shards: RankShards, texts: Mapping[str, bytes]
) -> list[WrittenFile]:
    """Write and flush this rank's files in parallel, because each flush waits for the disk.

    Args:
        texts: further files by their names.

    Raises:
        NotFinite: a tensor contains infinity or NaN.
    """
    with ThreadPoolExecutor(len(layout.KINDS) + 1, thread_name_prefix="checkpoint-write") as pool:
        jobs = [
            pool.submit(_write_tensors, folder, rank, step, kind, plan, of_kind)
            for kind, of_kind in shards.by_kind.items()
        ]
        jobs.append(pool.submit(_write_texts, folder, texts))
    return [(name, record.size, list(record.sha256)) for job in jobs for name, record in job.result().items()]


def _write_tensors(
    folder: Path, rank: int, step: int, kind: str, plan: Plan, shards: Sequence[LocalShard]
) -> dict[str, FileRecord]:
    name = layout.tensor_file_name(kind, rank)
    mine: dict[str, LocalShard] = {}
    entries: list[Entry] = []
    by_slice: dict[TensorSlice, LocalShard] = {shard.tensor_slice: shard for shard in shards}
    for tensor in plan[kind].values():
        for tensor_slice, file in tensor.tensor_slices:
            if file == name:
                mine[tensor_slice.key] = by_slice[tensor_slice]
                entries.append(Entry(tensor_slice.key, tensor.dtype, tensor_slice.shape))
    if not entries:
        return {}
    entries = file_order(entries)
    data = _finite_bytes(kind, ((entry.dtype, mine[entry.name]) for entry in entries))
    metadata = {"format": "pt", "kind": kind, "step": str(step)}  # by which a reader detects a file of another step
    return {name: write_tensor_file(folder / name, entries, metadata, data)}


def _write_texts(folder: Path, texts: Mapping[str, bytes]) -> dict[str, FileRecord]:
    for name, text in texts.items():
        files.write_file(folder / name, text)
    return {name: record_of(text) for name, text in texts.items()}


def _finite_bytes(kind: str, shards: Iterable[tuple[str, LocalShard]]) -> Iterator[memoryview]:
    """Bytes of the local shards, a chunk at most at once; raises NotFinite at infinity or NaN."""
    what = "weight" if kind == layout.KINDS[0] else "optimizer state"
    for dtype, shard in shards:
        for data in host_bytes(shard.tensor):
            for start in range(0, data.nbytes, CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                if not all_finite(part, dtype):
                    raise NotFinite(f"the {what} {shard.tensor_slice.name}")
                yield part


def _texts(step: int, state: Mapping[str, Any], config_file: Path) -> dict[str, bytes]:
    if state.get("step", step) != step:
        raise ValueError(f"state['step'] is {state['step']} in a save of step {step}")
    return {
        layout.STATE: canonical({**state, "step": step, "format_version": layout.FORMAT_VERSION}),
        layout.CONFIG: config_file.read_bytes(),
    }


def _make_partial_folder(root: Path, folder: Path) -> None:
    if not root.is_dir():
        files.make_folders(root)
    layout.clean(root)
    files.make_folder(folder)


def _write_manifest(folder: Path, step: int, plan: Plan, written: Sequence[WrittenFile]) -> None:
    records = {name: FileRecord(size, tuple(hashes)) for name, size, hashes in written}
    files.write_file(folder / layout.MANIFEST, Manifest(step, plan, records).encode())
    files.sync_folder(folder)


def _clean_up(root: Path) -> None:
    try:
        layout.clean(root)
    except OSError as error:
        # The save raises its error. The partial folder is never read, and the next save removes it.
        _log.warning("%s: a partial checkpoint could not be removed (%s)", root, error)
