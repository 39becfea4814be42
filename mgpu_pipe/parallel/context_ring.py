"""Ring attention: keys and values go round the ranks that share a sequence, queries stay (Liu et al. 2023, "Ring
Attention with Blockwise Transformers", arXiv:2310.01889).

Partial results are merged by their log-sum-exps. The backward pass sends keys and values round again, and with them
their gradients in fp32, to which every rank adds its own part; they end where they belong. With n ranks and S bytes of
keys and values on each, a rank sends (n-1) S in the forward pass, and in the backward pass (n-1) S and n-1 times
those bytes in fp32. What comes next is on its way while a rank computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.parallel.context_kernels import Gradients, Partial, wide
from mgpu_pipe.parallel.context_sequences import SequenceContext, sequences_of
from mgpu_pipe.parallel.ring import Wait, pass_on


def pass_keys_and_values(key_value: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending them to the next rank of the ring; the result waits for those of the one before."""
    return pass_on(key_value, group)


def pass_key_and_value_gradients(gradients: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending them after the keys and values that they belong to; the result waits for the ones to come."""
    return pass_on(gradients, group)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: SequenceContext, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, tokens before heads, and the log-sum-exps."""
    group, by_hop = sequences.axis.group, sequences.by_hop
    partial = Partial(query)
    partial_key, partial_value = key, value
    travelling = torch.stack([key, value]) if len(by_hop) > 1 else None
    for hop, blocks in enumerate(by_hop):
        wait = None
        if travelling is not None and hop + 1 < len(by_hop):
            wait = pass_keys_and_values(travelling, group)
        partial.take(query, partial_key, partial_value, blocks, scale)
        if wait is not None:
            travelling = wait()
            partial_key, partial_value = travelling.unbind()
    return partial.out.transpose(1, 2).to(query.dtype), partial.lse


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: SequenceContext,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the queries, and of the keys and values together, (2, *key.shape)."""
    group, by_hop = sequences.axis.group, sequences.by_hop
    gradients = Gradients(query, key, value)
    own = gradients.key_value
    partial_key, partial_value = key, value
    travelling = torch.stack([key, value]) if len(by_hop) > 1 else None
    arriving: Wait | None = None
    for hop, blocks in enumerate(by_hop):
        wait = None
        if travelling is not None and hop + 1 < len(by_hop):
            wait = pass_keys_and_values(travelling, group)
        if hop > 0:
            gradients.start(partial_key, partial_value)
        gradients.take(grad_out, query, partial_key, partial_value, out, lse, blocks, scale)
        if hop > 0:
            # These keys' gradients from the ranks that had them before; the first of those started the sum.
            if arriving is not None:
                gradients.key_value += arriving()
            arriving = pass_key_and_value_gradients(gradients.key_value, group)
        if wait is not None:
            travelling = wait()
            partial_key, partial_value = travelling.unbind()
    if arriving is not None:
        own += arriving()
    return gradients.query.to(query.dtype), own.to(key.dtype)


@torch.library.custom_op("mgpu_pipe::ring_forward", mutates_args=())
def _compiled_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: torch.Tensor, axis: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(query, key, value, sequences_of(documents, axis), scale)


@_compiled_forward.register_fake
def _(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, tokens, size = query.shape
    return query.new_empty(rows, tokens, heads, size), query.new_empty(rows, heads, tokens, dtype=wide(query))


@torch.library.custom_op("mgpu_pipe::ring_backward", mutates_args=())
def _compiled_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: torch.Tensor,
    axis: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _backward(grad_out, query, key, value, out, lse, sequences_of(documents, axis), scale)


@_compiled_backward.register_fake
def _(_: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *__: object) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(2, *key.shape)


class _RingAttention(torch.autograd.Function):
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
            out, lse = _compiled_forward(query, key, value, documents, axis, scale)
        else:
            out, lse = _forward(query, key, value, sequences, scale)
        out = out.transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, lse, documents)
        ctx.sequences, ctx.axis, ctx.scale = sequences, axis, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, documents = ctx.saved_tensors
        if torch.compiler.is_compiling():
            found = _compiled_backward(grad_out, query, key, value, out, lse, documents, ctx.axis, ctx.scale)
        else:
            found = _backward(grad_out, query, key, value, out, lse, ctx.sequences, ctx.scale)
        grad_query, grad_key_value = found
        return grad_query, grad_key_value[0], grad_key_value[1], None, None, None, None


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: SequenceContext, scale: float
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks that share ``sequences``. A collective call, as is its
    backward.

    Args:
        query: (rows, heads, tokens of this rank, head size).
        key: (rows, key-value heads, tokens of this rank, head size), ``value`` too.
        scale: of the products of queries and keys.

    Returns:
        Of ``query``'s shape and type.
    """
    result = _RingAttention.apply(query, key, value, sequences.documents, sequences, sequences.axis.name, scale)
    assert isinstance(result, torch.Tensor)
    return result
