"""Step windows: what each process consumes in each optimizer step, and in each evaluation.

Step ``s`` of the run consumes the samples ``[s * G, (s + 1) * G)`` of the global order; process ``r`` takes the
``r``-th contiguous share of them. The number of valid tokens is counted over the whole step from the packs' own
counts: no process talks to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from math import ceil
from typing import Any, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.dataset import PackedDataset
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.data.prepare import PreparedData
from mgpu_pipe.data.step_batch import StepWindow
from mgpu_pipe.topology import BatchPlan

# Samples whose order is computed at once: one call for many steps costs less than many calls.
_ORDER_BLOCK = 1 << 14

WINDOWS_AHEAD = 2
"""That each loader process makes before they are asked for."""


class SizedWindows(Sized, Iterable[StepWindow], Protocol):
    """Windows that can be counted and gone through more than once."""


class TrainWindows:
    """The windows of the steps from a cursor to the run's end, by number.

    Args:
        dataset: the training samples.
        order: the run's order of them.
        plan: how a step's samples are cut.
        data_parallel_rank: whose share.
        start_sample: samples consumed so far.
        num_windows: how many windows follow.
    """

    def __init__(
        self, dataset: PackedDataset, order: GlobalOrder, plan: BatchPlan, data_parallel_rank: int,
        start_sample: int, num_windows: int,
    ) -> None:
        self._dataset, self._order, self._plan, self._rank = dataset, order, plan, data_parallel_rank
        self._start, self._count = start_sample, num_windows
        self._steps_ahead = max(1, _ORDER_BLOCK // plan.global_batch_size)
        self._block_number = -1
        self._block = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StepWindow]:
        return map(self.__getitem__, range(self._count))

    def __getitem__(self, number: int) -> StepWindow:
        if not 0 <= number < self._count:
            raise IndexError(number)
        total = self._plan.global_batch_size
        first = self._start + number * total
        samples = self.samples(number)
        share = self._plan.samples_per_process
        own = samples[self._rank * share : (self._rank + 1) * share]
        return _window(self._dataset, self._plan, self._start // total + number, first, samples, own)

    def samples(self, number: int) -> NDArray[np.int64]:
        """Data set indices of all samples of window ``number``, over all processes; shape ``(G,)``."""
        total = self._plan.global_batch_size
        block, within = divmod(number, self._steps_ahead)
        if block != self._block_number:
            begin = block * self._steps_ahead
            steps = min(self._steps_ahead, self._count - begin)
            self._block = self._order.indices(self._start + begin * total, steps * total)
            self._block_number = block
        return self._block[within * total : (within + 1) * total]


class WindowsAhead:
    """The same windows, made by processes that work ahead.

    Args:
        processes: how many.
    """

    def __init__(self, windows: TrainWindows, processes: int) -> None:
        self._windows, self._processes = windows, processes

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[StepWindow]:
        numbers = range(len(self._windows))
        made = work_in_order(
            numbers, self._processes, _window_maker, (self._windows,), ahead=WINDOWS_AHEAD,
            what="a loader process died (killed, or out of memory): use fewer, with data.num_workers=0 none",
        )  # fmt: skip
        for window in made:
            yield _with_arrays_as(torch.from_numpy, window)


def _window_maker(windows: TrainWindows) -> Callable[[int], StepWindow]:
    """In a loader process. Arrays travel, not tensors, which torch would put into shared memory."""
    torch.set_num_threads(1)
    return lambda number: _with_arrays_as(torch.Tensor.numpy, windows[number])


def _with_arrays_as(convert: Callable[[Any], Any], window: StepWindow) -> StepWindow:
    batches = [{name: convert(value) for name, value in batch.items()} for batch in window.micro_batches]
    return replace(window, micro_batches=batches)


class EvaluationWindows(Sequence[StepWindow]):
    """The windows of one evaluation: the same samples in the same order every time; the last may be short.

    Every process has the same number of windows. A short window's samples are dealt out as evenly as possible, so a
    process's last window may hold fewer micro-batches than another's, or none.
    """

    def __init__(
        self, dataset: PackedDataset, samples: NDArray[np.int64], plan: BatchPlan, data_parallel_rank: int
    ) -> None:
        self._dataset, self._samples, self._plan, self._rank = dataset, samples, plan, data_parallel_rank

    def __len__(self) -> int:
        return ceil(len(self._samples) / self._plan.global_batch_size)

    @overload
    def __getitem__(self, number: int) -> StepWindow: ...
    @overload
    def __getitem__(self, number: slice) -> list[StepWindow]: ...
    def __getitem__(self, number: int | slice) -> StepWindow | list[StepWindow]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        first = number * self._plan.global_batch_size
        samples = self._samples[first : first + self._plan.global_batch_size]
        size = self._plan.data_parallel_size
        own = samples[len(samples) * self._rank // size : len(samples) * (self._rank + 1) // size]
        return _window(self._dataset, self._plan, number, first, samples, own)


def train_windows(
    config: RunConfig, prepared: PreparedData, plan: BatchPlan, data_parallel_rank: int, start_sample: int,
    max_steps: int,
) -> SizedWindows:
    """This process's windows of the steps that remain.

    Args:
        start_sample: the cursor: samples that the run has consumed. The first window is step
            ``start_sample // global_batch_size``.
        max_steps: optimizer steps of the whole run, counted from its start; the last window is step ``max_steps - 1``.

    Returns:
        A sized iterable. With ``data.num_workers`` above 0, loader processes work ahead; the order is the same.
    """
    dataset = PackedDataset.open(prepared, "train")
    order = GlobalOrder(config.seed, len(dataset))
    remaining = max(0, max_steps - start_sample // plan.global_batch_size)
    windows = TrainWindows(dataset, order, plan, data_parallel_rank, start_sample, remaining)
    if config.data.num_workers == 0:
        return windows
    return WindowsAhead(windows, config.data.num_workers)


def evaluation_windows(
    prepared: PreparedData, plan: BatchPlan, data_parallel_rank: int
) -> EvaluationWindows | list[StepWindow]:
    """This process's windows of one evaluation; an empty list where nothing is held out."""
    if prepared.validation is None:
        return []
    dataset = PackedDataset.open(prepared, "validation")
    return EvaluationWindows(dataset, prepared.evaluated_samples(), plan, data_parallel_rank)


def _window(
    dataset: PackedDataset, plan: BatchPlan, step: int, first: int, samples: NDArray[np.int64],
    own: NDArray[np.int64],
) -> StepWindow:
    """The window of ``samples`` (over all processes), of which ``own`` are this process's."""
    micro_batches: list[dict[str, torch.Tensor]] = []
    if len(own):
        whole = dataset.batch(own)
        views = zip(*(tensor.split(plan.micro_batch_size) for tensor in whole.values()), strict=True)
        micro_batches = [dict(zip(whole, view, strict=True)) for view in views]
    return StepWindow(
        step=step, first_sample=first, num_samples=len(samples), micro_batches=micro_batches,
        normalizer=int(dataset.valid_tokens[samples].sum()), num_tokens=len(samples) * dataset.seq_len,
        padding=dataset.padding(samples),
    )
