"""Private names of torch around fake tensors, which have shapes and no values (checked against 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only as tree_map_only

PRIVATE = (
    "torch._C._distributed_c10d:FakeWork",
    "torch._C:_set_only_lift_cpu_tensors",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:FakeTensor",
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init",
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "torch.utils._pytree:tree_map_only",
    "torch.cuda:_lazy_init",
    "torch:ops.aten._index_put_impl_",
    "torch:ops.aten._local_scalar_dense",
    "torch:ops.aten._pin_memory",
    "torch:ops.aten._to_copy",
)
ATEN = torch.ops.aten
READ_NUMBER = ATEN._local_scalar_dense.default
DEVICE_OF = torch.ops.prim.device.default
COPY_TO, COPY_INTO = ATEN._to_copy.default, ATEN.copy_.default
IS_PINNED, PIN = ATEN.is_pinned.default, ATEN._pin_memory.default
INDEXING = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default)


def fake_store() -> Any:
    """Store of the process group ``fake``."""
    return FakeStore()


def finished_work() -> Any:
    """Work of a collective that is done, as an operator of ``c10d`` returns it."""
    return FakeWork().boxed()


def lift_host_tensors_only(only: bool) -> None:
    """Let ``torch.tensor(..., device="cuda")`` make a tensor of the host, and a copy that is seen; this thread's."""
    torch._C._set_only_lift_cpu_tensors(only)


def _take_data(old: torch.Tensor, new: torch.Tensor) -> None:
    """Fake tensors, which others refer to weakly, cannot be swapped when a module is cast."""
    old.data = new.data


def _as_list(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu":
        return tensor.cpu().tolist()
    return [_as_list(row) for row in tensor] if tensor.dim() else tensor.item()


def prepare_fakes() -> None:
    """Let fake tensors be cast in modules, read as lists and used on streams, in this process from now on."""
    torch.utils.swap_tensors = _take_data
    FakeTensorMode.avoid_device_init = True  # type: ignore[method-assign, assignment]
    FakeTensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    FakeTensor.tolist = _as_list  # type: ignore[method-assign, assignment]


def answer_for_cuda(stream: type, synchronized: Callable[..., None], memory: int) -> None:
    """Let ``torch.cuda`` answer what a step asks of it, in this process from now on.

    Args:
        stream: class of streams and events.
        synchronized: called where the host waits for the device.
        memory: bytes of the device.
    """
    only = stream()
    answers: Mapping[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("_lazy_init", "set_device", "empty_cache", "set_rng_state", "reset_peak_memory_stats")),
        **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("current_stream", "default_stream", "stream"), only),
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(total_memory=memory, major=9, minor=0),
        "get_device_name": "pretended",
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = stream  # type: ignore[misc, assignment]
    torch.cuda.synchronize = synchronized
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_: None)
