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

from mgpu_pipe.parallel.context.kernels import Gradients, Partial, wide
from mgpu_pipe.parallel.context.sequences import SequenceContext, sequences_of


def sequence_to_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """From (rows, heads, tokens / n, size) on every rank to (rows, heads / n, tokens, size) of all the tensors, one
    after another along their heads, in one all-to-all."""
    size = dist.get_world_size(group)
    sent = torch.cat([tensor.unflatten(1, (size, -1)) for tensor in tensors], dim=2).movedim(1, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # (source, rows, heads, tokens, size): the sources' tokens follow one another.
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_to_sequence(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The reverse of :func:`sequence_to_heads`; tokens come before heads, as the projections around attention have
    them: (rows, tokens / n, heads, size)."""
    size = dist.get_world_size(group)
    sent = torch.cat(list(tensors), dim=1).unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    # (source, rows, heads, tokens, size): the sources' heads follow one another, tensor by tensor.
    parts = received.split([tensor.shape[1] for tensor in tensors], dim=2)
    # A copy also where rows and heads are single: the outputs of an operator share no memory.
    return [part.permute(1, 3, 0, 2, 4).clone(memory_format=torch.contiguous_format).flatten(2, 3) for part in parts]


def _split(gathered: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, which have ``heads`` heads, keys and values."""
    others = (gathered.shape[1] - heads) // 2
    query, key, value = gathered.split([heads, others, others], dim=1)
    return query, key, value


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: SequenceContext, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, tokens before heads; what every rank has of queries, keys and values, whole sequences of some heads;
    their output, tokens before heads; its log-sum-exps."""
    group = sequences.axis.group
    gathered = sequence_to_heads([query, key, value], group)
    local_query, local_key, local_value = _split(gathered, query.shape[1] // sequences.axis.size)
    partial = Partial(local_query)
    partial.take(local_query, local_key, local_value, sequences.whole, scale)
    out = partial.out.transpose(1, 2).to(query.dtype)
    (result,) = heads_to_sequence([out.transpose(1, 2)], group)
    return result, gathered, out, partial.lse


def _backward(
    grad: torch.Tensor,
    gathered: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: SequenceContext,
    scale: float,
) -> list[torch.Tensor]:
    """Gradients of this rank's queries, keys and values, tokens before heads."""
    group = sequences.axis.group
    local_query, local_key, local_value = _split(gathered, out.shape[2])
    gradients = Gradients(local_query, local_key, local_value)
    grad_out = sequence_to_heads([grad], group)
    gradients.take(grad_out, local_query, local_key, local_value, out.transpose(1, 2), lse, sequences.whole, scale)
    local = (gradients.query, *gradients.key_value.unbind())
    return heads_to_sequence([gradient.to(gathered.dtype) for gradient in local], group)


@torch.library.custom_op("mgpu_pipe::ulysses_forward", mutates_args=())
def _compiled_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor, axis: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(query, key, value, sequences_of(documents, axis), scale)


@_compiled_forward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, _: torch.Tensor, documents: torch.Tensor, *__: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, heads, tokens, width = query.shape
    whole, shared = documents.shape[1], documents.shape[1] // tokens
    return (
        query.new_empty(rows, tokens, heads, width),
        query.new_empty(rows, (heads + 2 * key.shape[1]) // shared, whole, width),
        query.new_empty(rows, whole, heads // shared, width),
        query.new_empty(rows, heads // shared, whole, dtype=wide(query)),
    )


@torch.library.custom_op("mgpu_pipe::ulysses_backward", mutates_args=())
def _compiled_backward(
    grad: torch.Tensor,
    gathered: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: torch.Tensor,
    axis: str,
    scale: float,
) -> list[torch.Tensor]:
    return _backward(grad, gathered, out, lse, sequences_of(documents, axis), scale)


@_compiled_backward.register_fake
def _(
    grad: torch.Tensor, gathered: torch.Tensor, _: torch.Tensor, __: torch.Tensor, documents: torch.Tensor, *___: object
) -> list[torch.Tensor]:
    rows, heads, tokens, width = grad.shape
    shared = documents.shape[1] // tokens
    others = (gathered.shape[1] * shared - heads) // 2
    return [grad.new_empty(rows, tokens, number, width, dtype=gathered.dtype) for number in (heads, others, others)]


class _UlyssesAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: torch.Tensor,
        sequences: SequenceContext,
        axis: str,
        scale: float,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            result, gathered, out, lse = _compiled_forward(query, key, value, documents, axis, scale)
        else:
            result, gathered, out, lse = _forward(query, key, value, sequences, scale)
        ctx.save_for_backward(gathered, out, lse, documents)
        ctx.sequences, ctx.axis, ctx.scale = sequences, axis, scale
        return result.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gathered, out, lse, documents = ctx.saved_tensors
        if torch.compiler.is_compiling():
            gradients = _compiled_backward(grad, gathered, out, lse, documents, ctx.axis, ctx.scale)
        else:
            gradients = _backward(grad, gathered, out, lse, ctx.sequences, ctx.scale)
        query, key, value = gradients
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, None, None


def ulysses_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: SequenceContext, scale: float
) -> torch.Tensor:
    """Attention over whole ``sequences``, whose tokens ranks share. A collective call, as its backward.

    Key-value heads that the ranks do not divide are repeated as often as needed.

    Args:
        query: (rows, heads, tokens of this rank, head size); the ranks divide ``heads``.
        key: (rows, key-value heads, tokens of this rank, head size), ``value`` too.
        scale: factor of the products of queries and keys.

    Returns:
        The output, of ``query``'s shape and type.

    Raises:
        ValueError: the ranks do not divide the heads.
    """
    size, heads, key_heads = sequences.axis.size, query.shape[1], key.shape[1]
    if heads % size:
        raise ValueError(f"{heads} attention heads cannot be shared by {size} ranks: use strategy.context.method=ring")
    repeats = lcm(key_heads, size) // key_heads
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    result = _UlyssesAttention.apply(query, key, value, sequences.documents, sequences, sequences.axis.name, scale)
    assert isinstance(result, torch.Tensor)
    return result
