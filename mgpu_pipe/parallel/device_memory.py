"""Bytes of live tensors, counted by their storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mgpu_pipe.system.compat.torch_private import TorchDispatchMode, storage_key, tree_leaves

OLDER = -1


def storage_bytes(tensors: Iterable[torch.Tensor], device_type: str | None = None) -> int:
    """Bytes of the storages of ``tensors`` (a ``DTensor``: this rank's part), each once, on one kind of device."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta or (device_type is not None and local.device.type != device_type):
            continue
        storage = local.detach().untyped_storage()
        if storage.nbytes():
            seen[storage_key(storage)] = storage.nbytes()
    return sum(seen.values())


def gathered_bytes(model: torch.nn.Module) -> int:
    """Bytes of the whole parameters that FSDP2 holds gathered in ``model`` now."""
    return storage_bytes(parameter for parameter in model.parameters() if not isinstance(parameter, DTensor))


class ForwardMeter:
    """Measures the bytes that a block of code leaves allocated on ``device``, as a forward pass does for backward.

    On CUDA it asks the allocator; on the CPU it watches every operator's results, which slows the code down.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = AllocationWatch()
        self._before = 0

    def __enter__(self) -> ForwardMeter:
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._device.type != "cuda":
            self._watch.__exit__(*error)

    def left_bytes(self) -> int:
        """Bytes left allocated; call it while the measured results are still referenced."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device) - self._before
        return self._watch.live_bytes()


class AllocationWatch(TorchDispatchMode):
    """Counts the bytes of every storage that operators allocate while it is active.

    It sees neither memory that a library holds outside torch's tensors nor compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        """The most bytes allocated inside that were alive at once."""
        self.largest = 0
        """The largest single allocation."""
        self._total = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Each storage and its bytes, by key; ``OLDER`` where it existed before."""

    def live_bytes(self) -> int:
        """Bytes allocated inside that are still alive, at their current size."""
        storages = (reference() for reference, size in self._alive.values() if size != OLDER)
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage_key(storage) not in self._alive:
                self._remember(storage, OLDER)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            known = self._alive.get(storage_key(storage))
            if known is None or known[1] not in (OLDER, storage.nbytes()):
                self._remember(storage, storage.nbytes())
        return result

    def _remember(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage_key(storage)
        self._forget(key)
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        if size != OLDER:
            self._total += size
            self.largest = max(self.largest, size)
            self.peak = max(self.peak, self._total)

    def _forget(self, key: int) -> None:
        _, size = self._alive.pop(key, (None, OLDER))
        if size != OLDER:
            self._total -= size


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta:
            yield value.untyped_storage()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to ``device`` without a host sync: CUDA syncs on copies from memory that is not pinned."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
