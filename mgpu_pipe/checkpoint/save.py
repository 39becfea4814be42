"""Saving: all ranks write their tensor slices into a partial folder, which gets its name when it is whole.

The order is what makes a save safe against a crash at any instant: every data file flushed, then the manifest, then
the folder's entries, then the rename, then the parent folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.checkpoint import files, layout
from mgpu_pipe.checkpoint.chunks import CHUNK_BYTES, FileRecord, record_of
from mgpu_pipe.checkpoint.exchange import exchange_json, rank_and_size, together
from mgpu_pipe.checkpoint.finite import NotFinite, all_finite
from mgpu_pipe.checkpoint.host import dtype_name, host_bytes
from mgpu_pipe.checkpoint.manifest import Manifest, StoredTensor
from mgpu_pipe.checkpoint.plan import Held, plan_files
from mgpu_pipe.checkpoint.strict_json import canonical
from mgpu_pipe.checkpoint.tensor_file import Entry, file_order, write_tensor_file
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.errors import CheckpointSaveError

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger(__name__)


Plan = Mapping[str, Mapping[str, StoredTensor]]
"""``[kind][name]``: which file gets which tensor slice."""


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
        root: the run's ``checkpoints`` folder, made if missing; the same on all ranks, on a file system they share.
        step: completed optimizer steps.
        model: this rank's local shards of the weights.
        optimizer: this rank's local shards of the optimizer's state, named ``<parameter>/<state key>``.
        state: the content of state.json (JSON values); rank 0's counts. ``step`` and ``format_version`` are added.
        config_file: copied to config.yaml by rank 0.
        group: the process group that saves; None is the world, or this process alone where there is none.

    Raises:
        CheckpointSaveError: on all ranks, when anything failed on any of them. What was committed before is
            untouched, and the partial folder is gone.
        NotFinite: on all ranks, when a weight or a part of the optimizer's state is infinite or NaN on any of them;
            likewise.
    """
    plan = Planner().plan(root, step, model, optimizer, group)
    return write(root, step, plan, model, optimizer, state, config_file, group)


