"""One rank of N on one device: its true memory and compute time, with collectives that are counted and not sent.

The model, the strategy, the optimizer and the batches are those of the rank; torch's ``fake`` process group stands for
the others, which answer what this rank says itself, and send zeros down a pipeline. So values mean nothing, and what
depends on them is as if all ranks were alike: experts are sent as much as they send.

- *memory*: the most that tensors took, from the first weight to the end of the second step; weights, optimizer state;
- *compute*: the median time of the later steps, nothing of which is communication;
- *collectives* of the second step, and the bytes that this rank sends by the ring algorithms.

``python -m benchmarks.gpu.one_rank`` writes ``results/one_rank-<cpu|gpu>.json``; with names of its rows it prints those
as JSON, of the small model; ``python -m benchmarks.gpu.one_rank 0/64 model=llama32_1b strategy=fsdp ...`` prints the
figures of that rank of a configuration. On a GPU where there is one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.cuda_step import CASES, EXPERTS, MICRO_BATCHES, ROWS, TOKENS, Case, fit
from benchmarks.gpu.device_watch import Events
from benchmarks.new_process import call_in_new_process
from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.objectives.packed_text import random_packed_text
from mgpu_pipe.parallel.device_memory import AllocationWatch
from mgpu_pipe.parallel.expert import token_exchange
from mgpu_pipe.parallel.expert.token_exchange import exchange_counts
from mgpu_pipe.system.compat.lightning_private import quiet_libraries
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training import step
from mgpu_pipe.training.tracing.fake_device import process_group, without_others

MIB = 1 << 20
STEPS, COUNTED = 5, 1
"""How many there are, and the number of the one that is counted."""
SMALL = (f"data.seq_len={TOKENS}", f"data.micro_batch_size={ROWS}")
"""As the audit's."""
LARGE = ("data.seq_len=4096", "data.micro_batch_size=2")
NAMES = [name for name in CASES if not name.endswith("fp32")]
COLUMNS = ("case", "ranks", "memory_mib", "weights_mib", "optimizer_mib", "compute_ms", "collectives", "sent_mib")


class Counting(TorchDispatchMode):
    """Counts collectives of the code inside."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves(args)
            self._events.record(func, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], leaves)
        return func(*args, **(kwargs or {}))


class _Measured(pl.Callback):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.events, self.seconds = Events(), list[float]()
        self.memory = 0
        """Bytes."""
        self._began = 0.0
        self._counting, self._allocations = ExitStack(), ExitStack()
        self._watch = AllocationWatch()

    def begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._allocations.enter_context(self._watch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.step == COUNTED:
            self.events.counts = True
            self._counting.enter_context(Counting(self.events))
        self._began = self._now()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.step > COUNTED:
            self.seconds.append(self._now() - self._began)
        elif batch.step == COUNTED:
            self._counting.close()
            self._allocations.close()
            on_device = self._device.type == "cuda"
            self.memory = torch.cuda.max_memory_allocated(self._device) if on_device else self._watch.peak

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _balanced_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row counts from peers that send what this rank sends; the fake group leaves what is received uninitialized."""
    exchange_counts(counts, group)
    return counts.clone()


def one_rank(rank: int, ranks: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """The figures of a rank, in a process that had no world before."""
    quiet_libraries()
    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    config, _ = compose(list(overrides))
    dims = ParallelDims.resolve(config.strategy, ranks)
    measured = _Measured(device)
    balanced = mock.patch.object(token_exchange, "exchange_counts", _balanced_counts)
    unchecked = mock.patch.object(step, "check_finite", return_value=None)  # what is received is uninitialized
    with process_group(ranks, rank), without_others(), balanced, unchecked:
        batches = [_step_batch(config, dims, number) for number in range(STEPS)]
        measured.begin()
        strategy = fit(config, dims, device, batches, measured)
        parts = strategy.memory_parts()
    return {
        "memory": measured.memory,
        "weights": parts["weights"],
        "optimizer": parts["optimizer"],
        "compute_s": statistics.median(measured.seconds),
        "collectives": sum(measured.events.calls.values()),
        "sent": sum(measured.events.sent.values()),
        "collectives of": {name: [count, measured.events.sent[name]] for name, count in measured.events.calls.items()},
    }


def _step_batch(config: RunConfig, dims: ParallelDims, step: int) -> StepBatch:
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    generator = torch.Generator().manual_seed(step)
    vocabulary = int(resolved_fields(config.model)["vocab_size"])
    size, tokens = plan.micro_batch_size, config.data.seq_len
    rows = [random_packed_text(generator, step, size, tokens, vocabulary, True) for _ in range(plan.num_micro_batches)]
    return StepBatch(step, 0, plan.global_batch_size, rows, plan.global_batch_size * tokens)


def overrides_of(case: Case, large: bool) -> tuple[str, ...]:
    """The configuration of a row: two micro-batches of each process."""
    model = case.model if case.model == EXPERTS or not large else "llama32_1b"
    shape = LARGE if large else SMALL
    words = (f"model={model}", "precision=bf16", *case.overrides, *shape)
    dims = ParallelDims.resolve(compose(list(words))[0].strategy, case.ranks)
    micro_batch = int(shape[1].partition("=")[2])
    return (*words, f"data.global_batch_size={micro_batch * MICRO_BATCHES * dims.data_parallel_size}")


def measured_rows(cases: dict[str, Case], large: bool) -> Iterator[dict[str, Any]]:
    """Each of a process of its own; CUDA does not survive a fork."""
    method = "fork" if torch.version.cuda is None else "spawn"
    for name, case in cases.items():
        figures = call_in_new_process(one_rank, case.rank, case.ranks, overrides_of(case, large), method=method)
        yield {"case": name, "ranks": case.ranks, **figures}


def main() -> None:
    words = sys.argv[1:]
    if words and "/" in words[0]:
        rank, ranks = map(int, words[0].split("/"))
        print(json.dumps(one_rank(rank, ranks, tuple(words[1:])), indent=2))
        return
    if words:
        for row in measured_rows({name: CASES[name] for name in words}, large=False):
            print(json.dumps(row), flush=True)
        return
    large = torch.version.cuda is not None
    rows = [
        [row["case"], row["ranks"], *(row[key] / MIB for key in ("memory", "weights", "optimizer"))]
        + [1000 * row["compute_s"], row["collectives"], row["sent"] / MIB]
        for row in measured_rows({name: CASES[name] for name in NAMES}, large)
    ]
    shape = ", ".join(LARGE if large else SMALL)
    notes = f"{'llama32_1b' if large else 'llama_tiny'} or {EXPERTS}, bf16, {shape}, {MICRO_BATCHES} micro-batches"
    finish("one_rank", "One rank of N on one device, its collectives counted and not sent", COLUMNS, rows, notes)


if __name__ == "__main__":
    main()
