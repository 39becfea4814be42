"""Bytes of live tensors by phase of a step, and collectives by name, of real or of fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mgpu_pipe.architectures.formulas.kept_memory import all_reduced, exchanged_bytes
from mgpu_pipe.parallel.device_memory import OLDER, AllocationWatch
from mgpu_pipe.system.compat.torch_private import in_backward_pass, schema_of, storage_key, tree_leaves

BUILD, FORWARD, BACKWARD, UPDATE = "build", "forward", "backward", "update"
"""In the order of a step; a forward pass that is computed again is part of the backward pass, and the reduction of the
gradient norm part of the update."""


class Collectives:
    """Collectives of this process by name while :attr:`counts`."""

    def __init__(self) -> None:
        self.counts = False
        self.calls: Counter[str] = Counter()
        """Calls by name; a message counts where it is sent."""
        self.sent: Counter[str] = Counter()
        """Bytes that this process sends by the ring algorithms."""

    def record(self, func: Any, tensors: Sequence[torch.Tensor], leaves: Sequence[Any]) -> str:
        """Count an operator of ``c10d`` of these tensors; returns its name. NotImplementedError for several at once."""
        name = str(schema_of(func).name).removeprefix("c10d::").strip("_")
        if self.counts and name != "recv":
            if "coalesced" in name:
                raise NotImplementedError(f"{func} is not counted")
            size = group_size([leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)])
            largest = max(tensor.nbytes for tensor in tensors)
            share = all_reduced(largest, size) if name == "allreduce" else exchanged_bytes(largest, size)
            self.calls[name] += 1
            self.sent[name] += largest if name == "send" else round(share)
        return name


def group_size(groups: Sequence[Any]) -> int:
    """Size of the first process group of an operator's arguments; RuntimeError without one."""
    for group in groups:
        try:
            return int(dist.ProcessGroup.unbox(group).size())
        except (RuntimeError, TypeError):
            continue
    raise RuntimeError("a collective without a group that can be read")


class PhaseWatch(AllocationWatch):
    """Counts live bytes by phase; set :attr:`phase` where one begins.

    Attributes:
        collectives: counted while its ``counts`` is set.
        peaks: the most live bytes in each phase.
        born: bytes that were live at that moment, by the phase in which they were allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives = Collectives()
        self.peaks: dict[str, int] = {}
        self.born: dict[str, dict[str, int]] = {}
        self._phase = BUILD
        self._live: Counter[str] = Counter()
        self._births: dict[int, str] = {}

    @property
    def phase(self) -> str:
        return BACKWARD if self._phase == FORWARD and in_backward_pass() else self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._note_peak()

    @property
    def live(self) -> int:
        """Live bytes now."""
        return self._total

    def begin(self, phase: str) -> None:
        """Forget the peaks so far, and begin a phase."""
        self.peaks, self.born = {}, {}
        self.phase = phase

    def __enter__(self) -> Any:
        resize: Any = torch.UntypedStorage.resize_

        def resize_and_remember(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._alive.get(storage_key(storage))
            if known is not None and known[1] != OLDER:
                self._remember(storage, storage.nbytes())
            return result

        self._patch: Any = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_remember, create=True)
        self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operator comes again, of local tensors
        if func.namespace == "prim":  # a tensor's device
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            leaves = tree_leaves(args)
            self.collectives.record(func, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], leaves)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _remember(self, storage: torch.UntypedStorage, size: int) -> None:
        super()._remember(storage, size)
        if size != OLDER:
            phase = self.phase
            self._births[storage_key(storage)] = phase
            self._live[phase] += size
            self._note_peak()

    def _forget(self, key: int) -> None:
        size = self._alive[key][1] if key in self._alive else OLDER
        super()._forget(key)
        birth = self._births.pop(key, None)
        if birth is not None:
            self._live[birth] -= size

    def _note_peak(self) -> None:
        phase = self.phase
        if self._total > self.peaks.get(phase, -1):
            self.peaks[phase] = self._total
            self.born[phase] = {name: size for name, size in self._live.items() if size}