class Planner:
    """Decides who writes what, and keeps the decision as long as every rank holds what it held."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._plan: Plan = {}

    def plan(
        self,
        root: Path,
        step: int,
        model: Sequence[LocalShard],
        optimizer: Sequence[LocalShard],
        group: dist.ProcessGroup | None,
    ) -> Plan:
        """The files of a save; the same on all ranks. A collective call; the arguments are those of :func:`save`.

        Raises:
            CheckpointSaveError: on all ranks, when a rank's local shards cannot be saved, or all local shards together
                do not cover every tensor exactly once.
        """
        failed = _failure(root, step)
        entries: list[Held] = []

        def digest() -> str:
            entries.extend(describe(model, optimizer))
            return hashlib.sha256(canonical([item.to_json() for item in entries])).hexdigest()

        digests = together(digest, failed, group)
        if digests != self._digests:
            replies = together(lambda: [item.to_json() for item in entries], failed, group)
            self._plan = plan_files([[Held.from_json(item) for item in reply] for reply in replies])
            self._digests = digests
        return self._plan


def write(
    root: Path,
    step: int,
    plan: Plan,
    model: Sequence[LocalShard],
    optimizer: Sequence[LocalShard],
    state: Mapping[str, Any],
    config_file: Path,
    group: dist.ProcessGroup | None = None,
    before_manifest: Callable[[], None] = lambda: None,
) -> Path:
    """Write what was planned, and commit it. A collective call over ``group``; see :func:`save`.

    Args:
        model: at least the local shards of the weights that the plan gives to this rank.
        optimizer: the same of the optimizer's state.
        before_manifest: called on rank 0 when all data is on the disk and the manifest is not.
    """
    rank, _ = rank_and_size(group)
    folder = layout.step_folder(root, step, layout.PARTIAL)
    failed = _failure(root, step)

    def begin() -> None:
        if rank == 0:
            if not root.is_dir():
                files.make_folders(root)
            layout.clean(root)
            files.make_folder(folder)

    def write_mine() -> dict[str, Any]:
        texts = _texts(step, state, config_file) if rank == 0 else {}
        try:
            return {"files": write_files(folder, rank, step, plan, model, optimizer, texts)}
        except NotFinite as error:
            return {"files": [], "not_finite": error.what}

    def finish() -> None:
        if rank == 0:
            listed = [file for part in written for file in part["files"]]
            records = {name: FileRecord(size, tuple(hashes)) for name, size, hashes in listed}
            before_manifest()
            _write_manifest(folder, step, plan, records)
            layout.commit(root, step)

    try:
        together(begin, failed, group)
        written = together(write_mine, failed, group)
        for part in written:
            if "not_finite" in part:
                raise NotFinite(part["not_finite"])
        together(finish, failed, group)
    except (CheckpointSaveError, NotFinite):
        if rank == 0:
            _clean_up(root)
        exchange_json(None, group)  # no rank goes on before the partial folder is gone
        raise
    return layout.step_folder(root, step)


def _failure(root: Path, step: int) -> str:
    return f"the checkpoint of step {step} could not be written to {root}"


def planned_for(plan: Plan, rank: int, kind: str, shards: Sequence[LocalShard]) -> list[LocalShard]:
    """The local shards that the plan has this rank write."""
    name = layout.tensor_file_name(kind, rank)
    mine = {
        tensor_slice for tensor in plan[kind].values() for tensor_slice, file in tensor.tensor_slices if file == name
    }
    return [shard for shard in shards if shard.tensor_slice in mine]


def describe(model: Sequence[LocalShard], optimizer: Sequence[LocalShard]) -> list[Held]:
    """What this rank holds.

    Raises:
        ValueError: a local shard's tensor does not have its tensor slice's shape, is not materialised, or has no known
            dtype.
    """
    entries: list[Held] = []
    for kind, shards in zip(layout.KINDS, (model, optimizer), strict=True):
        for shard in shards:
            if tuple(shard.tensor.shape) != shard.tensor_slice.shape or shard.tensor.device.type == "meta":
                raise ValueError(
                    f"{shard.tensor_slice.key} of shape {list(shard.tensor_slice.shape)} is given a tensor of shape "
                    f"{list(shard.tensor.shape)} on {shard.tensor.device}"
                )
            entries.append(Held(kind, shard.tensor_slice, tuple(shard.global_shape), dtype_name(shard.tensor)))
    return entries


def write_files(
    folder: Path,
    rank: int,
    step: int,
    plan: Plan,
    model: Sequence[LocalShard],
    optimizer: Sequence[LocalShard],
    texts: Mapping[str, bytes],
) -> list[tuple[str, int, list[str]]]:
    """Write this rank's files and flush them, all at once: each flush waits for the disk.

    Args:
        texts: further files by their names.

    Returns:
        Name, size in bytes and chunk hashes of each.

    Raises:
        NotFinite: a tensor holds infinity or NaN.
    """
    with ThreadPoolExecutor(len(layout.KINDS) + 1, thread_name_prefix="checkpoint-write") as pool:
        jobs = [
            pool.submit(_write_tensors, folder, rank, step, kind, plan, shards)
            for kind, shards in zip(layout.KINDS, (model, optimizer), strict=True)
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
    return {name: write_tensor_file(folder / name, entries, file_metadata(kind, step), data)}


def _write_texts(folder: Path, texts: Mapping[str, bytes]) -> dict[str, FileRecord]:
    for name, text in texts.items():
        files.write_file(folder / name, text)
    return {name: record_of(text) for name, text in texts.items()}


def file_metadata(kind: str, step: int) -> dict[str, str]:
    """The header metadata of a checkpoint's tensor file; a reader tells files of another step by it."""
    return {"format": "pt", "kind": kind, "step": str(step)}


def _finite_bytes(kind: str, shards: Iterable[tuple[str, LocalShard]]) -> Iterator[memoryview]:
    """The local shards' bytes in parts of at most a chunk, each looked at while it is at hand to be written and hashed.

    Raises:
        NotFinite: a local shard holds infinity or NaN.
    """
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


def _write_manifest(folder: Path, step: int, plan: Plan, records: dict[str, FileRecord]) -> None:
    files.write_file(folder / layout.MANIFEST, Manifest(step, plan, records).encode())
    files.sync_folder(folder)


def _clean_up(root: Path) -> None:
    try:
        layout.clean(root)
    except OSError as error:
        # The failed save has raised its own error; what is left here is never read, and the next save removes it.
        _log.warning("%s: a partial checkpoint could not be removed (%s)", root, error)
