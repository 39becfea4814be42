"""Step batches: the data of each process in each optimizer step and each evaluation.

Step ``s`` consumes the samples ``[s * G, (s + 1) * G)`` of the global order; process ``r`` takes the ``r``-th
contiguous share. Every process counts the valid tokens of the whole step from the packs' counts, without communication.
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
from mgpu_pipe.data.order import Order
from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.data.samples import Prepared, SampleSet, deal, evaluation_numbers, require_costs
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.topology import BatchPlan

# Samples per call of the order: one call for many steps costs less than many calls.
_ORDER_BLOCK = 1 << 14

STEP_BATCHES_AHEAD = 2
"""Step batches that each loader process prepares in advance."""


View = Callable[[RunConfig, SampleSet], SampleSet]


class SizedStepBatches(Sized, Iterable[StepBatch], Protocol):
    """Step batches with a length that can be iterated repeatedly."""


class TrainStepBatches:
    """Step batches from a cursor to the run's end, by number.

    Args:
        dataset: the training samples.
        order: the run's order of them.
        plan: sizes of the step and its micro-batches.
        data_parallel_rank: of this process.
        start_sample: samples consumed so far.
        num_steps: number of step batches.
        balance: deal a step's samples by cost.

    Raises:
        ConfigError: ``balance``, and the samples' costs are not known.
    """

    def __init__(
        self,
        dataset: SampleSet,
        order: Order,
        plan: BatchPlan,
        data_parallel_rank: int,
        start_sample: int,
        num_steps: int,
        balance: bool = False,
    ) -> None:
        self._costs = require_costs(dataset) if balance else None
        self._dataset, self._order, self._plan, self._rank = dataset, order, plan, data_parallel_rank
        self._start, self._count = start_sample, num_steps
        self._steps_ahead = max(1, _ORDER_BLOCK // plan.global_batch_size)
        self._block_number = -1
        self._block = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StepBatch]:
        return map(self.__getitem__, range(self._count))

    def __getitem__(self, number: int) -> StepBatch:
        if not 0 <= number < self._count:
            raise IndexError(number)
        total = self._plan.global_batch_size
        first = self._start + number * total
        samples = self.samples(number)
        share = self._plan.samples_per_process
        numbers = np.arange(first, first + total, dtype=np.int64)
        if self._costs is not None:
            order = deal(self._costs.costs(samples), self._plan)
            samples, numbers = samples[order], numbers[order]
        local = samples[self._rank * share : (self._rank + 1) * share]
        own_numbers = numbers[self._rank * share : (self._rank + 1) * share]
        return _step_batch(
            self._dataset, self._plan, self._start // total + number, first, (samples, numbers), (local, own_numbers)
        )

    def samples(self, number: int) -> NDArray[np.int64]:
        """Data set indices of step batch ``number`` over all processes; shape ``(G,)``."""
        total = self._plan.global_batch_size
        block, within = divmod(number, self._steps_ahead)
        if block != self._block_number:
            begin = block * self._steps_ahead
            steps = min(self._steps_ahead, self._count - begin)
            self._block = self._order.indices(self._start + begin * total, steps * total)
            self._block_number = block
        return self._block[within * total : (within + 1) * total]


class StepBatchesAhead:
    """The step batches of another sequence, prepared ahead by worker processes.

    Args:
        processes: number of worker processes.
    """

    def __init__(self, step_batches: TrainStepBatches, processes: int) -> None:
        self._step_batches, self._processes = step_batches, processes

    def __len__(self) -> int:
        return len(self._step_batches)

    def __iter__(self) -> Iterator[StepBatch]:
        numbers = range(len(self._step_batches))
        batches = work_in_order(
            numbers,
            self._processes,
            _step_batch_maker,
            (self._step_batches,),
            ahead=STEP_BATCHES_AHEAD,
            what="a loader process died (killed, or out of memory): use fewer, with data.num_workers=0 none",
        )
        for step_batch in batches:
            yield _with_arrays_as(torch.from_numpy, step_batch)


def _step_batch_maker(step_batches: TrainStepBatches) -> Callable[[int], StepBatch]:
    """Runs in a loader process. It sends arrays: torch would put tensors into shared memory."""
    torch.set_num_threads(1)
    return lambda number: _with_arrays_as(torch.Tensor.numpy, step_batches[number])


def _with_arrays_as(convert: Callable[[Any], Any], step_batch: StepBatch) -> StepBatch:
    batches = [{name: convert(value) for name, value in batch.items()} for batch in step_batch.micro_batches]
    return replace(step_batch, micro_batches=batches)


class EvaluationStepBatches(Sequence[StepBatch]):
    """Step batches of one evaluation: always the same samples in the same order; the last may be short.

    Every process has the same number of step batches. A short step batch is split as evenly as possible, so
    a process's last step batch may hold fewer micro-batches than another's, or none.
    """

    def __init__(
        self, dataset: SampleSet, samples: NDArray[np.int64], plan: BatchPlan, data_parallel_rank: int
    ) -> None:
        self._dataset, self._samples, self._plan, self._rank = dataset, samples, plan, data_parallel_rank

    def __len__(self) -> int:
        return ceil(len(self._samples) / self._plan.global_batch_size)

    @overload
    def __getitem__(self, number: int) -> StepBatch: ...
    @overload
    def __getitem__(self, number: slice) -> list[StepBatch]: ...
    def __getitem__(self, number: int | slice) -> StepBatch | list[StepBatch]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        first = number * self._plan.global_batch_size
        samples = self._samples[first : first + self._plan.global_batch_size]
        size = self._plan.data_parallel_size
        local = samples[len(samples) * self._rank // size : len(samples) * (self._rank + 1) // size]
        return _step_batch(
            self._dataset,
            self._plan,
            number,
            first,
            (samples, evaluation_numbers(samples)),
            (local, evaluation_numbers(local)),
        )


def train_step_batches(
    config: RunConfig,
    prepared: Prepared,
    plan: BatchPlan,
    data_parallel_rank: int,
    start_sample: int,
    max_steps: int,
    view: View = lambda config, samples: samples,
) -> SizedStepBatches:
    """Returns this process's step batches of the remaining steps.

    Args:
        start_sample: samples that the run has consumed (the cursor). The first step batch is step
            ``start_sample // global_batch_size``.
        max_steps: optimizer steps of the whole run, counted from its start; the last step batch is step ``max_steps -
            1``.
        view: the objective's view of the data's samples.

    Returns:
        A sized iterable. With ``data.num_workers`` above 0, loader processes work ahead; the order is the same.
    """
    dataset = view(config, prepared.open(config, "train"))
    order = prepared.order(config.seed, config.data, len(dataset))
    remaining = max(0, max_steps - start_sample // plan.global_batch_size)
    balance = config.data.balance == "cost"
    step_batches = TrainStepBatches(dataset, order, plan, data_parallel_rank, start_sample, remaining, balance)
    if config.data.num_workers == 0:
        return step_batches
    return StepBatchesAhead(step_batches, config.data.num_workers)


def evaluation_step_batches(
    config: RunConfig,
    prepared: Prepared,
    plan: BatchPlan,
    data_parallel_rank: int,
    view: View = lambda config, samples: samples,
) -> EvaluationStepBatches | list[StepBatch]:
    """Returns this process's step batches of one evaluation; an empty list where nothing is held out."""
    samples = prepared.evaluated_samples()
    if not len(samples):
        return []
    dataset = view(config, prepared.open(config, "validation"))
    return EvaluationStepBatches(dataset, samples, plan, data_parallel_rank)


Chosen = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Samples: their data set indices and their numbers in the run."""


def _step_batch(dataset: SampleSet, plan: BatchPlan, step: int, first: int, chosen: Chosen, local: Chosen) -> StepBatch:
    """Builds the step batch of the samples ``chosen`` over all processes; ``local`` are this process's."""
    samples, numbers = chosen
    micro_batches: list[dict[str, torch.Tensor]] = []
    if len(local[0]):
        whole = dataset.batch(*local)
        views = zip(*(tensor.split(plan.micro_batch_size) for tensor in whole.values()), strict=True)
        micro_batches = [dict(zip(whole, view, strict=True)) for view in views]
    return StepBatch(
        step=step,
        first_sample=first,
        num_samples=len(samples),
        micro_batches=micro_batches,
        loss_denominator=dataset.valid_units(samples, numbers),
        num_tokens=dataset.positions(samples),
        padding=dataset.padding(samples),
    )
