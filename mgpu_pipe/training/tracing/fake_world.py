"""A world of ranks of which this process is one; its collectives send nothing (torch's ``fake`` process group)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from mgpu_pipe.system.compat.fake_tensors_private import fake_store
from mgpu_pipe.training.step_gradients import MicroBatchStop


@contextmanager
def process_group(ranks: int, rank: int) -> Iterator[dict[str, int]]:
    """A world that sends nothing; gives the sizes of the device's groups that this process is in, the world's aside."""
    sizes: dict[str, int] = {}
    new_group: Any = dist.new_group

    def new_fake_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*args, backend="fake", **options)
        if isinstance(group, dist.ProcessGroup) and backend != "gloo":  # gloo's are the host's
            sizes[group.group_name] = group.size()
        return group

    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    with (
        mock.patch.object(dist, "new_group", new_fake_group),
        mock.patch.object(device_mesh, "new_group", new_fake_group),
    ):
        yield sizes
    dist.destroy_process_group()


@contextmanager
def without_others() -> Iterator[None]:
    """Let what is received be zero, which the fake group leaves as it was, and whole numbers 1, which torch's stages
    tell one another where they know their shapes. And nobody is asked, by the clock, whether to stop."""
    receive: Any = dist.ProcessGroup.recv

    def received(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        with torch.no_grad():  # torch before 2.12 receives into leaves that need gradients
            for tensor in tensors:
                tensor.fill_(0 if tensor.is_floating_point() else 1)
        return receive(group, tensors, *args)

    never = mock.patch.object(MicroBatchStop, "should_leave", return_value=False)
    with mock.patch.object(dist.ProcessGroup, "recv", received), never:
        yield
