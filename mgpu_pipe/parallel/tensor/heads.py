"""Attention under tensor parallelism: which heads a rank has, and modules that work on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mgpu_pipe.architectures.family import Style
from mgpu_pipe.models.adapters.low_rank import MAGNITUDE, B
from mgpu_pipe.parallel.tensor.collectives import all_gather_parts, sum_backward, sum_forward
from mgpu_pipe.parallel.tensor.cut import TensorCut, head_dim, output_dim, outputs
from mgpu_pipe.parallel.tensor.sequence import SequenceSplit

HEAD_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "split_size", "all_head_size", "embed_dim")
"""Names that attention modules give the number of their query heads, or a width that goes with it."""
GROUPS = "num_key_value_groups"
"""Query heads a key-value head."""
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads")


def cut_key_values(cut: TensorCut, name: str, attention: nn.Module, layer: nn.Module) -> tuple[int, int]:
    """Cut by key-value heads, shared by neighbours if few; returns the heads there are, and this rank's."""
    width = head_dim(attention)
    heads = outputs(layer) // width
    if heads % cut.size == 0:
        cut.cut_linear(layer, output_dim(layer), cut.ranges(name, outputs(layer)))
        return heads, heads // cut.size
    if cut.size % heads:
        fits = [n for n in range(1, cut.size + 1) if n % heads == 0 or heads % n == 0]
        raise cut.refusal(
            f"use one of {fits}", f"{heads} key-value heads ({name}) neither divide nor are divided by it"
        )
    sharing = cut.size // heads
    head = cut.rank // sharing
    cut.cut_linear(layer, output_dim(layer), [(head * width, (head + 1) * width)], owned=cut.rank % sharing == 0)
    sharers = cut.sharers(sharing)
    for attribute in ("weight", "bias", B, MAGNITUDE):
        parameter = layer._parameters.get(attribute)
        if parameter is not None:
            cut.sum_gradient(parameter, sharers)
    return heads, 1


