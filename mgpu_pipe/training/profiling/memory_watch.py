"""Samples this process's memory while its measured steps run.

On CUDA it reads torch's allocator, which counts memory when the host requests it; on the CPU it reads the resident set
of the process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mgpu_pipe.system.compat.torch_private import around_backward_passes
from mgpu_pipe.training.profiling.memory_use import GIB, Look

EVERY_S = 0.005
PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Samples of memory within :meth:`watching`, in order of time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.looks: list[Look] = []
        self.backward: list[tuple[float, float]] = []
        """Start and end times of backward passes."""
        self._lock = threading.Lock()

    def look(self) -> None:
        """Sample now: called at the end of each phase, so that even a short phase has a sample."""
        with self._lock:
            self.looks.append(Look(time.perf_counter(), *self._gib()))

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

        def keep_looking() -> None:
            while not over.wait(EVERY_S):
                self.look()

        thread = threading.Thread(target=keep_looking, name="memory", daemon=True)
        thread.start()
        try:
            with around_backward_passes(self._backward_pass):
                yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def _backward_pass(self) -> Iterator[None]:
        self.look()
        began = time.perf_counter()
        try:
            yield
        finally:
            self.look()
            self.backward.append((began, time.perf_counter()))
