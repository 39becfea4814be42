"""Experts under tensor parallelism: every rank has a part of each one's width."""

from __future__ import annotations

from mgpu_pipe.models.adapters.experts import LoraExperts
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.adapters.low_rank import A, B
from mgpu_pipe.parallel.random_streams import RankStreams
from mgpu_pipe.parallel.sequence import SequenceSplit
from mgpu_pipe.parallel.tensor_cut import TensorCut
from mgpu_pipe.parallel.tensor_linear import experts_parallel


def cut_experts(cut: TensorCut, sequence: SequenceSplit | None, streams: RankStreams | None, alone: bool) -> None:
    """Cut every module of experts, or leave all of them alone."""
    for name in [name for name, style in cut.plan.items() if style == "experts"]:
        experts = cut.modules[name]
        if alone:
            cut.left_alone |= {cut.parameters.name(p) for p in experts.parameters()}
            continue
        parameters = {n: p for n, p in experts.named_parameters(recurse=False) if not is_adapter(n)}
        adapted = experts.adapted() if isinstance(experts, LoraExperts) else {}
        styles = {attribute: cut.plan.get(f"{name}.{attribute}") for attribute in parameters}
        transposed = bool(getattr(experts, "is_transposed", False))
        if getattr(experts, "has_bias", False) and None in styles.values():
            reason = f"the experts of {name} have biases, of which the plan says nothing"
            raise cut.refusal("use strategy.ep in its place", reason)
        inputs = -2 if transposed else -1
        width = min((parameters[one].shape[inputs] for one, style in styles.items() if style == "row"), default=0)
        for attribute, parameter in parameters.items():
            style = styles[attribute]
            own = adapted.get(attribute, {})
            if style == "row":
                dim = parameter.dim() + inputs
                cut.parameters.cut(experts, attribute, dim, cut.even(name, parameter.shape[dim]))
                if own:
                    cut.parameters.cut(experts, own[A], 2, cut.even(name, parameter.shape[dim]))
                    cut.sum_gradient(getattr(experts, own[B]))
            elif style == "once":
                cut.sum_gradient(parameter)
            elif style in ("column", "packed"):
                # Of a bias (experts, width) as of a matrix: the width is the last but for what goes in.
                dim = parameter.dim() - (1 if transposed or parameter.dim() == 2 else 2)
                # Twice as wide as what follows: two fused matrices, also where a plan does not say so; one after
                # the other, unless their columns take turns.
                fused = style == "packed" or parameter.shape[dim] == 2 * width
                fused = fused and bool(getattr(experts, "is_concatenated", True))
                ranges = cut.even(name, parameter.shape[dim], 2 if fused else 1)
                cut.parameters.cut(experts, attribute, dim, ranges)
                if own:
                    cut.parameters.cut(experts, own[B], 1, ranges)
                    cut.sum_gradient(getattr(experts, own[A]))
        block = cut.modules[name.rpartition(".")[0]]
        shared = [attribute for attribute, style in styles.items() if style == "once"]
        experts_parallel(block, getattr(block, "gate", None), experts, cut.group, sequence, shared)
        if streams is not None:
            # Tokens are whole in the block, where its router draws, and every expert's width is cut.
            block.forward = streams.within(False, block.forward)
            experts.forward = streams.within(True, experts.forward)
