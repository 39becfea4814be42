"""Additive balance loss of a mixture of experts, per sequence, averaged over the global batch.

Take one router and one sequence of the batch (a row of the micro-batch, packed or not), and its tokens with a label.
f[e] is the share of these tokens that the router sends to expert e. P[e] is the mean over them of its softmax
probability of e. The loss is E * sum_e f[e] * P[e] over the E experts (Fedus et al. 2021, "Switch Transformers",
arXiv:2101.03961, equations 4 to 6; Lepikhin et al. 2020, "GShard", arXiv:2006.16668, section 2.2). Even routing gives
``top_k``, as transformers scales it, so a coefficient means what ``router_aux_loss_coef`` means there. Tokens without a
label (padding, masked prompts, a document's last token) count in neither. A sequence without other tokens adds nothing.
It is averaged over the model's routers and over all sequences of the step.

A product of means over a batch would depend on how the batch is cut; per sequence it does not. The model's own loss
(``output_router_logits``) depends on the cut and is never used: a model gets no labels here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.system.compat.torch_private import in_backward_pass
from mgpu_pipe.system.compat.transformers_private import recorded_outputs


def router_modules(model: nn.Module) -> list[nn.Module]:
    """Routers of ``model`` in layer order: the modules whose router logits transformers records."""
    record = recorded_outputs(model).get("router_logits")
    records = record if isinstance(record, list) else [record]
    kinds = tuple(kind for entry in records if isinstance(kind := getattr(entry, "target_class", entry), type))
    return [module for module in model.modules() if kinds and isinstance(module, kinds)]


@dataclass
class _Routed:
    """Routing of a micro-batch by one router: logits, (tokens, experts), and chosen experts, (tokens, top_k)."""

    logits: torch.Tensor
    chosen: torch.Tensor


class RouterLoss:
    """Records the routing of a model and computes the balance loss of each micro-batch.

    Build it from the whole model, before a pipeline removes layers. Every router must return its logits first, then
    its weights, then the chosen experts.

    Args:
        coefficient: ``objective.router_aux_loss``.

    Raises:
        ValueError: the model has no routers.
    """

    def __init__(self, model: nn.Module, coefficient: float) -> None:
        routers = router_modules(model)
        if not routers:
            raise ValueError(f"{type(model).__name__} has no routers")
        self.coefficient = coefficient
        self._num_routers = len(routers)
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        self._sequence_group: dist.ProcessGroup | None = None
        self._routed: dict[int, _Routed] | None = None
        self._seed: float | None = None
        self._per_sequence = 0.0
        for number, router in enumerate(routers):
            router.register_forward_hook(self._watch(number))

    def reduce_over(self, groups: Sequence[dist.ProcessGroup], sequence_group: dist.ProcessGroup | None = None) -> None:
        """Sets the groups of ranks that hold other tokens of the same sequences.

        Args:
            groups: groups whose ranks cut labels and tokens alike (context parallelism).
            sequence_group: group whose ranks hold all labels, but route a range of each sequence's tokens (tensor
                parallelism with sequence parallelism). Ranges are equal and in rank order.
        """
        several = [group for group in groups if group.size() > 1]
        self._sequence_group = sequence_group if sequence_group is not None and sequence_group.size() > 1 else None
        self._groups = (*several, *([self._sequence_group] if self._sequence_group is not None else []))

    def start_step(self, loss_denominator: int, num_samples: int) -> None:
        """Announces a step of ``num_samples`` sequences and ``loss_denominator`` labelled tokens over all processes."""
        self._per_sequence = self.coefficient / num_samples
        self._seed = self._per_sequence * loss_denominator

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context that records the routing of one forward pass; call :meth:`sequence_sum` inside."""
        self._routed = {}
        try:
            yield
        finally:
            self._routed = None

    def sequence_sum(self, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of the micro-batch's sequences, a float32 scalar with a gradient.

        Call it inside :meth:`collecting`, after the forward pass. Each pipeline stage returns the part of its routers;
        the parts add up. With groups from :meth:`reduce_over` it is a collective call: every rank gets the same value,
        and the gradient of its own tokens.

        Args:
            labels: labels of the tokens of the forward pass, (rows, seq_len).
        """
        routed = self._routed or {}
        valid = self._own_range(labels) != IGNORE_INDEX
        total = torch.zeros((), dtype=torch.float32, device=labels.device)
        if not routed:
            return total
        statistics = [_statistics(routed[number], valid) for number in sorted(routed)]
        summed = self._sum(torch.cat([part.flatten() for part in statistics]))
        for part in summed.split([part.numel() for part in statistics]):
            total = total + _balance_losses(part.view(valid.shape[0], -1)).sum()
        return total / self._num_routers

    def add_to(self, loss_sum: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``loss_sum`` with an added gradient of the balance loss and an unchanged value.

        The strategy seeds the backward pass with ``scale / loss_denominator``. The factor applied here makes the
        gradients those of ``scale * (loss_sum / loss_denominator + coefficient * sequence_sum / num_samples)``.
        """
        if self._seed is None:
            raise RuntimeError("start_step comes before the first micro-batch")
        auxiliary = self._seed * self.sequence_sum(labels)
        return loss_sum + (auxiliary - auxiliary.detach()).to(loss_sum.dtype)

    def attach_to(self, output: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """``output`` whose backward pass also seeds the balance loss times the loss ``scale``, for a stage without a
        loss."""
        result: torch.Tensor = _Attached.apply(output, self.sequence_sum(labels), scale * self._per_sequence)
        return result

    def _watch(self, number: int):  # type: ignore[no-untyped-def]
        @torch.compiler.disable
        def watch(_: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
            # A call inside a backward pass recomputes what is already recorded.
            if self._routed is not None and not in_backward_pass():
                self._routed[number] = _Routed(output[0], output[2])

        return watch

    def _own_range(self, labels: torch.Tensor) -> torch.Tensor:
        if self._sequence_group is None:
            return labels
        return labels.chunk(self._sequence_group.size(), dim=1)[self._sequence_group.rank()]

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        for group in self._groups:
            values = SummedOverRanks.apply(values, group)
        return values


def _statistics(routed: _Routed, valid: torch.Tensor) -> torch.Tensor:
    """Sums over each sequence's tokens, (rows, 2 * experts + 1): probabilities, assignments, number of tokens."""
    (rows, length), num_experts = valid.shape, routed.logits.shape[-1]
    logits = routed.logits.view(rows, length, num_experts)
    counts = valid.unsqueeze(-1).to(torch.float32)
    probabilities = (torch.softmax(logits, -1, dtype=torch.float32) * counts).sum(1)
    # Flat, because scatter_add in two dims is not deterministic on CUDA.
    indices = routed.chosen.view(rows, -1) + num_experts * torch.arange(rows, device=logits.device).unsqueeze(1)
    assignments = torch.zeros(rows * num_experts, device=logits.device)
    assignments.scatter_add_(0, indices.flatten(), counts.expand(rows, length, routed.chosen.shape[-1]).flatten())
    return torch.cat([probabilities, assignments.view(rows, -1), counts.sum(1)], dim=1)


def _balance_losses(statistics: torch.Tensor) -> torch.Tensor:
    """Loss of each sequence, (rows,), from :func:`_statistics` over all its tokens."""
    num_experts = statistics.shape[1] // 2
    probabilities, assignments, tokens = statistics.split([num_experts, num_experts, 1], dim=1)
    tokens = tokens.clamp_min(1.0)
    return num_experts * (assignments / tokens * (probabilities / tokens)).sum(1)


def sum_router_statistics(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums over the tokens of all ranks, in a new tensor."""
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values


class SummedOverRanks(torch.autograd.Function):
    """All-reduce whose backward pass leaves each rank the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return sum_router_statistics(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, auxiliary: torch.Tensor, seed: float) -> torch.Tensor:
        ctx.seed, ctx.dtype = seed, auxiliary.dtype
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, torch.full((), ctx.seed, dtype=ctx.dtype, device=gradient.device), None
