"""Private names of torch (checked against 2.13)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

PRIVATE = (
    "torch.distributed.distributed_c10d:ProcessGroupGloo",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options._devices",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options._threads",
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options._timeout",
    "torch.distributed.distributed_c10d:ProcessGroupGloo.create_device",
    "torch.distributed.distributed_c10d:ProcessGroupGloo.create_default_device",
    "torch.distributed.distributed_c10d:_resolve_process_group",
    "torch._dynamo:maybe_mark_dynamic",
    "torch._inductor.runtime.cache_dir_utils:cache_dir",
    "torch._inductor.runtime.cache_dir_utils:default_cache_dir",
    "torch._inductor.runtime.runtime_utils:default_cache_dir",
    "torch._inductor.codecache:default_cache_dir",
    "torch._inductor.codecache:_HEADER_DIR",
    "torch._inductor.codecache:_HEADER_LOCK_DIR",
    "torch:_foreach_norm",
    "torch:_foreach_mul_",
    "torch:_foreach_lerp_",
    "torch:_C._current_graph_task_id",
    "torch.autograd:_engine_run_backward",
    "torch.cuda:_is_in_bad_fork",
    "torch:Tensor._is_view",
    "torch:UntypedStorage._cdata",
    "torch._ops:OpOverload._schema",
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_leaves",
    "torch.utils._pytree:tree_map",
    "torch.nn:Module._parameters",
    "torch.nn:Module._buffers",
    "torch.nn:Module._modules",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init",
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.fsdp_params",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._module_info",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.unsharded_accumulated_grad",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.accumulate_unsharded_grad_if_needed",
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_accumulated_grad_if_needed",
)
OPERATORS = (
    "_efficient_attention_forward",
    "_flash_attention_backward",
    "_flash_attention_forward",
    "_grouped_mm",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_mm",
)
"""Names of the ATen operators for :func:`operator`."""


def operator(name: str) -> Any:
    """An operator of ``torch.ops.aten``, one of :data:`OPERATORS`."""
    return getattr(torch.ops.aten, name)


def mark_sizes(tensor: torch.Tensor, *dims: int) -> None:
    """Mark dimensions of ``tensor`` as dynamic for compiled code that does not depend on their size."""
    import torch._dynamo

    torch._dynamo.maybe_mark_dynamic(tensor, list(dims))


def foreach_norm(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """2-norms of plain tensors on one device, in float64."""
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def foreach_multiply(tensors: list[torch.Tensor], factor: float) -> None:
    """Scale plain tensors on one device in place."""
    torch._foreach_mul_(tensors, factor)


def foreach_lerp(tensors: list[torch.Tensor], to: list[torch.Tensor], share: float) -> None:
    """Interpolate plain tensors towards others in place, in the dtype of each."""
    same = [target.to(tensor.dtype) for tensor, target in zip(tensors, to, strict=True)]
    if same:
        torch._foreach_lerp_(tensors, same, share)


def in_backward_pass() -> bool:
    """Whether a backward pass is running, so that a forward pass is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def around_backward_passes(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Runs every backward pass of this process in the block inside ``around()``."""
    engine = torch.autograd._engine_run_backward

    def run(*args: Any, **options: Any) -> Any:
        with around():
            return engine(*args, **options)

    torch.autograd._engine_run_backward = run
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


def storage_key(storage: torch.UntypedStorage) -> int:
    """ID of a live storage, also of a meta tensor."""
    return int(storage._cdata)


def schema_of(operation: Any) -> Any:
    """Names, aliases and types of an operator's arguments."""
    return operation._schema


def local_slice(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offsets of this rank's shard."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offsets)


def find_fsdp_units(root: Any) -> None:
    """Let FSDP2 find the units of ``root`` now instead of in its first forward pass.

    A pipeline's forward pass runs one stage of the model at a time: FSDP2 would take units of the other for roots.
    """
    _fsdp_state(root)._lazy_init()


def fsdp_parameters(unit: Any) -> Iterator[tuple[Any, torch.nn.Parameter | None]]:
    """FSDP2's record of each parameter of a unit, and the parameter in the model now."""
    group = _fsdp_state(unit)._fsdp_param_group
    for record in [] if group is None else group.fsdp_params:
        place = record._module_info
        yield record, place.module._parameters[place.param_name]


def note_fsdp_gradient(record: Any) -> bool:
    """Whether a gathered parameter has a gradient; converts it to FSDP2's accumulation dtype."""
    if not hasattr(record, "_unsharded_param"):  # not gathered yet
        return False
    there = record._unsharded_param.grad is not None or record.unsharded_accumulated_grad is not None
    record.accumulate_unsharded_grad_if_needed()
    record.to_accumulated_grad_if_needed()
    return there


def _fsdp_state(unit: Any) -> Any:
    return unit._get_fsdp_state()


Function = TypeVar("Function", bound=Callable[..., Any])


def compile_function(function: Function) -> Function:
    """``torch.compile(function)``, with every cache in ``TORCHINDUCTOR_CACHE_DIR``.

    Inductor otherwise keeps headers and some caches in its default folder in ``/tmp``, which others can create first.
    """
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    cache_dir_utils.default_cache_dir = runtime_utils.default_cache_dir = cache_dir_utils.cache_dir
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        headers = os.path.join(cache_dir_utils.cache_dir(), "precompiled_headers")
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = headers, os.path.join(headers, "locks")  # type: ignore[attr-defined]
        codecache.default_cache_dir = cache_dir_utils.cache_dir  # type: ignore[attr-defined]
    return cast(Function, torch.compile(function))


def can_use_devices() -> bool:
    """Whether this process may use CUDA: False after a fork from a process that initialised it."""
    return not torch.cuda._is_in_bad_fork()


def group_of_name(name: str) -> dist.ProcessGroup:
    """Process group by its ``group_name``, which operators take instead."""
    return distributed_c10d._resolve_process_group(cast(Any, name))


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
