"""Expert parallelism: every rank keeps some of a layer's experts, and tokens travel to theirs by all-to-all.

For families of transformers whose ``ep_plan`` names a module that holds all experts of a layer as packed parameters,
(experts, ..., ...). The local experts are computed by the module's own forward pass, so a family's gate, biases and
clamps stay its own; the token's rank applies the routing weights and sums its ``top_k`` results in the order of
one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.models.local_shards import Layout, add_layouts, layouts_of, unsharded_shape
from mgpu_pipe.parallel.expert.token_exchange import (
    Exchange,
    from_experts,
    gathered_slices,
    local_slice,
    slice_range,
    to_experts,
)
from mgpu_pipe.system.compat.torch_private import in_backward_pass


@dataclass(frozen=True)
class Load:
    """Load of the experts over the training steps since the last :meth:`ExpertLoad.take`.

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
    """Counts the assignments of each expert of ``model`` in training; recomputation does not count twice.

    Works whether or not the experts are cut, and before or after they are.

    Args:
        device: where the model computes.

    Raises:
        ValueError: the model has no experts that are known to :func:`experts_modules`.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None) -> None:
        modules, layouts = experts_modules(model), layouts_of(model)
        if not modules:
            raise ValueError(f"{type(model).__name__} has no experts that its own plan names")
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
        """The load over all ranks of ``group``; resets the counts. A collective call with a host sync.

        Args:
            group: all ranks of a pipeline stage; None is this process alone.
            copies: number of ranks that hold each token where it is routed: ``tp`` without sequence parallelism.
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
        """Assignments that this rank's experts computed, times ``copies``; ``routed`` where the experts are whole."""
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
    """A hook for a module of experts, whose inputs are hidden states, each token's experts, and their weights."""

    def count(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            (_compiled_count if torch.compiler.is_compiling() else _count)(counts, inputs[1])

    return count


DISPATCHED = "ep_dispatch_experts"
"""transformers' name, in an ``ep_plan``, of a module of packed experts whose tokens are dispatched."""

COMPUTED = "mgpu_computed_rows"
"""The attribute of a cut experts module that counts what it computed."""


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of packed experts of ``model`` by their names, in the order of the layers; none if it is dense."""
    plan = getattr(model, "ep_plan", None)
    named = [name for name, style in plan.items() if style == DISPATCHED] if isinstance(plan, Mapping) else []
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in named]
    return {name: m for name, m in model.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)}


def apply_expert_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> dict[str, nn.Module]:
    """Cut the experts of every layer of ``model`` over ``group`` in place, and return the experts modules by name.

    Rank ``r`` of ``n`` keeps experts ``[r*E/n, (r+1)*E/n)``; each cut parameter gets its :class:`Layout`. The model may
    be on the meta device. A parameter's gradient is the sum over the tokens of the whole group. So it must be summed
    over the ranks with the same experts only (see ``topology.Meshes``).

    Args:
        group: the expert-parallel ranks. Each sends its own tokens, or its slice of those that its tensor-parallel
            group holds alike.
        tp_group: the tensor-parallel ranks, where there are several; all of them are in ``group``.
        sequence_parallel: the tensor-parallel ranks hold different tokens where the experts are. Then nothing is
            sliced, and a router's gradient is to be summed over ``tp_group``; otherwise every rank has all of it.

    Raises:
        ValueError: the model has no packed experts, or their number is no multiple of the group's size.
    """
    modules = experts_modules(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no experts that its own plan names")
    sliced = tp_group if tp_group is not None and tp_group.size() > 1 and not sequence_parallel else None
    layouts: dict[str, Layout] = {}
    for name, module in modules.items():
        layouts.update(_cut_experts(name, module, group))
        module.forward = _dispatching(module, group, sliced)
    add_layouts(model, layouts)
    return modules


def _cut_experts(name: str, module: nn.Module, group: dist.ProcessGroup) -> dict[str, Layout]:
    """Replace the module's parameters by this rank's experts."""
    num_experts, size = number_of_experts(module), group.size()
    if num_experts % size:
        raise ValueError(f"{name} has {num_experts} experts, which {size} ranks do not divide")
    each = num_experts // size
    start, stop = group.rank() * each, (group.rank() + 1) * each
    layouts = {}
    for attribute, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if parameter.shape[:1] != (num_experts,):
            raise ValueError(f"{name}.{attribute} of shape {tuple(parameter.shape)} is not packed by expert")
        local = nn.Parameter(parameter.detach()[start:stop].clone(), requires_grad=parameter.requires_grad)
        setattr(module, attribute, local)
        full_name = f"{name}.{attribute}"
        layouts[full_name] = Layout(full_name, tuple(parameter.shape), 0, ((start, stop),))
    if len(layouts) != len(list(module.parameters())):
        raise ValueError(f"{name} has parameters in its own modules, which its experts share")
    module.num_experts = each  # type: ignore[assignment]
    return layouts


def number_of_experts(module: nn.Module) -> int:
    """Number of experts that an uncut module packs."""
    return int(next(module.parameters()).shape[0])


def is_first_forward() -> bool:
    """Whether this is a training forward pass, and not its recomputation within a backward pass."""
    return torch.is_grad_enabled() and not in_backward_pass()


def computed_rows(module: nn.Module) -> int | None:
    """The assignments that a cut experts module computed in training so far; None where its experts are whole."""
    return module.__dict__.get(COMPUTED)


def _dispatching(
    module: nn.Module, group: dist.ProcessGroup, sliced: dist.ProcessGroup | None
) -> Callable[..., torch.Tensor]:
    """The forward pass of a module whose experts were cut; calls the module's own for the local experts."""
    local_forward = module.forward
    num_experts = number_of_experts(module) * group.size()
    module.__dict__[COMPUTED] = 0

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Shapes (tokens, width), (tokens, top_k), (tokens, top_k); returns (tokens, width)."""
        rows = hidden_states.shape[0]
        if sliced is not None:
            start, stop = slice_range(rows, sliced)
            hidden_states, top_k_index = local_slice(hidden_states, sliced), top_k_index[start:stop]
            top_k_weights = local_slice(top_k_weights, sliced)
        exchange = Exchange.from_assignments(top_k_index, num_experts, group)
        if is_first_forward():
            module.__dict__[COMPUTED] += sum(exchange.received)
        outputs = _run_local(local_forward, to_experts(hidden_states, exchange), exchange.experts)
        assignments = from_experts(outputs, exchange).view(*top_k_index.shape, hidden_states.shape[1])
        combined = (assignments * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)
        return gathered_slices(combined, rows, sliced) if sliced is not None else combined

    # Splits are known only at run time, so there is nothing to trace.
    return torch.compiler.disable(forward)


def _run_local(forward: Callable[..., Any], rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Run each row, (rows, width), through its expert, unweighted."""
    if rows.shape[0] == 0:
        # One row that counts nothing: without it the backward pass ends here, and the other ranks wait.
        rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
        return _run_local(forward, rows, experts)[:0]
    outputs: torch.Tensor = forward(rows, experts.unsqueeze(1), rows.new_ones(rows.shape[0], 1))
    return outputs
