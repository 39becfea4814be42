"""Experts under tensor parallelism: every rank has a part of each one's width."""

from __future__ import annotations

from mgpu_pipe.models.adapters.experts import LoraExperts
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.adapters.low_rank import A, B
from mgpu_pipe.models.adapters.qlora import Nf4Experts, is_scales
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
        named = experts.named_parameters(recurse=False)
        parameters = {n: p for n, p in named if not is_adapter(n) and not is_scales(n)}
        blocks = experts.blocks if isinstance(experts, Nf4Experts) else {}
        adapted = experts.adapted() if isinstance(experts, LoraExperts) else {}
        styles = {attribute: cut.plan.get(f"{name}.{attribute}") for attribute in parameters}
        transposed = bool(getattr(experts, "is_transposed", False))
        if getattr(experts, "has_bias", False) and None in styles.values():
            reason = f"the experts of {name} have biases, of which the plan says nothing"
            raise cut.refusal("use strategy.ep in its place", reason)
        inputs = {
            one: blocks[one].inputs if one in blocks else int(parameter.shape[-2 if transposed else -1])
            for one, parameter in parameters.items()
        }
        width = min((inputs[one] for one, style in styles.items() if style == "row"), default=0)
        for attribute, parameter in parameters.items():
            style, packed = styles[attribute], attribute in blocks
            own = adapted.get(attribute, {})
            if style == "row":
                dim = parameter.dim() - (2 if transposed and not packed else 1)
                ranges = cut.even(name, inputs[attribute])
                if own:
                    cut.parameters.cut(experts, own[A], 2, ranges)
                    cut.sum_gradient(getattr(experts, own[B]))
                if isinstance(experts, Nf4Experts) and packed:
                    ranges = experts.own_part(attribute, False, ranges)
                cut.parameters.cut(experts, attribute, dim, ranges)
            elif style == "once":
                cut.sum_gradient(parameter)
            elif style in ("column", "packed"):
                # Of a bias (experts, width) as of a matrix: the width is the last but for what goes in.
                dim = parameter.dim() - (1 if (transposed and not packed) or parameter.dim() == 2 else 2)
                # Twice as wide as what follows: two fused matrices, also where a plan does not say so; one after
                # the other, unless their columns take turns.
                fused = style == "packed" or parameter.shape[dim] == 2 * width
                fused = fused and bool(getattr(experts, "is_concatenated", True))
                ranges = cut.even(name, parameter.shape[dim], 2 if fused else 1)
                if isinstance(experts, Nf4Experts) and packed:
                    experts.own_part(attribute, True, ranges)
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
