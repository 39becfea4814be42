"""Tied embeddings whose two uses are on different pipeline ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.models.parts import local_tensor
from mgpu_pipe.parallel.pipeline_stages import tied_parameter


@torch.no_grad()
def reduce_tied_gradients(model: nn.Module, group: dist.ProcessGroup, first_rank: int, last_rank: int) -> None:
    """Give both copies of a tied weight the sum of their gradients; a collective call of the two ranks that have one.

    To be called once a step batch, after the gradients were reduced over the data-parallel ranks and before norm and
    clipping; other ranks return at once. Both ranks add the same two numbers, so the sums, and with them the weights
    after the optimizer's step, are equal to the bit. Shards of FSDP2 line up, for both ranks cut the same shape over
    meshes of the same sizes.

    Args:
        group: the pipeline's.
        first_rank: the rank in it that holds the first stage, ``last_rank`` that which holds the last one.
    """
    tied = tied_parameter(model)
    if tied is None or not tied[1].requires_grad:
        return
    _, parameter = tied
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    own = local_tensor(parameter.grad)
    if own.numel() == 0:  # this shard's part of both copies
        return
    here = dist.get_rank(group)
    other = last_rank if here == first_rank else first_rank
    sent = own.contiguous()
    received = torch.empty_like(sent)
    peer = dist.get_global_rank(group, other)
    operations = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    own.add_(received)
