"""Private names of torch's gloo (checked against 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

PRIVATE = (
    "torch.distributed.distributed_c10d:ProcessGroupGloo",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options._devices",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options._threads",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options._timeout",
    "torch.distributed.distributed_c10d:ProcessGroupGloo.create_device",
    "torch.distributed.distributed_c10d:ProcessGroupGloo.create_default_device",
)
GLOO: Any = distributed_c10d.ProcessGroupGloo


@contextmanager
def gloo_groups_built_by(build: Callable[[dist.Store, int, int, timedelta], Any]) -> Iterator[None]:
    """Builds every gloo group in the block by ``build``, from a store, a rank, a size and a timeout."""
    module: Any = distributed_c10d

    class Builder(type):
        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            return build(store, rank, size, timeout)

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, GLOO)

    module.ProcessGroupGloo = Builder("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        module.ProcessGroupGloo = GLOO


def gloo_device(interface: str) -> Any:
    """A gloo device that listens at ``interface``, or at gloo's choice if it is empty."""
    # connected when the group is built, whatever TORCH_GLOO_LAZY_INIT says
    return (
        GLOO.create_device(interface=interface, lazy_init=False)
        if interface
        else GLOO.create_default_device(lazy_init=False)
    )


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> Any:
    """A gloo group that connects through ``devices``."""
    options = GLOO._Options()
    options._devices, options._threads, options._timeout = devices, 2 * len(devices), timeout
    return GLOO(store, rank, size, options)
