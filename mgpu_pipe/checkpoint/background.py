"""Saves during training: copies values to host memory, and a thread writes the copies.

Two threads must not share a process group. So the saving thread has its own gloo group, in which all ranks make the
same calls in the same order, one save after another. The calling thread uses the world's group between training's
collectives, so all ranks must call these methods at the same place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.save import Plan, planned_shards, run_on_all_ranks
from mgpu_pipe.checkpoint.save_plan import RankShards
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.parallel.rank_exchange import exchange_json, rank_and_size

ALIGNMENT = 64
"""Alignment of copies in bytes: a cache line, and a multiple of every dtype's size."""

NOT_COPIED = "a checkpoint's values could not be copied to host memory; checkpoint.async_save=false needs none"

Write = Callable[[RankShards], object]
"""Writes a rank's shards; see ``checkpoint.save.write``."""


class HostCopies:
    """Host memory for the values of a save, reused by the next save; page-locked for values on a GPU.

    A GPU copies on a separate stream, in parallel with computation that does not write the values.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._reserving: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return self._memory.numel()

    def reserve(self, shards: Sequence[LocalShard]) -> None:
        """Start to allocate memory for these shards in a thread, because page-locking gigabytes takes seconds."""
        _, size = _copy_offsets(shards)
        devices = _gpus(shards)

        def allocate() -> None:
            for device in devices:
                torch.cuda.set_device(device)  # otherwise this thread would use the first GPU
            with suppress(RuntimeError):  # the save reports it
                self._allocate(size, pinned=bool(devices))

        self._reserving = threading.Thread(target=allocate, name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def take(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copies of the local shards in this object's memory; the next call overwrites them.

        Copies of CPU tensors are complete on return. Copies of GPU tensors are complete after :meth:`wait`; their
        tensors may be written after :meth:`before_writing`.
        """
        self._join()
        places, size = _copy_offsets(shards)
        devices = _gpus(shards)
        if size > self.nbytes or (devices and not self._pinned):
            self._allocate(size, pinned=bool(devices))
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
        copies = []
        for shard, place in zip(shards, places, strict=True):
            tensor = shard.tensor.detach()
            copy = self._memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.device in devices:
                stream = self._streams[tensor.device]
                with torch.cuda.stream(stream):
                    copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            else:
                copy.copy_(tensor)
            copies.append(LocalShard(shard.tensor_slice, shard.global_shape, copy))
        # Blocking events let the waiting thread sleep.
        self._copied = {
            device: self._streams[device].record_event(torch.cuda.Event(blocking=True)) for device in devices
        }
        return copies

    def before_writing(self) -> None:
        """Make the GPUs, but not the host, wait until the last :meth:`take` has read the tensors."""
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait for the copies of the last :meth:`take`, from any thread."""
        for device, event in self._copied.items():
            with torch.cuda.device(device):
                event.synchronize()

    def release(self) -> None:
        """Free the memory; this invalidates the copies of :meth:`take`."""
        self._join()
        self._allocate(0, pinned=False)

    def _join(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _allocate(self, size: int, pinned: bool) -> None:
        if self._pinned:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pinned and size:
            # torch's pinned allocator rounds up to a power of two, up to twice the model.
            _check_cuda(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            self._pinned = True


def _copy_offsets(shards: Sequence[LocalShard]) -> tuple[list[int], int]:
    """Start of each copy and size of all, in bytes."""
    places, size = [], 0
    for shard in shards:
        places.append(size)
        size += -(-shard.tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def _gpus(shards: Sequence[LocalShard]) -> set[torch.device]:
    return {shard.tensor.device for shard in shards if shard.tensor.device.type == "cuda"}


def _check_cuda(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"host memory for a checkpoint cannot be page-locked: CUDA error {code}")


class BackgroundSaver:
    """Runs one save at a time during training. All ranks must construct it and call its methods alike.

    Args:
        timeout_s: a save fails if a rank takes more seconds than this to reach its next part.
    """

    def __init__(self, timeout_s: float) -> None:
        _, size = rank_and_size(None)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if size > 1 else None
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether this rank's part of a save is still running. Not collective; ranks may differ."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """The error of a failed save, until :meth:`wait` has returned it. Not collective."""
        return self._error

    def is_running_anywhere(self) -> bool:
        """Whether any rank's part of a save is still running; all ranks get the same answer."""
        return any(exchange_json(self.is_running, None))

    def reserve(self, plan: Plan, shards: RankShards) -> None:
        """Start to allocate memory for this rank's planned values, before the first save. Not collective."""
        mine = planned_shards(plan, shards)
        self._copies.reserve([*mine.model, *mine.optimizer])

    def before_writing(self) -> None:
        """Call this before writing values that :meth:`start` saves; only the device waits."""
        self._copies.before_writing()

    def start(self, plan: Plan, shards: RankShards, write: Write) -> None:
        """Copy this rank's planned values and start to write them, after :meth:`wait` for the previous save.

        The caller must not change values before :meth:`before_writing`.

        Raises:
            CheckpointSaveError: on all ranks, if one has no memory for its copies.
        """
        assert self._thread is None and self._error is None
        mine = planned_shards(plan, shards)
        copies: list[LocalShard] = []
        run_on_all_ranks(lambda: copies.extend(self._copies.take([*mine.model, *mine.optimizer])), NOT_COPIED, None)
        copied = RankShards(copies[: len(mine.model)], copies[len(mine.model) :])

        def run() -> None:
            try:
                run_on_all_ranks(self._copies.wait, NOT_COPIED, self.group)
                write(copied)
            except Exception as error:  # wait() passes any error to the run
                self._error = error

        # A daemon, so that after a failure of training the process does not wait for lost ranks.
        self._thread = threading.Thread(target=run, name="checkpoint-save", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> Exception | None:
        """Wait for the running save and return its error, once."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return None
            self._thread = None
        error, self._error = self._error, None
        return error

    def release(self) -> None:
        """Free the memory of the copies; call it when no save is running."""
        self._copies.release()
