"""How evenly a step's tokens were spread over the experts, counted on the device and read when it is logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.compat.torch_private import in_backward_pass
from mgpu_pipe.models.layout import layouts_of, unsharded_shape
from mgpu_pipe.parallel.expert import computed_rows, experts_modules


@dataclass(frozen=True)
class Load:
    """Of the training steps since the last one was taken.

    Attributes:
        assignments: by layer, the assignments (a token counts once for each of its ``top_k`` experts) routed to each
            expert.
        dropped: assignments that no expert computed. There is no capacity limit, so it is 0.
    """

    assignments: list[list[int]]
    dropped: int

    @property
    def max_over_mean(self) -> float:
        """The busiest expert's assignments over the mean of its layer, in the least even layer; 1 is even, 0 is no
        token.
        """
        return max((max(layer) * len(layer) / max(1, sum(layer)) for layer in self.assignments), default=0.0)

    @property
    def by_expert(self) -> list[int]:
        """The assignments of each expert, over the layers."""
        number = max(map(len, self.assignments), default=0)
        return [sum(layer[expert] for layer in self.assignments if expert < len(layer)) for expert in range(number)]


class ExpertLoad:
    """Counts what the routers of ``model`` send to each expert in training, recomputation not twice.

    Works whether or not the experts are cut, and before or after they are.

    Args:
        device: where the model computes.

    Raises:
        ValueError: the model has no experts that are known to :func:`experts_modules`.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        modules, layouts = experts_modules(model), layouts_of(model)
        if not modules:
            raise ValueError(f"{type(model).__name__} has no experts that a plan of its own names")
        self._modules, self._counts = list(modules.values()), list[torch.Tensor]()
        self._computed = [computed_rows(module) or 0 for module in self._modules]
        for name, module in modules.items():
            attribute, parameter = next(module.named_parameters())
            experts = unsharded_shape(parameter, layouts.get(f"{name}.{attribute}"))[0]
            self._counts.append(torch.zeros(experts, dtype=torch.int64, device=device or torch.device("cpu")))
            module.register_forward_pre_hook(_counting(self._counts[-1]))

    @staticmethod
    def experts_of(model: nn.Module) -> int:
        """The number of experts of the layer of ``model`` that has most, whole or cut; 0 for a dense model."""
        layouts = layouts_of(model)
        parameters = [(name, *next(module.named_parameters())) for name, module in experts_modules(model).items()]
        sizes = [unsharded_shape(parameter, layouts.get(f"{name}.{inner}"))[0] for name, inner, parameter in parameters]
        return max(sizes, default=0)

    def take(self, group: dist.ProcessGroup | None = None, copies: int = 1) -> Load:
        """The load over all ranks of ``group``; counting starts again. A collective call; waits for the device.

        Args:
            group: all ranks of a pipeline stage; None is this process alone.
            copies: how many of them hold each token where it is routed: ``tp`` without sequence parallelism.
        """
        routed = torch.cat(self._counts).sum()
        packed = torch.cat([*self._counts, self._newly_computed(routed, copies).reshape(1)])
        if group is not None and group.size() > 1:
            dist.all_reduce(packed, group=group)
        *layers, last = (part.tolist() for part in packed.split([*map(len, self._counts), 1]))
        for counts in self._counts:
            counts.zero_()
        assignments = [[count // copies for count in layer] for layer in layers]
        return Load(assignments, sum(map(sum, assignments)) - last[0] // copies)

    def _newly_computed(self, routed: torch.Tensor, copies: int) -> torch.Tensor:
        """Slots that this rank's experts computed, times ``copies``; of experts that are whole all that were routed."""
        totals = [computed_rows(module) for module in self._modules]
        if any(total is None for total in totals):
            return routed
        new = sum(total - before for total, before in zip(totals, self._computed, strict=True) if total is not None)
        self._computed = [total or 0 for total in totals]
        return torch.full_like(routed, new * copies)


def _count(counts: torch.Tensor, chosen: torch.Tensor) -> None:
    """Add the assignments to each expert that a forward pass routes; its recomputation adds nothing."""
    if not in_backward_pass():
        chosen = chosen.reshape(-1)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))


@torch.library.custom_op("mgpu_pipe::count_assignments", mutates_args={"counts"})
def _compiled_count(counts: torch.Tensor, chosen: torch.Tensor) -> None:
    _count(counts, chosen)


def _counting(counts: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    """The hook of a module of experts, which is given hidden states, each token's experts, and their weights."""

    def count(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            (_compiled_count if torch.compiler.is_compiling() else _count)(counts, inputs[1])

    return count
