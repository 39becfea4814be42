"""Saving beside training: values are copied to host memory, and a thread writes the copies.

Collectives of two threads must not share a process group: the thread's have a gloo group of their own, in which every
rank's thread makes the same calls in the same order, one save after another. The calling thread's are in the world's
group, between those of training. So all ranks must call the methods here at the same place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.exchange import exchange_json, rank_and_size, together
from mgpu_pipe.checkpoint.layout import KINDS
from mgpu_pipe.checkpoint.save import Plan, planned_for
from mgpu_pipe.checkpoint.tensor_slices import LocalShard

ALIGNMENT = 64
"""Copies begin at multiples of so many bytes: a cache line, and a multiple of every dtype's size."""

NOT_COPIED = "a checkpoint's values could not be copied to host memory; checkpoint.async_save=false needs none"

Write = Callable[[list[LocalShard], list[LocalShard]], object]
"""Writes the local shards of model and optimizer; see ``checkpoint.save.write``."""


class HostCopies:
    """Host memory for the values of one save, kept for the next; page-locked where they come from a GPU.

    A GPU copies on a stream of its own, while it computes what writes none of the values.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._reserving: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._memory.numel()

    def reserve(self, shards: Sequence[LocalShard]) -> None:
        """Begin to take the memory for these, in a thread: page-locking many gigabytes takes seconds."""
        _, size = _places(shards)
        devices = _gpus(shards)

        def allocate() -> None:
            for device in devices:
                torch.cuda.set_device(device)  # of this thread, which else would begin to use the first GPU
            with suppress(RuntimeError):  # said by the save
                self._allocate(size, pinned=bool(devices))

        self._reserving = threading.Thread(target=allocate, name="checkpoint-memory", daemon=True)
        self._reserving.start()

    def take(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Copies of the local shards, in this object's memory: the next call overwrites them.

        Those of tensors on a GPU are made when :meth:`wait` returns, and the tensors may be written after
        :meth:`before_writing`; those of others when this returns.
        """
        self._join()
        places, size = _places(shards)
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
        # Blocking: who waits for one sleeps meanwhile.
        self._copied = {
            device: self._streams[device].record_event(torch.cuda.Event(blocking=True)) for device in devices
        }
        return copies

    def before_writing(self) -> None:
        """Have the GPUs, not the host, wait until the last :meth:`take` has read the tensors."""
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until the copies of the last :meth:`take` are made; any thread may."""
        for device, event in self._copied.items():
            with torch.cuda.device(device):
                event.synchronize()

    def release(self) -> None:
        """Free the memory; what :meth:`take` returned is invalid from now on."""
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
            # torch's own allocator of page-locked memory rounds up to a power of two: up to twice the model.
            _check_cuda(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            self._pinned = True


def _places(shards: Sequence[LocalShard]) -> tuple[list[int], int]:
    """The byte at which each copy begins, and the bytes of all."""
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

    def reserve(self, plan: Plan, model: Sequence[LocalShard], optimizer: Sequence[LocalShard]) -> None:
        """Take the memory for copies of this rank's share of the planned values, beside training; before the first
        save. Not collective."""
        mine = _planned(plan, model, optimizer)
        self._copies.reserve([*mine[0], *mine[1]])

    def before_writing(self) -> None:
        """To be called before values that were given to :meth:`start` are written; waits on the device alone."""
        self._copies.before_writing()

    def start(self, plan: Plan, model: Sequence[LocalShard], optimizer: Sequence[LocalShard], write: Write) -> None:
        """Copy this rank's share of the planned values and begin to write it; after :meth:`wait` for the save before.
        Values are not to be changed before :meth:`before_writing`.

        Raises:
            CheckpointSaveError: on all ranks, when one has no memory for its copies.
        """
        assert self._thread is None and self._error is None
        mine = _planned(plan, model, optimizer)
        copies: list[LocalShard] = []
        together(lambda: copies.extend(self._copies.take([*mine[0], *mine[1]])), NOT_COPIED, None)
        parts = copies[: len(mine[0])], copies[len(mine[0]) :]

        def run() -> None:
            try:
                together(self._copies.wait, NOT_COPIED, self.group)
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


def _planned(
    plan: Plan, model: Sequence[LocalShard], optimizer: Sequence[LocalShard]
) -> tuple[list[LocalShard], list[LocalShard]]:
    """What this rank is to write of the weights, and of the optimizer's state."""
    rank, _ = rank_and_size(None)
    weights, state = (planned_for(plan, rank, kind, part) for kind, part in zip(KINDS, (model, optimizer), strict=True))
    return weights, state
