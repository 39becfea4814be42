"""Tensor parallelism, and with it sequence parallelism, on a Hugging Face model.

Attention is cut by heads, feed-forward layers and experts by width, embedding and head by vocabulary
(Shoeybi et al. 2019, arXiv:1909.08053). Cut parameters are plain local ones; where each lies in the unsharded model is
recorded as a :class:`Layout`. Losses, and the gradients of everything that all ranks hold, are the same on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.family import COLUMNS, SequencePlan, Style
from mgpu_pipe.models.stage_placeholders import is_removed
from mgpu_pipe.parallel.random_streams import RankStreams
from mgpu_pipe.parallel.sequence import SequenceSplit, split_between
from mgpu_pipe.parallel.tensor_gradients import add_partial_gradients
from mgpu_pipe.parallel.tensor_linear import ColumnRegion, column_parallel_alone, experts_parallel, row_parallel
from mgpu_pipe.parallel.tensor_parameters import CutParameters
from mgpu_pipe.parallel.tensor_roles import KEY_VALUE, SEVERAL_INPUTS, sequence_plan, tensor_plan
from mgpu_pipe.parallel.vocabulary import VocabularyShard, vocabulary_parallel_embedding, vocabulary_parallel_head

HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "split_size")
"""What attention modules call the number of their query heads, or a width that goes with it."""
GROUPS = "num_key_value_groups"
"""Query heads a key-value head."""
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads")
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
) -> None:
    """Cut ``model`` over the ranks of ``group``, in place, and record a layout for every parameter.

    Before activation checkpointing, compilation and FSDP2; the model may be on the meta device, and may lack the
    modules of other pipeline stages. A collective call where key-value heads are shared by ranks.

    Args:
        sequence_parallel: split activations between the tensor-parallel regions along the sequence.
        experts: cut experts along their width; False leaves modules of experts, and their parameters, alone.
        stages: the layers of each pipeline stage that this rank holds; between stages the sequence is whole.
        streams: where dropout is to draw from; None where nothing is random.

    Raises:
        ConfigError: no plan for the model, or sizes that do not divide.
    """
    if group.size() == 1:
        return
    TensorParallel(model, group, sequence_parallel, experts, stages, streams).apply()


class TensorParallel:
    """One application of a plan; see :func:`apply_tensor_parallel`."""

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        experts: bool,
        stages: Sequence[range] = (),
        streams: RankStreams | None = None,
    ) -> None:
        self.stages, self.streams = stages, streams
        self.model, self.group, self.cut_experts = model, group, experts
        self.rank, self.size = group.rank(), group.size()
        self.plan = tensor_plan(model)
        # A pipeline stage without blocks has nothing to split.
        splits = sequence_parallel and bool(_blocks(model, sequence_plan(model)))
        self.sequence = SequenceSplit(group) if splits else None
        self.modules = dict(model.named_modules())
        self.parameters = CutParameters(model)
        self.partial: dict[str, dist.ProcessGroup | None] = {}
        self.left_alone: set[str] = set()
        """Parameters of which this axis says nothing."""

    def apply(self) -> None:
        self._experts()
        for name, module in self.modules.items():
            styles = {child: self.plan.get(f"{name}.{child}" if name else child) for child in module._modules}
            if any(style in (*COLUMNS, "row") for style in styles.values()):
                self._linears(name, module, {child: style for child, style in styles.items() if style})
        for name, style in self.plan.items():
            if style == "own_heads" and name in self.modules:
                self.partial.update({self.parameters.name(p): None for p in self.modules[name].parameters()})
        has_head = self._vocabulary()
        if self.sequence is not None:
            self._split_sequence(self.sequence, has_head)
        self.parameters.record(self.left_alone, owns_the_rest=self.rank == 0)
        add_partial_gradients(self.model, self.partial)

    # -- linear layers ------------------------------------------------------------------------------------------

    def _linears(self, name: str, module: nn.Module, styles: dict[str, Style]) -> None:
        """The cut children of ``module``, which share what enters them where it enters nothing else."""
        cut = {child: getattr(module, child) for child, style in styles.items() if style in (*COLUMNS, "row")}
        bare = [one for one in module._parameters if self.plan.get(f"{name}.{one}") == "column"]
        inside = [child for child in module._modules if child not in styles and INSIDE.fullmatch(child)]
        covered = {id(p) for child in (*styles, *inside) for p in getattr(module, child).parameters()}
        covered |= {id(module._parameters[one]) for one in bare}
        shares_input = not name.endswith(SEVERAL_INPUTS) and all(id(p) in covered for p in module.parameters())
        key_value_heads = None
        for child, layer in cut.items():
            if styles[child] == "row":
                ranges = self._even(f"{name}.{child}", _inputs(layer))
                self._cut_linear(layer, 1 - _output_dim(layer), ranges, bias=False)
            elif child in KEY_VALUE and _head_dim(module):
                key_value_heads = self._cut_key_values(f"{name}.{child}", module, layer)
            elif styles[child] in ("qkv", "grouped"):
                self._cut_fused(f"{name}.{child}", module, layer, styles[child])
            else:
                parts = self._parts(module, child, styles[child])
                self._cut_linear(layer, _output_dim(layer), self._even(f"{name}.{child}", _outputs(layer), parts))
        for attribute in bare:
            length = len(getattr(module, attribute))
            self.parameters.cut(module, attribute, 0, self._even(f"{name}.{attribute}", length))
        for child in inside:
            self._between(f"{name}.{child}", getattr(module, child), _head_dim(module))
        for argument in {key.rpartition(".")[2] for key, one in self.plan.items() if one == "per_head"}:
            if f"{name}.{argument}" in self.plan:
                module.register_forward_pre_hook(
                    self._own_heads_of(argument, module.__dict__["num_heads"]), with_kwargs=True
                )
        self._count_local_heads(name, module, key_value_heads)
        if self.sequence is not None and not shares_input:
            raise ConfigError(
                "strategy.sequence_parallel",
                True,
                "use strategy.sequence_parallel=false",
                f"{name} takes more than the hidden states",
            )
        region = ColumnRegion(self.group, self.sequence) if shares_input else None
        for child, layer in cut.items():
            if styles[child] == "row":
                row_parallel(layer, self.group, self.sequence)
            elif region is not None:
                region.column(layer)
            else:
                column_parallel_alone(layer, self.group)
        if region is not None:
            region.wrap(module)
        if self.streams is not None:
            rows = [layer for child, layer in cut.items() if styles[child] == "row"]
            columns = [layer for child, layer in cut.items() if styles[child] != "row"]
            self.streams.region(module, columns if rows else [], rows)

    def _between(self, name: str, module: nn.Module, head_dim: int) -> None:
        """What works on this rank's heads or width: cut where it has weights for each head, else whole on every rank.

        Raises:
            ConfigError: weights over all heads together, of which a rank has a part.
        """
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2 and parameter.shape[-1] == head_dim:
                heads = parameter.shape[0]
                if heads % self.size and self.size % heads == 0:
                    self._cut_shared_norm(module, attribute, heads)
                else:
                    self.parameters.cut(module, attribute, 0, self._even(name, heads))
            elif parameter.numel() in (1, head_dim):
                self.partial[self.parameters.name(parameter)] = None
            else:
                raise ConfigError(
                    "strategy.tp",
                    self.size,
                    "use strategy.tp=1",
                    f"{name} looks at all heads together, of which a rank has a part",
                )

    def _parts(self, module: nn.Module, child: str, style: Style) -> int:
        """Matrices that are fused in a column-parallel layer: two of a gated unit, or query, key and value."""
        split_size = getattr(module, "split_size", None)
        if style != "packed":
            return 1
        return 2 if split_size is None else _outputs(getattr(module, child)) // int(split_size)

    def _even(self, name: str, length: int, parts: int = 1) -> list[tuple[int, int]]:
        """This rank's range of each of ``parts`` equal parts of ``length``."""
        one = length // parts
        if one % self.size:
            fits = [n for n in range(1, self.size + 1) if one % n == 0]
            raise ConfigError(
                "strategy.tp", self.size, f"use one of {fits}", f"the width {one} of {name} cannot be cut evenly"
            )
        share = one // self.size
        return [(part * one + self.rank * share, part * one + (self.rank + 1) * share) for part in range(parts)]

    def _cut_linear(
        self, layer: nn.Module, dim: int, ranges: list[tuple[int, int]], bias: bool = True, owned: bool = True
    ) -> None:
        self.parameters.cut(layer, "weight", dim, ranges, owned)
        if bias and layer._parameters.get("bias") is not None:
            self.parameters.cut(layer, "bias", 0, ranges, owned)
        length = sum(stop - start for start, stop in ranges)
        names = ("nf", "nx") if isinstance(layer, Conv1D) else ("out_features", "in_features")
        setattr(layer, names[0 if dim == _output_dim(layer) else 1], length)

    def _cut_key_values(self, name: str, attention: nn.Module, layer: nn.Module) -> tuple[int, int]:
        """Cut by key-value heads; with fewer of them than ranks, neighbours hold the same one.

        Returns:
            The heads there are, and those of this rank.
        """
        width = _head_dim(attention)
        heads = _outputs(layer) // width
        if heads % self.size == 0:
            self._cut_linear(layer, _output_dim(layer), self._even(name, _outputs(layer)))
            return heads, heads // self.size
        if self.size % heads:
            fits = [n for n in range(1, self.size + 1) if n % heads == 0 or heads % n == 0]
            raise ConfigError(
                "strategy.tp",
                self.size,
                f"use one of {fits}",
                f"{heads} key-value heads ({name}) neither divide nor are divided by it",
            )
        sharing = self.size // heads
        head = self.rank // sharing
        self._cut_linear(
            layer, _output_dim(layer), [(head * width, (head + 1) * width)], owned=self.rank % sharing == 0
        )
        sharers = self._sharers(sharing)
        for attribute in ("weight", "bias"):
            parameter = layer._parameters.get(attribute)
            if parameter is not None:
                self.partial[self.parameters.name(parameter)] = sharers
        return heads, 1

    def _cut_fused(self, name: str, attention: nn.Module, layer: nn.Module, style: Style) -> None:
        """Cut queries, keys and values that are one matrix, by key-value heads; the module then counts its own."""
        width = _head_dim(attention)
        count = next((count for count in KEY_VALUE_COUNTS if count in attention.__dict__), "num_heads")
        heads = int(getattr(attention, count))
        own = self._even(name, heads)
        if style == "grouped":
            each = _outputs(layer) // heads
            ranges = [(start * each, stop * each) for start, stop in own]
        else:
            queries = _outputs(layer) - 2 * heads * width
            parts = [(0, queries), (queries, heads * width), (queries + heads * width, heads * width)]
            ranges = [(at + start, at + stop) for at, length in parts for start, stop in self._even(name, length)]
            # It reads the number of its query heads there.
            attention.config = _LocalHeads(attention.config, queries // width // self.size)  # type: ignore[assignment]
        self._cut_linear(layer, _output_dim(layer), ranges)
        if count != "num_heads":
            setattr(attention, count, heads // self.size)

    def _own_heads_of(self, argument: str, heads: int) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """A hook that leaves this rank's heads of an argument of shape ``(rows * heads, ...)``."""
        own = slice(self.rank * heads // self.size, (self.rank + 1) * heads // self.size)

        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            whole = kwargs[argument]
            return args, {**kwargs, argument: whole.unflatten(0, (-1, heads))[:, own].flatten(0, 1)}

        return hook

    def _cut_shared_norm(self, module: nn.Module, attribute: str, heads: int) -> None:
        """Cut a norm's weights by key-value heads, of which there are fewer than ranks."""
        sharing = self.size // heads
        head = self.rank // sharing
        self.parameters.cut(module, attribute, 0, [(head, head + 1)], owned=self.rank % sharing == 0)
        self.partial[self.parameters.name(getattr(module, attribute))] = self._sharers(sharing)

    def _sharers(self, sharing: int) -> dist.ProcessGroup:
        """The group of the ``sharing`` neighbours that this rank shares its key-value head with."""
        if not hasattr(self, "_sharing_group"):
            ranks = dist.get_process_group_ranks(self.group)
            first = self.rank // sharing * sharing
            # Local, for other tensor-parallel groups and pipeline stages do not come here together with this one.
            created = dist.new_group(ranks[first : first + sharing], use_local_synchronization=True)
            assert isinstance(created, dist.ProcessGroup)
            self._sharing_group = created
        return self._sharing_group

    def _count_local_heads(self, name: str, module: nn.Module, key_value_heads: tuple[int, int] | None) -> None:
        """Let an attention module know how many heads are left to it.

        Args:
            key_value_heads: of the whole module, and of this rank; None where they are not cut by themselves.
        """
        counts = {count: value for count in HEAD_COUNTS if isinstance(value := module.__dict__.get(count), int)}
        groups = module.__dict__.get(GROUPS)
        if key_value_heads is not None and isinstance(groups, int):
            counts["query_heads"] = groups * key_value_heads[0]
        for count, heads in counts.items():
            if heads % self.size:
                fits = [n for n in range(1, heads + 1) if heads % n == 0]
                raise ConfigError(
                    "strategy.tp",
                    self.size,
                    f"use one of {fits}",
                    f"it does not divide the {heads} of {name}'s {count}",
                )
            if count != "query_heads":
                setattr(module, count, heads // self.size)
        if key_value_heads is not None:
            if "query_heads" in counts:
                setattr(module, GROUPS, counts["query_heads"] // self.size // key_value_heads[1])
            for count in KEY_VALUE_COUNTS:
                if isinstance(module.__dict__.get(count), int):
                    setattr(module, count, key_value_heads[1])

    # -- experts ------------------------------------------------------------------------------------------------

    def _experts(self) -> None:
        """Cut every module of experts, or leave it alone."""
        for name in [name for name, style in self.plan.items() if style == "experts"]:
            experts = self.modules[name]
            if not self.cut_experts:
                self.left_alone |= {self.parameters.name(p) for p in experts.parameters()}
                continue
            held = dict(experts.named_parameters(recurse=False))
            styles = {attribute: self.plan.get(f"{name}.{attribute}") for attribute in held}
            transposed = bool(getattr(experts, "is_transposed", False))
            if getattr(experts, "has_bias", False) and None in styles.values():
                raise ConfigError(
                    "strategy.tp",
                    self.size,
                    "use strategy.ep in its place",
                    f"the experts of {name} have biases, of which the plan says nothing",
                )
            inputs = -2 if transposed else -1
            width = min((held[one].shape[inputs] for one, style in styles.items() if style == "row"), default=0)
            for attribute, parameter in held.items():
                style = styles[attribute]
                if style == "row":
                    dim = parameter.dim() + inputs
                    self.parameters.cut(experts, attribute, dim, self._even(name, parameter.shape[dim]))
                elif style == "once":
                    self.partial[self.parameters.name(parameter)] = None
                elif style in ("column", "packed"):
                    # Of a bias (experts, width) as of a matrix: the width is the last but for what goes in.
                    dim = parameter.dim() - (1 if transposed or parameter.dim() == 2 else 2)
                    # Twice as wide as what follows: two fused matrices, also where a plan does not say so; one after
                    # the other, unless their columns take turns.
                    fused = style == "packed" or parameter.shape[dim] == 2 * width
                    fused = fused and bool(getattr(experts, "is_concatenated", True))
                    ranges = self._even(name, parameter.shape[dim], 2 if fused else 1)
                    self.parameters.cut(experts, attribute, dim, ranges)
            block = self.modules[name.rpartition(".")[0]]
            shared = [attribute for attribute, style in styles.items() if style == "once"]
            experts_parallel(block, getattr(block, "gate", None), experts, self.group, self.sequence, shared)
            if self.streams is not None:
                # Tokens are whole in the block, where its router draws, and every expert's width is cut.
                block.forward = self.streams.within(False, block.forward)
                experts.forward = self.streams.within(True, experts.forward)

    # -- vocabulary and sequence --------------------------------------------------------------------------------

    def _vocabulary(self) -> bool:
        """Cut embedding and head, which may be one parameter, and may both be on other stages; whether head is here."""
        embedding, head = _embedding_and_head(self.model)
        # A head on another pipeline stage may share the embedding's weight, so both are cut alike.
        with_head = isinstance(head, nn.Linear) or (isinstance(head, nn.Module) and is_removed(head))
        if isinstance(embedding, nn.Embedding) and (self.sequence is not None or with_head):
            shard = VocabularyShard.of(self.group, embedding.num_embeddings)
            # An encoder and a decoder look the same table up, each by a module of its own.
            tables = [
                one for one in self.modules.values() if isinstance(one, nn.Embedding) and one.weight is embedding.weight
            ]
            self._cut_once(embedding, shard)
            for table in tables:
                vocabulary_parallel_embedding(table, shard, self.sequence)
        if not isinstance(head, nn.Linear):
            return False
        shard = VocabularyShard.of(self.group, head.out_features)
        self._cut_once(head, shard)
        vocabulary_parallel_head(head, shard, self.sequence)
        return True

    def _cut_once(self, module: nn.Module, shard: VocabularyShard) -> None:
        for attribute in ("weight", "bias"):
            parameter = module._parameters.get(attribute)
            if parameter is not None and not self.parameters.is_cut(parameter):
                self.parameters.cut(module, attribute, 0, [(shard.start, shard.stop)])

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
            for name, style in self.plan.items()
            if style == "experts" and self.cut_experts
            for p in self.modules[name.rpartition(".")[0]].parameters()
        }
        for module in (*blocks, *([norm] if isinstance(norm, nn.Module) else []), *addends):
            for parameter in module.parameters():
                name, is_cut = self.parameters.name(parameter), self.parameters.is_cut(parameter)
                if not is_cut and id(parameter) not in routers and name not in self.left_alone:
                    self.partial[name] = None


class _LocalHeads:
    """A configuration of which one module reads another number of heads."""

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config, self.num_attention_heads = config, num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def _base(model: nn.Module) -> nn.Module:
    base = getattr(model, "base_model", model)
    assert isinstance(base, nn.Module)
    return base


def _blocks(model: nn.Module, plan: SequencePlan) -> list[nn.Module]:
    blocks = getattr(_base(model), plan.blocks, None)
    return list(blocks.children()) if isinstance(blocks, nn.Module) else []


def _embedding_and_head(model: nn.Module) -> tuple[object, object]:
    """A model's token embedding and output head, as far as it has them."""
    found: list[object] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, getter)())
        except (AttributeError, NotImplementedError):  # of another modality, or on another pipeline stage
            found.append(None)
    return found[0], found[1]


def _output_dim(layer: nn.Module) -> int:
    return 1 if isinstance(layer, Conv1D | nn.Embedding) else 0


def _outputs(layer: nn.Module) -> int:
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.shape[_output_dim(layer)]


def _inputs(layer: nn.Module) -> int:
    assert isinstance(layer.weight, torch.Tensor)
    return layer.weight.shape[1 - _output_dim(layer)]


def _head_dim(attention: nn.Module) -> int:
    """Width of a head; 0 where the module has no heads."""
    return int(getattr(attention, "head_dim", 0) or 0)
