"""Passing a tensor round the processes of a group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Wait = Callable[[], torch.Tensor]


def pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> Wait:
    """Start sending ``tensor`` to the next rank of the ring; the result waits for that of the one before, of the same
    shape. Collective."""
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

    # What is being sent must outlive the sending.
    wait.sent = tensor  # type: ignore[attr-defined]
    return wait
