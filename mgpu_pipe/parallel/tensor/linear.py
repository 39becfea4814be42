"""Linear layers; each rank holds some of their columns (outputs) or rows (inputs).

The column-parallel layers of one module, such as query, key and value, share what enters them: one collective for all
of them. Under sequence parallelism a rank keeps its part of that input and gathers the rest again in the backward pass.
So activations shrink with the group (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.architectures.family import Style
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.adapters.low_rank import A, B, LoraExperts, LoraLayer
from mgpu_pipe.models.adapters.qlora import Nf4Experts, Nf4Layer, is_scales
from mgpu_pipe.parallel.compile import float8_product, is_float8
from mgpu_pipe.parallel.random_streams import RankStreams
from mgpu_pipe.parallel.tensor.collectives import (
    all_gather_sequence,
    divide_backward,
    gather_again,
    gather_sequence,
    split_sequence,
    sum_backward,
    sum_forward,
)
from mgpu_pipe.parallel.tensor.cut import TensorCut
from mgpu_pipe.parallel.tensor.sequence import SequenceSplit, hidden_of, with_hidden

TRANSPOSED = ("Llama4TextExperts",)
"""Classes of experts with matrices (experts, inputs, outputs) that transformers does not mark as transposed."""


class GatheredInput:
    """The gathered input of one call of a region, and its second gathering in the backward pass."""

    def __init__(self, whole: torch.Tensor, split: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.whole: torch.Tensor | None = whole
        self.split: torch.Tensor | None = split
        self.users = 0
        """Layers that need the whole input for their weight's gradient."""
        self._group = group
        self._again: torch.Tensor | None = None
        self._served = 0

    def close(self) -> None:
        """Drop the tensors after the region's forward pass; autograd keeps those that backward needs."""
        self.whole = self.split = None

    def gather_again(self, split: torch.Tensor) -> torch.Tensor:
        """The whole input, gathered for the first user and released after the last."""
        gathered = self._again if self._again is not None else all_gather_sequence(split, self._group)
        self._served += 1
        self._again = gathered if self._served % self.users else None
        return gathered


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        split: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        shared: GatheredInput,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(split, weight)
        ctx.transposed, ctx.shared, ctx.group = transposed, shared, group
        return F.linear(whole, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        split, weight = ctx.saved_tensors
        want_whole, _, want_weight, want_bias = ctx.needs_input_grad[:4]
        rows = grad.flatten(0, -2)
        grad_weight = None
        if want_weight:
            compiled = torch.compiler.is_compiling()
            whole = gather_again(split, ctx.group) if compiled else ctx.shared.gather_again(split)
            gathered = whole.flatten(0, -2)
            grad_weight = gathered.t() @ rows if ctx.transposed else rows.t() @ gathered
        grad_whole = (grad @ (weight.t() if ctx.transposed else weight)) if want_whole else None
        return grad_whole, None, grad_weight, rows.sum(0) if want_bias else None, None, None, None


class ColumnRegion:
    """A module whose hidden states go into column-parallel layers alone, and come out of row-parallel ones.

    Args:
        group: the tensor-parallel ranks.
        sequence: the split of the sequence outside of the region; None without sequence parallelism.
    """

    def __init__(self, group: dist.ProcessGroup, sequence: SequenceSplit | None) -> None:
        self._group, self._sequence = group, sequence
        self._shared: GatheredInput | None = None

    def wrap(self, module: nn.Module) -> None:
        """Make hidden states enter the region where ``module`` is called."""
        plain_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_of(args, kwargs)
            if self._sequence is None or not self._sequence.active:
                args, kwargs = with_hidden(args, kwargs, sum_backward(hidden, self._group))
                return plain_forward(*args, **kwargs)
            gathered = gather_sequence(hidden, self._group, partial_gradient=True)
            args, kwargs = with_hidden(args, kwargs, gathered)
            self._shared = GatheredInput(gathered, hidden, self._group)
            try:
                return plain_forward(*args, **kwargs)
            finally:
                self._shared.close()
                self._shared = None

        module.forward = forward

    def column(self, layer: nn.Module) -> None:
        """Make ``layer``, a child of the region whose weight is cut already, use the region's input."""
        if type(layer) not in (nn.Linear, Conv1D):
            return  # a layer of another kind, such as a float8 one, keeps its input whole
        plain_forward, transposed, name = layer.forward, isinstance(layer, Conv1D), self._group.group_name

        def forward(x: torch.Tensor) -> torch.Tensor:
            shared = self._shared
            if shared is None or x is not shared.whole:
                result: torch.Tensor = plain_forward(x)
                return result
            # Counted here: compiled code cannot change state inside an autograd function.
            shared.users += torch.is_grad_enabled() and bool(layer.weight.requires_grad)
            gathered: torch.Tensor = _GatheredLinear.apply(
                x, shared.split, layer.weight, layer.bias, transposed, shared, name
            )
            return gathered

        layer.forward = forward


def column_parallel_alone(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the input gradient of a column-parallel layer whose module is no :class:`ColumnRegion`."""
    layer.register_forward_pre_hook(lambda _, args: (sum_backward(args[0], group), *args[1:]))


def row_parallel(layer: nn.Module, group: dist.ProcessGroup, sequence: SequenceSplit | None) -> None:
    """Sum the ranks' partial products, split along the sequence where it is split; then add the bias once."""
    transposed = isinstance(layer, Conv1D)

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, torch.Tensor) and not isinstance(bias, nn.Module)
        if isinstance(layer, LoraLayer | Nf4Layer):  # an adapter's product is a part of the same sum
            partial = layer.product(x)
        elif is_float8(layer):
            partial = float8_product(layer, x)
        else:
            partial = F.linear(x, weight.t() if transposed else weight)
        split = sequence is not None and sequence.active
        total = split_sequence(partial, group, partial=True) if split else sum_forward(partial, group)
        return total if bias is None else total + bias

    layer.forward = forward


def _with_share(module: nn.Module, names: Sequence[str], size: int) -> Callable[..., torch.Tensor]:
    """The forward pass of ``module`` with its parameters called ``names`` divided by ``size``."""
    plain_forward = module.forward

    def forward(*args: Any) -> torch.Tensor:
        parameters = {name: module._parameters.pop(name) for name in names}
        for name, parameter in parameters.items():
            assert parameter is not None
            module.__dict__[name] = parameter / size
        try:
            return plain_forward(*args)
        finally:
            for name, parameter in parameters.items():
                del module.__dict__[name]
                module._parameters[name] = parameter

    return forward


def experts_parallel(
    block: nn.Module,
    router: nn.Module | None,
    experts: nn.Module,
    group: dist.ProcessGroup,
    sequence: SequenceSplit | None,
    shared: Sequence[str] = (),
) -> None:
    """Wrap a mixture whose experts are cut along their width; every rank routes all tokens alike.

    The router's gradients are whole on every rank, also under sequence parallelism.

    Args:
        block: called with hidden states, gives the experts' result in the same shape.
        router: None where there is no sequence to split.
        experts: called with hidden states, chosen experts and their weights.
        shared: parameters of ``experts`` that every rank holds and adds; each takes its share of them.
    """
    plain_block = block.forward
    plain_experts = _with_share(experts, shared, group.size()) if shared else experts.forward

    def is_split() -> bool:
        return sequence is not None and sequence.active

    def experts_forward(hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        if routing:
            chosen, weights = routing
            routing = chosen, sum_backward(weights, group)
        if is_split():  # summed with the whole block's result and input
            return plain_experts(hidden, *routing)
        return sum_forward(plain_experts(sum_backward(hidden, group), *routing), group)

    def block_forward(hidden_states: torch.Tensor) -> torch.Tensor:
        if not is_split():
            return plain_block(hidden_states)
        return split_sequence(plain_block(gather_sequence(hidden_states, group, True)), group, partial=True)

    def count_once(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (divide_backward(args[0], group.size()), *args[1:]) if is_split() else None

    experts.forward = experts_forward
    if sequence is not None:
        assert router is not None
        block.forward = block_forward
        router.register_forward_pre_hook(count_once)


def cut_experts(cut: TensorCut, sequence: SequenceSplit | None, streams: RankStreams | None, alone: bool) -> None:
    """Cut every module of experts, or leave all of them alone."""
    for name in [name for name, style in cut.plan.items() if style == "experts"]:
        experts = cut.modules[name]
        if alone:
            cut.left_alone |= {cut.parameters.name(p) for p in experts.parameters()}
            continue
        styles = _cut_expert_weights(cut, name, experts)
        block = cut.modules[name.rpartition(".")[0]]
        shared = [attribute for attribute, style in styles.items() if style == "once"]
        experts_parallel(block, getattr(block, "gate", None), experts, cut.group, sequence, shared)
        if streams is not None:
            # Tokens are whole in the block, where its router draws, and every expert's width is cut.
            block.forward = streams.within(False, block.forward)
            experts.forward = streams.within(True, experts.forward)


def _cut_expert_weights(cut: TensorCut, name: str, experts: nn.Module) -> dict[str, Style | None]:
    """Cut the matrices and adapters of the experts ``name``; returns the plan's style of each parameter."""
    named = experts.named_parameters(recurse=False)
    parameters = {n: p for n, p in named if not is_adapter(n) and not is_scales(n)}
    blocks = experts.blocks if isinstance(experts, Nf4Experts) else {}
    adapted = experts.adapter_names() if isinstance(experts, LoraExperts) else {}
    styles = {attribute: cut.plan.get(f"{name}.{attribute}") for attribute in parameters}
    transposed = bool(getattr(experts, "is_transposed", type(experts).__name__ in TRANSPOSED))
    if getattr(experts, "has_bias", False) and None in styles.values():
        reason = f"the experts of {name} have biases, which the plan does not list"
        raise cut.refusal("use strategy.ep instead", reason)
    inputs = {
        key: blocks[key].inputs if key in blocks else int(parameter.shape[-2 if transposed else -1])
        for key, parameter in parameters.items()
    }
    width = min((inputs[attribute] for attribute, style in styles.items() if style == "row"), default=0)
    for attribute, parameter in parameters.items():
        style, packed = styles[attribute], attribute in blocks
        adapter = adapted.get(attribute, {})
        if style == "row":
            dim = parameter.dim() - (2 if transposed and not packed else 1)
            ranges = cut.ranges(name, inputs[attribute])
            if adapter:
                cut.parameters.cut(experts, adapter[A], 2, ranges)
                cut.sum_gradient(getattr(experts, adapter[B]))
            if isinstance(experts, Nf4Experts) and packed:
                ranges = experts.keep_part(attribute, False, ranges)
            cut.parameters.cut(experts, attribute, dim, ranges)
        elif style == "once":
            cut.sum_gradient(parameter)
        elif style in ("column", "packed"):
            # The width is the last dimension of a bias (experts, width), and of a matrix apart from its inputs.
            dim = parameter.dim() - (1 if (transposed and not packed) or parameter.dim() == 2 else 2)
            # Twice the width of the next layer means two fused matrices, also where a plan does not say so. They
            # stand one after the other, unless their columns alternate.
            fused = style == "packed" or parameter.shape[dim] == 2 * width
            fused = fused and bool(getattr(experts, "is_concatenated", True))
            ranges = cut.ranges(name, parameter.shape[dim], 2 if fused else 1)
            if isinstance(experts, Nf4Experts) and packed:
                experts.keep_part(attribute, True, ranges)
            cut.parameters.cut(experts, attribute, dim, ranges)
            if adapter:
                cut.parameters.cut(experts, adapter[B], 1, ranges)
                cut.sum_gradient(getattr(experts, adapter[A]))
    return styles
