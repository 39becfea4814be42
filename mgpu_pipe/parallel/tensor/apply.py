"""Tensor parallelism, and with it sequence parallelism, on a Hugging Face model.

Attention is cut by heads, feed-forward layers and experts by width, embedding and head by vocabulary
(Shoeybi et al. 2019, arXiv:1909.08053). Cut parameters are plain local ones; where each lies in the unsharded model is
recorded as a :class:`Layout`. Losses, and the gradients of everything that all ranks hold, are the same on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from mgpu_pipe.architectures.family import COLUMNS, SequencePlan, Style
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.stage_placeholders import is_removed
from mgpu_pipe.parallel.random_streams import RankStreams
from mgpu_pipe.parallel.tensor.collectives import add_partial_gradients
from mgpu_pipe.parallel.tensor.cut import (
    KEY_VALUE,
    SEVERAL_INPUTS,
    TensorCut,
    check_blocks,
    head_dim,
    inputs,
    output_dim,
    outputs,
    sequence_plan,
)
from mgpu_pipe.parallel.tensor.heads import (
    VocabularyShard,
    count_local_heads,
    cut_fused,
    cut_inside,
    cut_key_values,
    select_local_heads,
    vocabulary_parallel_embedding,
    vocabulary_parallel_head,
)
from mgpu_pipe.parallel.tensor.linear import ColumnRegion, column_parallel_alone, cut_experts, row_parallel
from mgpu_pipe.parallel.tensor.sequence import SequenceSplit, split_between

INSIDE = re.compile(r"(q|k|v|query|key)_(layer)?norm|act_fn")
"""Modules between column- and row-parallel layers, where a plan does not name them."""


def apply_tensor_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = False,
    experts: bool = True,
    stages: Sequence[range] = (),
    streams: RankStreams | None = None,
    whole: Sequence[str] = (),
) -> None:
    """Cut ``model`` over the ranks of ``group``, in place, and record a layout for every parameter.

    Before activation checkpointing, compilation and FSDP2; the model may be on the meta device, and may lack the
    modules of other pipeline stages. A collective call where key-value heads are shared by ranks.

    Args:
        sequence_parallel: split activations between the tensor-parallel regions along the sequence.
        experts: cut experts along their width; False leaves modules of experts, and their parameters, alone.
        stages: the layers of each pipeline stage that this rank holds; between stages the sequence is whole.
        streams: where dropout is to draw from; None where nothing is random.
        whole: names of modules that stay whole, whose gradients on each rank are parts of a sum
            (:mod:`mgpu_pipe.parallel.tensor.whole_towers`).

    Raises:
        ConfigError: no plan for the model, or sizes that do not divide.
    """
    if group.size() > 1:
        check_blocks(model, group.size(), whole=whole)
        _TensorParallel(model, group, sequence_parallel, experts, stages, streams, whole).apply()


class _TensorParallel:
    """One call of :func:`apply_tensor_parallel`."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        experts: bool,
        stages: Sequence[range],
        streams: RankStreams | None,
        whole: Sequence[str],
    ) -> None:
        self.stages, self.streams, self.whole = stages, streams, whole
        self.model, self.cuts_experts = model, experts
        self.cut = TensorCut(model, group, whole)
        # A pipeline stage without blocks has nothing to split.
        splits = sequence_parallel and bool(_blocks(model, sequence_plan(model)))
        self.sequence = SequenceSplit(group) if splits else None

    def apply(self) -> None:
        cut = self.cut
        cut_experts(cut, self.sequence, self.streams, alone=not self.cuts_experts)
        for name, module in cut.modules.items():
            styles = {child: cut.plan.get(f"{name}.{child}" if name else child) for child in module._modules}
            if any(style in (*COLUMNS, "row") for style in styles.values()):
                self._linears(name, module, {child: style for child, style in styles.items() if style})
        for name, style in cut.plan.items():
            for parameter in cut.modules[name].parameters() if style == "own_heads" and name in cut.modules else ():
                cut.sum_gradient(parameter)
        for name in self.whole:
            for parameter in cut.modules[name].parameters():
                cut.sum_gradient(parameter)
        has_head = self._vocabulary()
        if self.sequence is not None:
            self._split_sequence(self.sequence, has_head)
        cut.parameters.record(cut.left_alone, owns_the_rest=cut.rank == 0)
        add_partial_gradients(self.model, cut.partial)

    def _linears(self, name: str, module: nn.Module, styles: dict[str, Style]) -> None:
        """Cut the linear children of ``module``, which share one input if no other child takes it."""
        cut = self.cut
        layers = {child: getattr(module, child) for child, style in styles.items() if style in (*COLUMNS, "row")}
        bare = [attribute for attribute in module._parameters if cut.plan.get(f"{name}.{attribute}") == "column"]
        inside = [child for child in module._modules if child not in styles and INSIDE.fullmatch(child)]
        covered = {id(p) for child in (*styles, *inside) for p in getattr(module, child).parameters()}
        covered |= {id(module._parameters[attribute]) for attribute in bare}
        several = name.endswith(SEVERAL_INPUTS) or type(module).__name__ in SEVERAL_INPUTS
        shares_input = not several and all(id(p) in covered for p in module.parameters())
        key_value_heads = None
        for child, layer in layers.items():
            if styles[child] == "row":
                ranges = cut.ranges(f"{name}.{child}", inputs(layer))
                cut.cut_linear(layer, 1 - output_dim(layer), ranges, bias=False)
            elif child in KEY_VALUE and head_dim(module):
                key_value_heads = cut_key_values(cut, f"{name}.{child}", module, layer)
            elif styles[child] in ("qkv", "grouped"):
                cut_fused(cut, f"{name}.{child}", module, layer, styles[child])
            else:
                parts = _parts(module, child, styles[child])
                cut.cut_linear(layer, output_dim(layer), cut.ranges(f"{name}.{child}", outputs(layer), parts))
        for attribute in bare:
            length = len(getattr(module, attribute))
            cut.parameters.cut(module, attribute, 0, cut.ranges(f"{name}.{attribute}", length))
        for child in inside:
            cut_inside(cut, f"{name}.{child}", getattr(module, child), head_dim(module))
        for argument in {key.rpartition(".")[2] for key, style in cut.plan.items() if style == "per_head"}:
            if f"{name}.{argument}" in cut.plan:
                module.register_forward_pre_hook(
                    select_local_heads(cut, argument, module.__dict__["num_heads"]), with_kwargs=True
                )
        count_local_heads(cut, name, module, key_value_heads)
        if self.sequence is not None and not shares_input:
            fix, reason = "use strategy.sequence_parallel=false", f"{name} takes more than the hidden states"
            raise ConfigError("strategy.sequence_parallel", True, fix, reason)
        region = ColumnRegion(cut.group, self.sequence) if shares_input else None
        for child, layer in layers.items():
            if styles[child] == "row":
                row_parallel(layer, cut.group, self.sequence)
            elif region is not None:
                region.column(layer)
            elif not isinstance(layer, nn.Embedding):  # whose input has no gradient
                column_parallel_alone(layer, cut.group)
        if region is not None:
            region.wrap(module)
        if self.streams is not None:
            rows = [layer for child, layer in layers.items() if styles[child] == "row"]
            columns = [layer for child, layer in layers.items() if styles[child] != "row"]
            self.streams.region(module, columns if rows else [], rows)

    def _vocabulary(self) -> bool:
        """Cut embedding and head, which may be one parameter or on other stages; return whether the head is here."""
        embedding, head = _embedding_and_head(self.model)
        # A head on another pipeline stage may share the embedding's weight, so both are cut alike.
        with_head = isinstance(head, nn.Linear) or (isinstance(head, nn.Module) and is_removed(head))
        if isinstance(embedding, nn.Embedding) and (self.sequence is not None or with_head):
            shard = VocabularyShard.from_group(self.cut.group, embedding.num_embeddings)
            # An encoder and a decoder share one table, each through its own module.
            tables = [
                module
                for module in self.cut.modules.values()
                if isinstance(module, nn.Embedding) and module.weight is embedding.weight
            ]
            self._cut_once(embedding, shard)
            for table in tables:
                vocabulary_parallel_embedding(table, shard, self.sequence)
        if not isinstance(head, nn.Linear):
            return False
        shard = VocabularyShard.from_group(self.cut.group, head.out_features)
        self._cut_once(head, shard)
        vocabulary_parallel_head(head, shard, self.sequence)
        return True

    def _cut_once(self, module: nn.Module, shard: VocabularyShard) -> None:
        for attribute in ("weight", "bias"):
            parameter = module._parameters.get(attribute)
            if parameter is not None and not self.cut.parameters.is_cut(parameter):
                self.cut.parameters.cut(module, attribute, 0, [(shard.start, shard.stop)])

    def _split_sequence(self, sequence: SequenceSplit, has_head: bool) -> None:
        """Split the sequence between embeddings and norm; gradients of what lies there are then parts of a sum."""
        plan = sequence_plan(self.model)
        base, blocks = _base(self.model), _blocks(self.model, plan)
        stages = self.stages or [range(len(blocks))]
        norm = getattr(base, plan.norm, None)
        addends = [module for name in plan.addends if isinstance(module := getattr(base, name, None), nn.Module)]
        has_norm = isinstance(norm, nn.Module) and any(True for _ in norm.parameters())
        for stage in stages:
            to_norm = has_norm and stage.stop == len(blocks)
            last = norm if to_norm and isinstance(norm, nn.Module) else blocks[stage.stop - 1]
            split_between(
                sequence,
                blocks[stage.start],
                last,
                addends if stage.start == 0 else [],
                has_head and stage.stop == len(blocks),
                self.streams,
            )
        routers = {
            id(p)
            for name, style in self.cut.plan.items()
            if style == "experts" and self.cuts_experts
            for p in self.cut.modules[name.rpartition(".")[0]].parameters()
        }
        for module in (*blocks, *([norm] if isinstance(norm, nn.Module) else []), *addends):
            for parameter in module.parameters():
                name, is_cut = self.cut.parameters.name(parameter), self.cut.parameters.is_cut(parameter)
                if not is_cut and id(parameter) not in routers and name not in self.cut.left_alone:
                    self.cut.partial[name] = None


def _parts(module: nn.Module, child: str, style: Style) -> int:
    """Matrices that are fused in a column-parallel layer: two of a gated unit, or query, key and value."""
    split_size = getattr(module, "split_size", None)
    if style != "packed":
        return 1
    return 2 if split_size is None else outputs(getattr(module, child)) // int(split_size)


def _base(model: nn.Module) -> nn.Module:
    base = getattr(model, "base_model", model)
    assert isinstance(base, nn.Module)
    return base


def _blocks(model: nn.Module, plan: SequencePlan) -> list[nn.Module]:
    blocks = getattr(_base(model), plan.blocks, None)
    return list(blocks.children()) if isinstance(blocks, nn.Module) else []


def _embedding_and_head(model: nn.Module) -> tuple[object, object]:
    """A model's token embedding and output head, as far as it has them."""

    def given_by(getter: str) -> object:
        try:
            return getattr(model, getter)()
        except (AttributeError, NotImplementedError):  # of another modality, or on another pipeline stage
            return None

    return given_by("get_input_embeddings"), given_by("get_output_embeddings")
