"""Memory over a step as ``trainer.profile`` sees it, by the device's own account; dry, the process's on the CPU."""

from __future__ import annotations

import time

import torch

from mgpu_pipe.training.profiling.memory_use import MEMORY_PHASES, phases_of_samples, rank_memory, thin_samples
from mgpu_pipe.training.profiling.step_watches import MemoryWatch

MIB = 1 << 20
SIZE = 128 * MIB


def test_each_phase_has_its_memory(device: torch.device) -> None:
    watch, weights = MemoryWatch(device), torch.ones(1024, device=device, requires_grad=True)
    marks = [time.perf_counter()]

    def ends() -> None:
        watch.sample()
        marks.append(time.perf_counter())

    with watch.watching():
        ends()
        hidden = weights.repeat(SIZE // weights.nbytes) * 2.0
        time.sleep(0.02)
        loss = (hidden * hidden).sum()  # keeps ``hidden``; the products are gone again
        loss.backward()
        ends()
        del hidden, loss
        state = torch.zeros(SIZE // 8, device=device).add_(1)
        ends()
        del state
        ends()
    kinds = ("host", "compute", "optimizer", "host")
    phases = [(begin, end, kind) for begin, end, kind in zip(marks[:-1], marks[1:], kinds, strict=True)]
    ((began, ended),) = watch.backward
    assert marks[1] < began < ended < marks[2]
    names = phases_of_samples(watch.samples, phases, watch.backward)
    assert set(names) == set(MEMORY_PHASES)
    assert names.count("forward") > 2, "the thread samples too"
    found = rank_memory(watch.samples, names)
    before = watch.samples[0].used
    held = {name: (used - before) * 1024 / (SIZE / MIB) for name, used in found.used.items()}
    assert 0.9 < held["forward"] < 2.1, held
    assert held["backward"] > 1.9, "the gradient of hidden is as large as hidden"
    assert 0.4 < held["optimizer"] < 1.6, held
    line = thin_samples(watch.samples, names, marks[0])
    assert [at for at, *_ in line] == sorted(at for at, *_ in line) and max(held for *_, held, _ in line) > 0
