"""Load balancing: assigns the samples of a step to processes and micro-batches (``data.balance``).

A step consumes the same samples in any assignment, and its loss and gradients are sums over them. Costs are known
before reading (:class:`mgpu_pipe.data.samples.SampleCosts`), so every process computes the same assignment on its own.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ObjectiveConfig
from mgpu_pipe.data.order import Order
from mgpu_pipe.data.samples import SampleCosts, SampleSet
from mgpu_pipe.topology import BatchPlan

STEPS = 20
"""First steps of a run whose balance is measured."""
Ints = NDArray[np.int64]


def deal(costs: Ints, plan: BatchPlan) -> Ints:
    """Orders a step's samples for the processes: each takes a contiguous share, micro-batch after micro-batch.

    Each sample goes to the cheapest micro-batch with room, the costliest sample first; so do micro-batches to processes
    (longest processing time first: Graham 1969). A process begins with its costliest micro-batch, so that simultaneous
    micro-batches cost about the same.

    Args:
        costs: of each sample of the step; shape ``(global_batch_size,)``.
    """
    size, processes = plan.micro_batch_size, plan.data_parallel_size
    micro_batches = _to_cheapest(costs, len(costs) // size)
    shares = _to_cheapest(costs[micro_batches].sum(1), processes)
    return micro_batches[shares].reshape(-1)


def imbalance(costs: Ints, plan: BatchPlan) -> float:
    """Work of the busiest process over the mean of all; ``costs`` are in the order of :func:`deal`."""
    shares = costs.reshape(plan.data_parallel_size, -1).sum(1)
    return float(shares.max() / shares.mean()) if shares.any() else 1.0


def describe_imbalance(objective: ObjectiveConfig, plan: BatchPlan) -> str:
    """Describes in words the work that :func:`imbalances` compares."""
    what = "pictures" if description(objective.name).samples == "picture_chats" else "attention"
    return f"{what} of the busiest of {plan.data_parallel_size} processes over their mean"


def imbalances(samples: SampleSet, order: Order, plan: BatchPlan) -> tuple[float, float] | None:
    """Mean :func:`imbalance` of the first :data:`STEPS` steps in the run's order and by cost, or None."""
    if plan.data_parallel_size == 1 or not isinstance(samples, SampleCosts):
        return None
    size = plan.global_batch_size
    steps = [samples.costs(order.indices(step * size, size)) for step in range(STEPS)]
    by_cost = [imbalance(costs[deal(costs, plan)], plan) for costs in steps]
    return float(np.mean([imbalance(costs, plan) for costs in steps])), float(np.mean(by_cost))


def _to_cheapest(costs: Ints, parts: int) -> Ints:
    """Assigns items to parts of equal number, the costliest of a part first; shape ``(parts, items of each)``."""
    room = len(costs) // parts
    items_of: list[list[int]] = [[] for _ in range(parts)]
    with_room = [(0, part) for part in range(parts)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, part = heapq.heappop(with_room)
        items_of[part].append(item)
        if len(items_of[part]) < room:
            heapq.heappush(with_room, (total + int(costs[item]), part))
    return np.array(items_of, np.int64)
