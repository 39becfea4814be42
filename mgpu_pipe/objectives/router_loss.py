"""The balance loss of a mixture of experts, additive: taken per sequence, averaged over the global batch.

For one router and one sequence of the batch (a row of the micro-batch, packed or not) let T be its tokens that have a
label, f[e] the assignments of those tokens that were routed to expert e over T, and P[e] the mean over those tokens of
the router's softmax probability of e. The loss is E * sum_e f[e] * P[e] over the E experts; even routing gives
``top_k``, as transformers scales it, so a coefficient means what ``router_aux_loss_coef`` means there (Fedus et al.
2021, "Switch Transformers", arXiv:2101.03961, equations 4 to 6; Lepikhin et al. 2020, "GShard", arXiv:2006.16668,
section 2.2). Tokens without a label (padding, masked prompts, a document's last token) count in neither, and a sequence
that has no other token adds nothing. It is averaged over the model's routers and over all sequences of the step.

A product of means over a batch would depend on how the batch is cut; per sequence it does not. The model's own loss
(``output_router_logits``) is of that kind. It is never taken: a model gets no labels here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.compat.torch_private import in_backward_pass
from mgpu_pipe.compat.transformers_private import recorded_outputs
from mgpu_pipe.data.step_batch import IGNORE_INDEX


def router_modules(model: nn.Module) -> list[nn.Module]:
    """The routers of ``model`` in the order of its layers, as transformers tells where router logits come from."""
    record = recorded_outputs(model).get("router_logits")
    records = record if isinstance(record, list) else [record]
    kinds = tuple(kind for one in records if isinstance(kind := getattr(one, "target_class", one), type))
    return [module for module in model.modules() if kinds and isinstance(module, kinds)]


@dataclass
class _Routed:
    """What one router did with the tokens of a micro-batch: (tokens, experts) and (tokens, top_k)."""

    logits: torch.Tensor
    chosen: torch.Tensor


class RouterLoss:
    """Collects what the routers of a model do and gives the balance loss of each micro-batch.

    Made from the whole model, before any of its layers is cut away. Every router must return its logits first, then
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
        """Say which ranks hold other tokens of the same sequences.

        Args:
            groups: those whose ranks' labels are cut as the tokens are (context parallelism).
            sequence_group: the one whose ranks hold all labels, but route a range of each sequence's tokens (tensor
                parallelism with sequence parallelism); ranges are equal and in the order of the ranks.
        """
        several = [group for group in groups if group.size() > 1]
        self._sequence_group = sequence_group if sequence_group is not None and sequence_group.size() > 1 else None
        self._groups = (*several, *([self._sequence_group] if self._sequence_group is not None else []))

    def start_step(self, loss_denominator: int, num_samples: int) -> None:
        """Announce a step of ``num_samples`` sequences and ``loss_denominator`` tokens with a label, over all
        processes.
        """
        self._per_sequence = self.coefficient / num_samples
        self._seed = self._per_sequence * loss_denominator

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take note of what the routers do in a forward pass inside; end it by :meth:`sequence_sum`."""
        self._routed = {}
        try:
            yield
        finally:
            self._routed = None

    def sequence_sum(self, labels: torch.Tensor) -> torch.Tensor:
        """The sum over the sequences of the micro-batch of their losses, a float32 scalar; with its gradient.

        To be called inside :meth:`collecting`, after the forward pass. Over a pipeline's stages it is a sum too: each
        gives the part of its own routers. A collective call where :meth:`reduce_over` named groups; every rank of
        those gets the same value, and the gradient of its own tokens.

        Args:
            labels: shape (rows, seq_len), of the tokens that went through the forward pass.
        """
        routed = self._routed or {}
        valid = self._own_range(labels) != IGNORE_INDEX
        total = torch.zeros((), dtype=torch.float32, device=labels.device)
        if not routed:
            return total
        statistics = [_statistics(routed[number], valid) for number in sorted(routed)]
        summed = self._summed(torch.cat([part.flatten() for part in statistics]))
        for part in summed.split([part.numel() for part in statistics]):
            total = total + _balance_losses(part.view(valid.shape[0], -1)).sum()
        return total / self._num_routers

    def added(self, loss_sum: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``loss_sum`` with its value, and with the gradient of the balance loss besides.

        The strategy seeds the backward pass with ``scale / loss_denominator``; with the factor that is put in here the
        gradients are those of ``scale * (loss_sum / loss_denominator + coefficient * sequence_sum / num_samples)``.
        """
        if self._seed is None:
            raise RuntimeError("start_step comes before the first micro-batch")
        auxiliary = self._seed * self.sequence_sum(labels)
        return loss_sum + (auxiliary - auxiliary.detach()).to(loss_sum.dtype)

    def attached(self, output: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """``output``, whose backward pass also seeds the balance loss: for a pipeline's stage without a loss.

        Args:
            scale: the loss scale, which multiplies all gradients.
        """
        result: torch.Tensor = _Attached.apply(output, self.sequence_sum(labels), scale * self._per_sequence)
        return result

    def _watch(self, number: int):  # type: ignore[no-untyped-def]
        @torch.compiler.disable
        def watch(_: nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> None:
            # Inside a backward pass it is a recomputation, of what was collected already.
            if self._routed is not None and not in_backward_pass():
                self._routed[number] = _Routed(output[0], output[2])

        return watch

    def _own_range(self, labels: torch.Tensor) -> torch.Tensor:
        if self._sequence_group is None:
            return labels
        return labels.chunk(self._sequence_group.size(), dim=1)[self._sequence_group.rank()]

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        for group in self._groups:
            values = SummedOverRanks.apply(values, group)
        return values


def _statistics(routed: _Routed, valid: torch.Tensor) -> torch.Tensor:
    """Sums over each sequence's tokens, (rows, 2 * experts + 1): probabilities, routed assignments, and the tokens."""
    (rows, length), num_experts = valid.shape, routed.logits.shape[-1]
    logits = routed.logits.view(rows, length, num_experts)
    counts = valid.unsqueeze(-1).to(torch.float32)
    probabilities = (torch.softmax(logits, -1, dtype=torch.float32) * counts).sum(1)
    # Flat, for a scattered sum in two dims has no deterministic form on CUDA.
    at = routed.chosen.view(rows, -1) + num_experts * torch.arange(rows, device=logits.device).unsqueeze(1)
    assignments = torch.zeros(rows * num_experts, device=logits.device)
    assignments.scatter_add_(0, at.flatten(), counts.expand(rows, length, routed.chosen.shape[-1]).flatten())
    return torch.cat([probabilities, assignments.view(rows, -1), counts.sum(1)], dim=1)


def _balance_losses(statistics: torch.Tensor) -> torch.Tensor:
    """Each sequence's loss, (rows,), from :func:`_statistics` over all of its tokens."""
    num_experts = statistics.shape[1] // 2
    probabilities, assignments, tokens = statistics.split([num_experts, num_experts, 1], dim=1)
    tokens = tokens.clamp_min(1.0)
    return num_experts * (assignments / tokens * (probabilities / tokens)).sum(1)


def sum_router_statistics(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sums over the tokens of all ranks, in a new tensor."""
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values


class SummedOverRanks(torch.autograd.Function):
    """Every rank computes the same loss from the sums, and gives it the gradient of its own tokens alone."""

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