def cut_fused(cut: TensorCut, name: str, attention: nn.Module, layer: nn.Module, style: Style) -> None:
    """Cut queries, keys and values that are one matrix, by key-value heads; the module then counts its own."""
    width = head_dim(attention)
    count = next((count for count in KEY_VALUE_COUNTS if count in attention.__dict__), "num_heads")
    config: Any = getattr(attention, "config", None)
    heads = int(getattr(attention, count, 0) or config.num_attention_heads)
    head_ranges = cut.ranges(name, heads)
    if style == "grouped":
        each = outputs(layer) // heads
        ranges = [(start * each, stop * each) for start, stop in head_ranges]
    else:
        queries = outputs(layer) - 2 * heads * width
        parts = [(0, queries), (queries, heads * width), (queries + heads * width, heads * width)]
        ranges = [(base + start, base + stop) for base, length in parts for start, stop in cut.ranges(name, length)]
        # The module reads the number of its query heads from its configuration.
        attention.config = _LocalHeads(config, queries // width // cut.size)  # type: ignore[assignment]
    cut.cut_linear(layer, output_dim(layer), ranges)
    if count != "num_heads":
        setattr(attention, count, heads // cut.size)


class _LocalHeads:
    """A configuration that shows one module the number of its local heads."""

    def __init__(self, config: Any, num_attention_heads: int) -> None:
        self._config, self.num_attention_heads = config, num_attention_heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)


def cut_inside(cut: TensorCut, name: str, module: nn.Module, width: int) -> None:
    """Cut weights of a module inside attention that it has per head; other weights stay whole on every rank.

    Args:
        width: width of a head.

    Raises:
        ConfigError: weights over all heads together, while a rank has a part of the heads.
    """
    for attribute, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() == 2 and parameter.shape[-1] == width:
            heads = parameter.shape[0]
            if heads % cut.size and cut.size % heads == 0:
                _cut_shared_norm(cut, module, attribute, heads)
            else:
                cut.parameters.cut(module, attribute, 0, cut.ranges(name, heads))
        elif parameter.numel() in (1, width):
            cut.sum_gradient(parameter)
        else:
            raise cut.refusal("use strategy.tp=1", f"{name} looks at all heads together, of which a rank has a part")


def _cut_shared_norm(cut: TensorCut, module: nn.Module, attribute: str, heads: int) -> None:
    """Cut a norm's weights by key-value heads, which are fewer than ranks."""
    sharing = cut.size // heads
    head = cut.rank // sharing
    cut.parameters.cut(module, attribute, 0, [(head, head + 1)], owned=cut.rank % sharing == 0)
    cut.sum_gradient(getattr(module, attribute), cut.sharers(sharing))


def select_local_heads(cut: TensorCut, argument: str, heads: int) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A hook that keeps this rank's heads of an argument of shape ``(rows * heads, ...)``."""
    local = slice(cut.rank * heads // cut.size, (cut.rank + 1) * heads // cut.size)

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        all_heads = kwargs[argument]
        return args, {**kwargs, argument: all_heads.unflatten(0, (-1, heads))[:, local].flatten(0, 1)}

    return hook


def count_local_heads(cut: TensorCut, name: str, module: nn.Module, key_value_heads: tuple[int, int] | None) -> None:
    """Set an attention module's heads to this rank's; key-value heads, whole and here, are None if not cut."""
    counts = {count: value for count in HEAD_COUNTS if isinstance(value := module.__dict__.get(count), int)}
    groups = module.__dict__.get(GROUPS)
    if key_value_heads is not None and isinstance(groups, int):
        counts["query_heads"] = groups * key_value_heads[0]
    for count, heads in counts.items():
        if heads % cut.size:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise cut.refusal(f"use one of {fits}", f"it does not divide the {heads} of {name}'s {count}")
        if count != "query_heads":
            setattr(module, count, heads // cut.size)
    if key_value_heads is not None:
        if "query_heads" in counts:
            setattr(module, GROUPS, counts["query_heads"] // cut.size // key_value_heads[1])
        for count in KEY_VALUE_COUNTS:
            if isinstance(module.__dict__.get(count), int):
                setattr(module, count, key_value_heads[1])


SHARD = "vocabulary_shard"
"""The attribute of an output head that says which rows it holds; see :func:`shard_of`."""


def vocabulary_range(rank: int, size: int, vocabulary: int) -> tuple[int, int]:
    """Rows ``start`` to ``stop`` of ``rank``; ranges differ by one row at most."""
    return rank * vocabulary // size, (rank + 1) * vocabulary // size


@dataclass(frozen=True)
class VocabularyShard:
    """Rows ``start`` to ``stop`` of a vocabulary of ``whole``, the rest being with the other ranks of ``group``."""

    group: dist.ProcessGroup
    start: int
    stop: int
    whole: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, vocabulary: int) -> VocabularyShard:
        """The rows of this rank."""
        return cls(group, *vocabulary_range(group.rank(), group.size(), vocabulary), vocabulary)

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this shard for token ids, and a mask of the ids that it holds; other rows are arbitrary."""
        inside = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).clamp(0, self.stop - self.start - 1), inside

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole logits ``(..., whole)`` from the ranks' parts; gradients must be equal, each rank keeps its range."""
        return _GatherVocabulary.apply(logits, self)


def shard_of(head: nn.Module) -> VocabularyShard | None:
    """The rows of the vocabulary that ``head`` holds; None where it holds them all."""
    shard = getattr(head, SHARD, None)
    assert shard is None or isinstance(shard, VocabularyShard)
    return shard


class _GatherVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
        ctx.range = shard.start, shard.stop
        size = shard.group.size()
        ranges = [vocabulary_range(rank, size, shard.whole) for rank in range(size)]
        widest = max(stop - start for start, stop in ranges)
        parts = all_gather_parts(F.pad(logits, (0, widest - logits.shape[-1])), shard.group)
        return torch.cat([part[..., : b - a] for part, (a, b) in zip(parts, ranges, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[..., slice(*ctx.range)], None


def vocabulary_parallel_embedding(
    embedding: nn.Embedding, shard: VocabularyShard, sequence: SequenceSplit | None
) -> None:
    """Look up this rank's rows, else zeros, and sum in place, or under sequence parallelism in the first block."""
    look_up = embedding.forward  # a family's own look-up may scale the rows
    padding = embedding.padding_idx
    padding = padding - shard.start if padding is not None and shard.start <= padding < shard.stop else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        rows, inside = shard.locate(ids)
        partial = look_up(rows).masked_fill(~inside.unsqueeze(-1), 0.0)
        return sum_forward(partial, shard.group) if sequence is None else sequence.embed(partial)

    embedding.num_embeddings, embedding.padding_idx = shard.stop - shard.start, padding
    embedding.forward = forward  # type: ignore[method-assign, assignment]


def vocabulary_parallel_head(head: nn.Linear, shard: VocabularyShard, sequence: SequenceSplit | None) -> None:
    """Make ``head`` return whole logits by hooks, as a loss head may replace ``forward`` before or later."""

    def enter(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        # Where the sequence was split, gathering it sums the gradient already.
        return None if sequence is not None and sequence.active else (sum_backward(args[0], shard.group), *args[1:])

    def leave(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        return output if output.dim() < 2 else shard.gather(output)  # a loss, or one for each token

    setattr(head, SHARD, shard)
    head.out_features = shard.stop - shard.start
    head.register_forward_pre_hook(enter)
    head.register_forward_hook(leave)
