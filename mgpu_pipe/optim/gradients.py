"""Global gradient norm and clipping over all meshes, spike guard and loss scale, for every engine.

Squares are summed and reduced in float64: float32 ``vector_norm`` is off by 1e-5 to 2e-4, differently for each
shard, so the clip factor would depend on the strategy.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from mgpu_pipe.config.group_keys import SpikeGuardConfig
from mgpu_pipe.system.compat.torch_private import foreach_multiply, foreach_norm

# torch.nn.utils.clip_grad_norm_ uses the same guard against a zero norm.
CLIP_EPSILON = 1e-6


def squared_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Sum of squares of plain ``tensors`` of one device, a float64 scalar."""
    return torch.stack(foreach_norm(tensors)).square_().sum()


def gradient_norm(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> torch.Tensor:
    """2-norm of all gradients of the whole model, a float64 scalar on ``device``, equal on every rank.

    A ``DTensor`` gradient counts once per element of the unsharded tensor: squares are summed over the mesh axes on
    which it is sharded, not over replicated ones. A plain gradient must be whole and equal on all ranks. A collective
    call if any gradient is sharded.
    """
    plain: list[torch.Tensor] = []
    sharded: dict[tuple[Any, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            axes = tuple(i for i, placement in enumerate(gradient.placements) if isinstance(placement, Shard))
            sharded.setdefault((gradient.device_mesh, axes), []).append(gradient.to_local())
        else:
            plain.append(gradient)
    total = squared_norm(plain).to(device) if plain else torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, axes), tensors in sharded.items():
        partial = squared_norm(tensors).to(device)
        for axis in axes:
            if mesh.size(axis) > 1:
                dist.all_reduce(partial, group=mesh.get_group(axis))
        total = total + partial
    return total.sqrt()


def counted_norm(
    parameters: Sequence[torch.nn.Parameter], is_owned: Sequence[bool], device: torch.device
) -> torch.Tensor:
    """:func:`gradient_norm` of a model that is cut over several meshes. A collective call of all ranks.

    Args:
        is_owned: for each parameter, whether this rank contributes its part of the gradient. Every element of the
            unsharded model must be owned by one rank.
    """
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for p, owned in zip(parameters, is_owned, strict=True)
        if owned and p.grad is not None
    ]
    total = squared_norm(local).to(device) if local else torch.zeros((), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales all gradients in place so that the global ``norm`` becomes at most ``max_norm``."""
    factor = max_norm / (norm + CLIP_EPSILON)
    if factor < 1.0:
        scale_gradients(parameters, factor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiplies all gradients by ``factor``, in place."""
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if local:
        foreach_multiply(local, factor)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spike:
    """One-based step with a refused update."""

    step: int
    norm: float
    median: float

    def __str__(self) -> str:
        times = f"{self.norm / self.median:.3g} times" if self.median else "above"
        return f"the gradient norm of step {self.step} is {self.norm:.4g}, {times} the median of the steps before it"


class SpikeGuard:
    """Refuses updates with a spike of the gradient norm.

    Args:
        warns: whether this process warns of skipped steps.
    """

    def __init__(self, keys: SpikeGuardConfig | None = None, warns: bool = False) -> None:
        self._keys, self._warns = keys or SpikeGuardConfig(), warns
        self._norms: deque[float] = deque(maxlen=self._keys.window)
        self.stopped_by: Spike | None = None
        """Spike that ends the run, or None."""

    def refuses(self, step: int, norm: float) -> bool:
        """Whether to skip the update of the zero-based step; called once per step on every rank."""
        if self._keys.factor is None:
            return False
        full = len(self._norms) == self._keys.window
        median = statistics.median(self._norms) if full else 0.0
        spike = Spike(step + 1, norm, median) if full and norm > self._keys.factor * median else None
        if spike is not None and self._keys.action == "stop":
            self.stopped_by = spike  # a resume runs this step again
            return True
        self._norms.append(norm)
        if spike is not None and self._warns:
            _log.warning("%s: its update is skipped (optimizer.spike_guard)", spike)
        return spike is not None

    def state(self) -> dict[str, list[float]]:
        """State for a checkpoint; equal on every rank."""
        return {"gradient_norms": list(self._norms)} if self._norms else {}

    def restore(self, norms: Sequence[float]) -> None:
        self._norms.extend(float(norm) for norm in norms)


GROWTH, BACKOFF = 2.0, 0.5
SMALLEST = 2.0**-10
"""Smallest loss scale. Below it no gradient could leave fp16's range, so the fault is elsewhere."""


@dataclass
class LossScale:
    """Factor of the loss, and the number of successful updates with it."""

    value: float = 2.0**16
    updates: int = 0
    interval: int = 2000

    def update(self, finite: bool) -> None:
        """Adapts the scale to the outcome of a step; OverflowError if gradients are not finite at any."""
        if not finite:
            self.value, self.updates = self.value * BACKOFF, 0
            if self.value < SMALLEST:
                raise OverflowError("gradients are not finite at the smallest loss scale")
            return
        self.updates += 1
        if self.updates == self.interval:
            self.value, self.updates = self.value * GROWTH, 0

    def state(self) -> dict[str, float]:
        """State for a checkpoint's ``state.json``."""
        return {"value": self.value, "updates": self.updates}

    def restore(self, state: Mapping[str, float]) -> None:
        self.value, self.updates = float(state["value"]), int(state["updates"])
