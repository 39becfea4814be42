"""Watches a rank's memory and collectives while its measured steps run.

Memory on CUDA is that of torch's allocator, which counts it when the host requests it; on the CPU it is the resident
set of the process."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.system.compat.torch_private import around_backward_passes
from mgpu_pipe.training.profiling.device_trace import Blocked
from mgpu_pipe.training.profiling.link_table import ALL_TO_ALL
from mgpu_pipe.training.profiling.memory_use import GIB, MemorySample

EVERY_S = 0.005
PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Samples of memory within :meth:`watching`, in order of time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[MemorySample] = []
        self.backward: list[tuple[float, float]] = []
        """Start and end times of backward passes."""
        self._lock = threading.Lock()

    def sample(self) -> None:
        """Sample now: called at the end of each phase, so that even a short phase has a sample."""
        with self._lock:
            self.samples.append(MemorySample(time.perf_counter(), *self._gib()))

    def _gib(self) -> tuple[float, float, float]:
        if self.device.type == "cuda":
            stats = torch.cuda.memory_stats(self.device)
            kinds = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
            used, reserved, split = (stats[f"{kind}.all.current"] / GIB for kind in kinds)
            return used, reserved, split
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * PAGE / GIB
        return resident, resident, 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        over = threading.Event()

        def keep_sampling() -> None:
            while not over.wait(EVERY_S):
                self.sample()

        thread = threading.Thread(target=keep_sampling, name="memory", daemon=True)
        thread.start()
        try:
            with around_backward_passes(self._backward_pass):
                yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def _backward_pass(self) -> Iterator[None]:
        self.sample()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.sample()
            self.backward.append((began, time.perf_counter()))


METHODS = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "allgather_coalesced": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "all_gather_single_coalesced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "reduce_scatter_single_coalesced": "reduce-scatter",
    "alltoall": ALL_TO_ALL,
    "alltoall_base": ALL_TO_ALL,
    "all_to_all_single": ALL_TO_ALL,
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
}
"""Methods of a process group, in torch 2.10 to 2.13, and the name of each in a trace."""
Named = Callable[[str], AbstractContextManager[Any]]


class CollectiveWatch:
    """Records the collectives of its creating thread in groups of several ranks, within :meth:`watching`.

    Args:
        axis_of: the axis of a collective, from its group's ranks, torch's description of it, and its kind.
        named: makes a range of this name around each call and each wait, for a trace.
    """

    def __init__(
        self, axis_of: Callable[[Sequence[int], str, str], str], named: Named = lambda name: nullcontext()
    ) -> None:
        self.blocked: list[Blocked] = []
        self.arrivals: dict[str, list[float]] = defaultdict(list)
        """Times at which this process reached the collectives of each group, and the messages of each pair of ranks."""
        self._axis_of, self._named = axis_of, named
        self._groups: dict[tuple[str, str], tuple[str, str]] = {}
        """Stream and axis of each group's collectives of a kind, by torch's name of it and the kind."""
        self._pending: dict[int, tuple[Any, Blocked, str]] = {}
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context that records collectives, which must be the same on all ranks."""
        group, work = dist.ProcessGroup, dist.Work
        entries = vars(group)
        usual: list[tuple[type, str, Any]] = [(group, name, entries[name]) for name in METHODS if name in entries]
        usual.append((work, "wait", vars(work)["wait"]))  # as they stand there: what getattr gives would not bind
        for owner, name, _ in usual:
            method = getattr(owner, name)
            setattr(owner, name, self._waiting(method) if owner is work else self._issuing(method, name))
        try:
            yield
        finally:
            for owner, name, entry in usual:
                setattr(owner, name, entry)
            self._pending.clear()

    def _group(self, group: Any, kind: str) -> tuple[str, str]:
        name = group.group_name
        if (name, kind) not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[name, kind] = (f"{name} {ranks}", self._axis_of(ranks, group.group_desc, kind))
        return self._groups[name, kind]

    def _issuing(self, method: Any, name: str) -> Any:
        @wraps(method)
        def issue(group: Any, *args: Any, **options: Any) -> Any:
            if group.size() == 1 or threading.get_ident() != self._thread:
                return method(group, *args, **options)
            stream, axis = self._group(group, METHODS[name])
            if name in ("send", "recv"):
                here, there = group.rank(), args[1]
                stream += f"|{here}>{there}" if name == "send" else f"|{there}>{here}"
            label = f"{METHODS[name]} {axis}"
            begin = time.perf_counter()
            number = len(self.arrivals[stream])
            self.arrivals[stream].append(begin)
            with self._named(label):
                work = method(group, *args, **options)
            call = Blocked(begin, time.perf_counter(), axis, stream, number)
            self.blocked.append(call)
            if work is not None:
                self._pending[id(work)] = (work, call, label)
            return work

        return issue

    def _waiting(self, method: Any) -> Any:
        @wraps(method)
        def wait(work: Any, *args: Any, **options: Any) -> Any:
            _, call, label = self._pending.pop(id(work), (None, None, ""))
            if call is None:
                return method(work, *args, **options)
            begin = time.perf_counter()
            with self._named(f"wait for {label}"):
                done = method(work, *args, **options)
            self.blocked.append(Blocked(begin, time.perf_counter(), call.axis, call.stream, call.number))
            return done

        return wait
