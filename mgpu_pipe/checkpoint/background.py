"""Saving beside training: values are copied to host memory, and a thread writes the copies.

Collectives of two threads must not share a process group: the thread's have a gloo group of their own, in which every
rank's thread makes the same calls in the same order, one save after another. The calling thread's are in the world's
group, between those of training. So all ranks must call the methods here at the same place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.exchange import exchange_json, rank_and_size, together
from mgpu_pipe.checkpoint.layout import KINDS
from mgpu_pipe.checkpoint.save import Plan, planned_for
from mgpu_pipe.checkpoint.tensor_slices import LocalShard

ALIGNMENT = 64
"""Copies begin at multiples of so many bytes: a cache line, and a multiple of every dtype's size."""

Write = Callable[[list[LocalShard], list[LocalShard]], object]
"""Writes the local shards of model and optimizer; see ``checkpoint.save.write``."""


class HostCopies:
    """Host memory for the values of one save, kept for the next; page-locked where they come from a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def take(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copies of the local shards, in this object's memory: the next call overwrites them.

        Returns once everything is copied, so that the tensors may change.
        """
        places, size = [], 0
        for shard in shards:
            places.append(size)
            size += -(-shard.tensor.nbytes // ALIGNMENT) * ALIGNMENT
        devices = {shard.tensor.device for shard in shards if shard.tensor.device.type == "cuda"}
        if size > self.nbytes or (devices and not self._pinned):
            self._allocate(size, pinned=bool(devices))
        copies = []
        for shard, place in zip(shards, places, strict=True):
            tensor = shard.tensor.detach()
            copy = self._memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copy.copy_(tensor, non_blocking=True)
            copies.append(LocalShard(shard.tensor_slice, shard.global_shape, copy))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def release(self) -> None:
        """Free the memory; what :meth:`take` returned is invalid from now on."""
        self._allocate(0, pinned=False)

    def _allocate(self, size: int, pinned: bool) -> None:
        if self._pinned:
            _check_cuda(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._pinned = False
        self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pinned and size:
            # torch's own allocator of page-locked memory rounds up to a power of two: up to twice the model.
            _check_cuda(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            self._pinned = True


def _check_cuda(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"host memory for a checkpoint cannot be page-locked: CUDA error {code}")


class BackgroundSaver:
    """One save at a time, beside training. Collective: made, and every method called, by all ranks alike.

    Args:
        timeout_s: a save fails where a rank takes more seconds than this to reach its next part.
    """

    def __init__(self, timeout_s: float) -> None:
        _, size = rank_and_size(None)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if size > 1 else None
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def running(self) -> bool:
        """Whether this rank's part of a save is still running. Not collective: ranks may differ."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """Why a save failed, until :meth:`wait` has returned it. Not collective."""
        return self._error

    def running_anywhere(self) -> bool:
        """Whether any rank's part of a save is still running; the same on all."""
        return any(exchange_json(self.running, None))

    def start(self, plan: Plan, model: Sequence[LocalShard], optimizer: Sequence[LocalShard], write: Write) -> None:
        """Copy this rank's share of the planned values and begin to write it; after :meth:`wait` for the save before.

        Raises:
            CheckpointSaveError: on all ranks, when one has no memory for its copies.
        """
        assert self._thread is None and self._error is None
        rank, _ = rank_and_size(None)
        mine = [planned_for(plan, rank, kind, part) for kind, part in zip(KINDS, (model, optimizer), strict=True)]
        copies: list[LocalShard] = []
        what = "a checkpoint's values could not be copied to host memory; checkpoint.async_save=false needs none"
        together(lambda: copies.extend(self._copies.take([*mine[0], *mine[1]])), what, None)
        parts = copies[: len(mine[0])], copies[len(mine[0]) :]

        def run() -> None:
            try:
                write(*parts)
            except Exception as error:  # whatever it is reaches the run through wait()
                self._error = error

        # A daemon: where training itself failed, the process must not wait for ranks that are gone.
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
