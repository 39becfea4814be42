"""Lightning profiler for a few steps: a timeline of this rank and, on request, a torch profiler's trace."""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.profilers import Profiler
from torch.profiler import ProfilerActivity, profile, record_function

from mgpu_pipe.errors import print_line
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.runs.lock import boot_id
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.profiling.device_trace import (
    COMPUTE,
    DATA,
    HOST,
    OPTIMIZER,
    Arrivals,
    Blocked,
    Marks,
    Phase,
    breakdown,
    device_timeline,
)
from mgpu_pipe.training.profiling.link_table import axis_of, suspects, verdict
from mgpu_pipe.training.profiling.measure_hardware import measure_links
from mgpu_pipe.training.profiling.memory_use import MemoryUse, RankMemory, phases_of_samples, rank_memory, thin_samples
from mgpu_pipe.training.profiling.rank_times import RankTimes, StepTimes
from mgpu_pipe.training.profiling.step_watches import CollectiveWatch, MemoryWatch

KINDS = ((".train_dataloader_next", DATA), (".batch_to_device", DATA), (".training_step", COMPUTE))
"""Phase by the end of an action's name in Lightning."""
RANGE_NAMES = {DATA: "data", COMPUTE: "forward and backward", OPTIMIZER: "optimizer"}
CLOCK_ROUNDS = 15
"""Barriers that compare clocks: each ends at the same moment on all ranks."""
AFTER_LAST = (".on_validation_model_zero_grad", ".on_train_epoch_end")
"""Ends of Lightning's first action after a run's last step, with and without evaluation."""
CALLBACK = "callback "
MOST_LINKED = 128
"""Most processes for which the links are measured after the steps; ``doctor links`` measures more."""
MARK = "mgpu_pipe: measuring begins"


