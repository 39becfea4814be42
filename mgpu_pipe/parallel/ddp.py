"""Data parallelism with whole weights on every process: gradients summed by bucketed all-reduces.

Buckets are fixed by the order of the parameters alone and launched in that order, so a topology always reduces
the same way: a resumed run repeats the uninterrupted one bit for bit. (torch's DistributedDataParallel rebuilds its
buckets after the first iteration, which changes the last bits of the second.) Gradients live in the buckets, so
nothing is copied. A step batch of several micro-batches is reduced once, during the last backward pass. Buckets and
overlap are those of Li et al. 2020 ("PyTorch Distributed", arXiv:2006.15704).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

MIB = 1 << 20


class _Bucket:
    """Gradients of some parameters in one flat buffer."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter in parameters:
            self.views.append(self.flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        self.missing = len(parameters)
        self.work: Any = None


class GradientReducer:
    """Sums the gradients of ``parameters`` over ``group`` once a step batch.

    Use::

        reducer.start(last=...)   # before each backward pass; last=True in the step batch's last
        loss.backward()
        used = reducer.finish()   # after the last: waits, returns which parameters got a gradient here

    Gradients are *summed*: the loss is already divided by the global number of valid tokens.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_mib: float):
        # Backward produces the last layers' gradients first.
        self._parameters = [p for p in parameters if p.requires_grad][::-1]
        self._buckets = [_Bucket(chunk) for chunk in _cut(self._parameters, int(bucket_mib * MIB))]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._used = [False] * len(self._parameters)
        self._last = False
        self._next = 0
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
        self.zero()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The reduced parameters, in the order of :meth:`finish`'s result."""
        return self._parameters

    def zero(self) -> None:
        """Clear all gradients and point every parameter at its place in the buckets."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._used = [False] * len(self._parameters)

    def start(self, last: bool) -> None:
        """Announce a backward pass; ``last`` is the step batch's last one, in which buckets are reduced."""
        self._last = last
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None

    def finish(self) -> list[bool]:
        """Launch what is left, wait for all buckets; which parameters got a gradient on this process."""
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            bucket.work.wait()
        return self._used

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._used[self._index[id(parameter)]] = True
        if not self._last:
            return
        self._bucket_of[id(parameter)].missing -= 1
        # In order, or ranks whose hooks fire in different orders would pair different buckets.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        self._next += 1


def _cut(parameters: list[torch.nn.Parameter], limit_bytes: int) -> list[list[torch.nn.Parameter]]:
    """Consecutive runs of one dtype and device, each of at most ``limit_bytes`` (or one parameter)."""
    runs: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        fits = runs and size + num_bytes <= limit_bytes
        if fits and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device):
            runs[-1].append(parameter)
            size += num_bytes
        else:
            runs.append([parameter])
            size = num_bytes
    return runs
