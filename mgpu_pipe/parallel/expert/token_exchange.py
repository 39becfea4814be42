"""The collectives of expert parallelism: tokens travel to the ranks that hold their experts, and results back.

Every transfer is its own function, so that what a step sends can be counted by name. A transfer's backward pass
is the transfer the other way. Splits are uneven, so the ranks exchange their sizes first and read them on the host: the
only host sync of a layer. The two all-to-alls are those of Lepikhin et al. 2020 ("GShard", arXiv:2006.16668), without
a capacity, so no token is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Exchange:
    """Where each of this rank's assignments goes; an assignment is one of the ``top_k`` experts of one token.

    Attributes:
        group: the ranks that hold the experts, each a contiguous range of the same length.
        top_k: experts of a token.
        order: shape (assignments,); the assignments ordered by expert, and within an expert by token.
        place: shape (assignments,); where an assignment stands in ``order``.
        sent, received: rows to and from each rank of the group.
        experts: shape (rows received,); the number among this rank's own experts that each row is for.
    """

    group: dist.ProcessGroup
    top_k: int
    order: torch.Tensor
    place: torch.Tensor
    sent: list[int]
    received: list[int]
    experts: torch.Tensor

    @classmethod
    def from_assignments(cls, chosen: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Exchange:
        """Plan the exchange by each token's experts, (tokens, top_k). A collective call with a host sync."""
        assignments, size = chosen.reshape(-1), group.size()
        order = torch.argsort(assignments, stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.zeros(num_experts, dtype=torch.int64, device=assignments.device)
        counts.scatter_add_(0, assignments, torch.ones_like(assignments))
        incoming = exchange_counts(counts, group).view(size, -1)
        sent, received = torch.stack([counts.view(size, -1).sum(1), incoming.sum(1)]).tolist()
        local_experts = torch.arange(num_experts // size, device=assignments.device).repeat(size)
        experts = torch.repeat_interleave(local_experts, incoming.reshape(-1), output_size=sum(received))
        return cls(group, chosen.shape[1], order, place, sent, received, experts)


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange row counts, (experts,): send those per expert, receive those per rank and local expert."""
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    return incoming


def dispatch_tokens(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sends token rows to the ranks of their experts."""
    return _all_to_all(rows, exchange.sent, exchange.received, exchange.group)


def return_token_gradients(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Returns gradients of the dispatched rows to the ranks of their tokens."""
    return _all_to_all(rows, exchange.received, exchange.sent, exchange.group)


def return_outputs(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Returns the experts' outputs to the ranks of their tokens."""
    return _all_to_all(rows, exchange.received, exchange.sent, exchange.group)


def dispatch_output_gradients(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sends gradients of the experts' outputs to the ranks of the experts."""
    return _all_to_all(rows, exchange.sent, exchange.received, exchange.group)


def gather_outputs(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers the combined outputs of all tensor-parallel ranks' slices of the tokens."""
    return _all_gather(rows, group)


def gather_slice_gradients(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers gradients of the tokens, or of their weights, from all tensor-parallel ranks' slices."""
    return _all_gather(rows, group)


def _all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


def _all_gather(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(rows.shape[0] * group.size(), *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.shape = exchange, tokens.shape
        return dispatch_tokens(tokens.index_select(0, exchange.order // exchange.top_k), exchange)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange: Exchange = ctx.exchange
        assignments = return_token_gradients(gradient, exchange).index_select(0, exchange.place)
        # Summed slot by slot: an indexed accumulation is not deterministic on CUDA.
        return assignments.view(ctx.shape[0], exchange.top_k, *ctx.shape[1:]).sum(1), None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return return_outputs(outputs, exchange).index_select(0, exchange.place)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dispatch_output_gradients(gradient.index_select(0, ctx.exchange.order), ctx.exchange), None


def to_experts(tokens: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The rows for this rank's experts, (rows received, width), of this rank's ``tokens``, (tokens, width), and the
    others'. Rows come by source rank, then by expert, then by token. A collective call, also in the backward pass."""
    result: torch.Tensor = _Dispatch.apply(tokens, exchange)
    return result


def from_experts(outputs: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The experts' outputs for this rank's assignments, (tokens * top_k, width), from ``outputs`` in the order of
    :func:`to_experts`. A collective call, also in the backward pass."""
    result: torch.Tensor = _Return.apply(outputs, exchange)
    return result


def slice_range(rows: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """The range of ``rows`` that this rank of ``group`` takes; ranges are equal but the last ones may be shorter."""
    each = -(-rows // group.size())
    start = min(group.rank() * each, rows)
    return start, min(start + each, rows)


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.rows = group, rows.shape[0]
        start, stop = slice_range(rows.shape[0], group)
        return rows[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_slice_gradients(_pad(gradient, ctx.rows, ctx.group), ctx.group)[: ctx.rows], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.range = slice_range(rows, group)
        return gather_outputs(_pad(local, rows, group), group)[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start, stop = ctx.range
        return gradient[start:stop], None, None


def _pad(local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    missing = -(-rows // group.size()) - local.shape[0]
    return torch.cat([local, local.new_zeros(missing, *local.shape[1:])]) if missing else local


def local_slice(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of ``rows``, which all ranks of ``group`` hold alike. In the backward pass a collective call:
    every rank gets the gradient of all rows, as what lies before is computed by every rank alike."""
    result: torch.Tensor = _Slice.apply(rows, group)
    return result


def gathered_slices(local: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All ``rows`` rows from every rank's :func:`local_slice`. A collective call. The gradient, equal on all ranks, is
    not summed: each rank takes its part of it."""
    result: torch.Tensor = _Gather.apply(local, rows, group)
    return result