class StepProfiler(Profiler):
    """Measures the steps ``first`` to ``last`` of a run, from the beginning of one to the beginning of the next.

    Args:
        start_step: steps done before this attempt.
        trace: the file that gets the torch profiler's trace, or None.
    """

    def __init__(
        self, dims: ParallelDims, device: torch.device, first: int, last: int, start_step: int, trace: Path | None
    ) -> None:
        super().__init__()
        self._dims, self._device, self._trace = dims, device, trace
        self.first, self.last = first, last
        self._step = start_step
        self._stack: list[tuple[str, str]] = []
        self._ranges: list[ExitStack] = []
        self._phases: list[Phase] = []
        self._callback_s: dict[str, float] = defaultdict(float)
        self._since = self._began = 0.0
        self._measuring = self._ended = False
        self._watching = ExitStack()
        self._watch = CollectiveWatch(
            partial(axis_of, dims), record_function if trace is not None else lambda name: nullcontext()
        )
        self._memory = MemoryWatch(device)
        self._torch: profile | None = None

    # -- what Lightning calls -----------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        if action_name == "run_training_batch":
            self._next_step()
        elif self._measuring and self._step >= self.last and action_name.endswith(AFTER_LAST):
            self._end()
        if self._measuring:
            kind, name = self._kind(action_name)
            self._cut()
            self._stack.append((kind, name))
            self._ranges.append(self._range(name))

    def stop(self, action_name: str) -> None:
        if self._measuring and self._stack:  # an action that started before the measured steps has no entry
            self._cut()
            self._stack.pop()
            self._ranges.pop().close()

    def _kind(self, action: str) -> tuple[str, str]:
        """The phase of an action, and its name in the trace; empty where it belongs to the action around it."""
        if action == "optimizer_step":
            return OPTIMIZER, RANGE_NAMES[OPTIMIZER]
        if action.startswith("[Callback]"):
            return HOST, f"{CALLBACK}{action.removeprefix('[Callback]')}"
        for ending, kind in KINDS:
            if action.endswith(ending):
                return kind, RANGE_NAMES[kind]
        if action == "run_training_batch":
            return HOST, f"step {self._step}"
        return self._stack[-1][0] if self._stack else HOST, ""

    def _range(self, name: str) -> ExitStack:
        """An open range of the trace with this name; empty without a name or a trace."""
        entered = ExitStack()
        if name and self._torch is not None:
            entered.enter_context(record_function(name))
            if self._device.type == "cuda":
                torch.cuda.nvtx.range_push(name)
                entered.callback(torch.cuda.nvtx.range_pop)
        return entered

    def _cut(self) -> None:
        """Assign the time since the last start or end of an action to the innermost action."""
        self._memory.sample()
        now = time.perf_counter()
        kind, name = self._stack[-1] if self._stack else (HOST, "")
        self._phases.append((self._since, now, kind))
        if name.startswith(CALLBACK):
            self._callback_s[name] += now - self._since
        self._since = now

    # -- the measured steps -------------------------------------------------------------------------------------

    def _next_step(self) -> None:
        """Count a new step: prepare, begin or end measuring when it is due."""
        self._step += 1
        if self._step == self.first - 1:
            self._prepare()
        elif self._step == self.first:
            self._begin()
        elif self._measuring and self._step > self.last:
            self._end()

    def _prepare(self) -> None:
        """Prepare the torch profiler in the step before, because that takes seconds."""
        if self._trace is None and self._device.type != "cuda":
            return
        on_device = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._torch = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._torch.prepare_trace()

    def _begin(self) -> None:
        if self._torch is None:
            self._prepare()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._torch is not None:
            self._torch.start_trace()
        self._watching.enter_context(self._watch.watching())
        self._watching.enter_context(self._memory.watching())
        self._measuring = True
        self._since = self._began = time.perf_counter()
        with self._range(MARK):
            pass

    def _end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._cut()
        while self._ranges:
            self._ranges.pop().close()
        self.close()
        if self._torch is not None:
            self._torch.stop_trace()
        self._ended = True

    def close(self) -> None:
        """Stop measuring; after an error too."""
        self._measuring = False
        self._watching.close()

    # -- the result ---------------------------------------------------------------------------------------------

    def finish(self, advise: Callable[[StepTimes], Sequence[str]], peak_gib: float) -> dict[str, Any]:
        """Time of every rank by phase, as an entry of the run's summary. Collective.

        Args:
            advise: returns a line for each finding.

        Raises:
            OSError: the trace cannot be written.
        """
        if not self._ended:
            if dist.get_rank() == 0:
                print_line(
                    f"note: trainer.profile: the run ended before step {self.last} was measured", file=sys.stderr
                )
            return {}
        ranks = exchange_json(self._rank_times(peak_gib).as_dict(), None)
        memory = self._memory_use().as_dict()
        values = {"first": self.first, "last": self.last, "ranks": ranks, "findings": [], "memory": memory}
        times = StepTimes.read(values)
        assert times is not None
        lines = [*advise(times), *self._slow_links()]
        return {"step_times": {**values, "findings": lines}}

    def _slow_links(self) -> list[str]:
        """A line for each slow link, measured after the steps. Collective."""
        if not 2 < dist.get_world_size() <= MOST_LINKED:
            return []
        links = measure_links(self._device)
        return verdict(links) if suspects(links) else []

    def _rank_times(self, peak_gib: float) -> RankTimes:
        phases, blocked, arrivals = self._timeline()
        by_process = exchange_json({"boot": boot_id(), "ends": self._barrier_ends(), "arrivals": arrivals}, None)
        here = by_process[dist.get_rank()]
        by_rank = [
            {stream: [time - ahead for time in times] for stream, times in process["arrivals"].items()}
            for process, ahead in ((process, _ahead(process, here)) for process in by_process)
        ]
        totals, steps = breakdown(phases, blocked, by_rank), self.last - self.first + 1
        callback, spent = max(self._callback_s.items(), key=lambda item: item[1], default=("", 0.0))

        def a_step(part: Mapping[Any, float]) -> dict[str, float]:
            return {str(key): seconds / steps for key, seconds in part.items()}

        return RankTimes(
            node=socket.gethostname(),
            step_s=totals.total / steps,
            own=a_step(totals.by_phase),
            waiting=a_step(totals.waiting),
            transfer=a_step(totals.transfer),
            waits_for=a_step(totals.waits_for),
            callback=callback.removeprefix(CALLBACK),
            callback_s=spent / steps,
            peak_gib=peak_gib,
        )

    def _memory_use(self) -> MemoryUse:
        samples = self._memory.samples
        names = phases_of_samples(samples, self._phases, self._memory.backward)
        ranks = [RankMemory(**values) for values in exchange_json(asdict(rank_memory(samples, names)), None)]
        fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
        line = thin_samples(samples, names, self._began) if dist.get_rank() == fullest else []
        return MemoryUse(self._device.type, ranks, fullest, exchange_json(line, None)[fullest])

    def _timeline(self) -> tuple[Sequence[Phase], Sequence[Blocked], Arrivals]:
        """Phases and collectives: by the host's clock on the CPU, by the device's trace on CUDA."""
        if self._torch is None:
            return self._phases, self._watch.blocked, self._watch.arrivals
        if self._trace is not None:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            self._torch.export_chrome_trace(str(self._trace))
        if self._device.type != "cuda":
            return self._phases, self._watch.blocked, self._watch.arrivals
        marks = Marks(MARK, self._began, self._phases, RANGE_NAMES[OPTIMIZER])
        if self._trace is not None:
            return device_timeline(self._trace, marks, partial(axis_of, self._dims))
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            self._torch.export_chrome_trace(str(trace))
            return device_timeline(trace, marks, partial(axis_of, self._dims))

    def _barrier_ends(self) -> list[float]:
        ends = []
        for _ in range(CLOCK_ROUNDS):
            zero = torch.zeros((), device=self._device)
            if dist.get_world_size() > 1:
                dist.all_reduce(zero)
            zero.item()
            ends.append(time.perf_counter())
        return ends


def _ahead(there: dict[str, Any], here: dict[str, Any]) -> float:
    """Seconds that a rank's clock is ahead of this rank's. Processes of one machine share a clock."""
    if there["boot"] == here["boot"]:
        return 0.0
    return statistics.median(end - end_here for end, end_here in zip(there["ends"], here["ends"], strict=True))
