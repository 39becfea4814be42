"""Ring attention: keys and values travel around the ranks, and queries stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.parallel.context.kernels import Gradients, Partial, wide
from mgpu_pipe.parallel.context.sequences import SequenceContext, sequences_of

Wait = Callable[[], torch.Tensor]


def pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending ``tensor`` to the next rank of the ring. A collective call.

    The returned function waits for the tensor of the previous rank, which has the same shape.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    following = dist.get_global_rank(group, (rank + 1) % size)
    before = dist.get_global_rank(group, (rank - 1) % size)
    arriving = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, following, group), dist.P2POp(dist.irecv, arriving, before, group)]
    )

    def wait() -> torch.Tensor:
        for work in works:
            work.wait()
        return arriving

    # The tensor must outlive the transfer.
    wait.sent = tensor  # type: ignore[attr-defined]
    return wait


def pass_keys_and_values(key_value: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending keys and values to the next rank; the result waits for those of the previous rank."""
    return pass_on(key_value, group)


def pass_key_and_value_gradients(gradients: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending gradients to the next rank, like their keys and values; the result waits for those that arrive."""
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
    local_gradient = gradients.key_value
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
            # Add these keys' gradients from the ranks that had them before; the first of those started the sum.
            if arriving is not None:
                gradients.key_value += arriving()
            arriving = pass_key_and_value_gradients(gradients.key_value, group)
        if wait is not None:
            travelling = wait()
            partial_key, partial_value = travelling.unbind()
    if arriving is not None:
        local_gradient += arriving()
    return gradients.query.to(query.dtype), local_gradient.to(key.dtype)


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
            grad_query, grad_key_value = _compiled_backward(
                grad_out, query, key, value, out, lse, documents, ctx.axis, ctx.scale
            )
        else:
            grad_query, grad_key_value = _backward(grad_out, query, key, value, out, lse, ctx.sequences, ctx.scale)
        return grad_query, grad_key_value[0], grad_key_value[1], None, None, None, None


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: SequenceContext, scale: float
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks that share ``sequences``. A collective call, as is its
    backward.

    Args:
        query: (rows, heads, tokens of this rank, head size).
        key: (rows, key-value heads, tokens of this rank, head size), ``value`` too.
        scale: factor of the products of queries and keys.

    Returns:
        The output, of ``query``'s shape and type.
    """
    result = _RingAttention.apply(query, key, value, sequences.documents, sequences, sequences.axis.name, scale)
    assert isinstance(result, torch.Tensor)
    return result
