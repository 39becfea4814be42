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

from mgpu_pipe.parallel.context_blocks import Blocks
from mgpu_pipe.parallel.context_kernels import Gradients, Partial
from mgpu_pipe.parallel.ring import Wait, pass_on


def pass_keys_and_values(key_value: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending them to the next rank of the ring; the result waits for those of the one before."""
    return pass_on(key_value, group)


def pass_key_and_value_gradients(gradients: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending them after the keys and values that they belong to; the result waits for the ones to come."""
    return pass_on(gradients, group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        by_hop: tuple[Blocks, ...],
        scale: float,
    ) -> torch.Tensor:
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
        out = partial.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, partial.lse)
        ctx.group, ctx.by_hop, ctx.scale = group, by_hop, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        group, by_hop = ctx.group, ctx.by_hop
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
            gradients.take(grad_out, query, partial_key, partial_value, out, lse, blocks, ctx.scale)
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
        return gradients.query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype), None, None, None


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    by_hop: tuple[Blocks, ...],
    scale: float,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks of ``group``. A collective call, as is its backward.

    Args:
        query: (rows, heads, tokens of this rank, head size).
        key: (rows, key-value heads, tokens of this rank, head size), ``value`` too.
        by_hop: from :func:`~mgpu_pipe.parallel.context_blocks.ring_blocks`.
        scale: of the products of queries and keys.

    Returns:
        Of ``query``'s shape and type.
    """
    result = _RingAttention.apply(query, key, value, group, by_hop, scale)
    assert isinstance(result, torch.Tensor)
    return result
