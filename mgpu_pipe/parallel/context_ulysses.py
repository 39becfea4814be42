"""Ulysses: an all-to-all turns a part of the sequence with all heads into the whole sequence with some heads, and
attention is local (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509).

With n ranks and S bytes of queries, keys and values (and as many of the output) on a rank, it sends S(n-1)/n before
and S_out(n-1)/n after attention, and the same in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.parallel.context_blocks import Blocks
from mgpu_pipe.parallel.context_kernels import Gradients, Partial


def sequence_to_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """From (rows, heads, tokens / n, size) on every rank to (rows, heads / n, tokens, size), in one all-to-all."""
    size = dist.get_world_size(group)
    if size == 1:
        return list(tensors)
    sent = torch.cat([tensor.unflatten(1, (size, -1)) for tensor in tensors], dim=2).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # (source, rows, heads, tokens, size): the sources' tokens follow one another.
    gathered = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return list(gathered.split([tensor.shape[1] // size for tensor in tensors], dim=1))


def heads_to_sequence(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The reverse of :func:`sequence_to_heads`."""
    size = dist.get_world_size(group)
    if size == 1:
        return list(tensors)
    sent = torch.cat(list(tensors), dim=1).unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # (source, rows, heads, tokens, size): the sources' heads follow one another, tensor by tensor. Tokens come before
    # heads in memory, as the projections around attention have them.
    parts = received.split([tensor.shape[1] for tensor in tensors], dim=2)
    return [part.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2) for part in parts]


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(sequence_to_heads(tensors, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *heads_to_sequence(gradients, ctx.group)


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return heads_to_sequence([tensor], group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, sequence_to_heads([gradient], ctx.group)[0]


class _BlockAttention(torch.autograd.Function):
    """Attention of whole sequences inside their documents, without a mask."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, scale: float
    ) -> torch.Tensor:
        partial = Partial(query)
        partial.take(query, key, value, blocks, scale)
        out = partial.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, partial.lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        gradients = Gradients(query, key, value)
        gradients.take(grad_out, query, key, value, out, lse, ctx.blocks, ctx.scale)
        grad_key, grad_value = gradients.key_value.to(key.dtype).unbind()
        return gradients.query.to(query.dtype), grad_key, grad_value, None, None


def ulysses_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, blocks: Blocks, scale: float
) -> torch.Tensor:
    """Attention over whole sequences, whose tokens the ranks of ``group`` share. A collective call, as its backward.

    Key-value heads that the ranks do not divide are repeated as often as they have to be, and no more.

    Args:
        query: (rows, heads, tokens of this rank, head size); the ranks divide ``heads``.
        key: (rows, key-value heads, tokens of this rank, head size), ``value`` too.
        blocks: from :func:`~mgpu_pipe.parallel.context_blocks.whole_blocks`.
        scale: of the products of queries and keys.

    Returns:
        Of ``query``'s shape and type.

    Raises:
        ValueError: heads that the ranks do not divide.
    """
    size, heads, key_heads = dist.get_world_size(group), query.shape[1], key.shape[1]
    if heads % size:
        raise ValueError(f"{heads} attention heads cannot be shared by {size} ranks: use strategy.context.method=ring")
    repeats = lcm(key_heads, size) // key_heads
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    local_query, local_key, local_value = _SequenceToHeads.apply(group, query, key, value)
    out = _BlockAttention.apply(local_query, local_key, local_value, blocks, scale)
    result = _HeadsToSequence.apply(group, out)
    assert isinstance(result, torch.Tensor)
    return result
