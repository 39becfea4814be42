"""FSDP2 over the data-parallel axes: sharding, and the one meaning of bf16.

``bf16`` casts parameters and activations to bf16 for compute, keeps fp32 master weights, and reduces gradients in
fp32. FSDP2's mixed-precision policy is that, also on a mesh axis of size 1, so one process and plain data
parallelism get the same policy (DESIGN 7).
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def decoder_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a model: the members of its longest ``ModuleList`` of like modules."""
    longest: list[torch.nn.Module] = []
    for module in model.modules():
        is_longer = isinstance(module, torch.nn.ModuleList) and len(module) > len(longest)
        if is_longer and len({type(member) for member in module.children()}) == 1:
            longest = list(module.children())
    return longest


def apply_fully_shard(model: torch.nn.Module, mesh: DeviceMesh, precision: str) -> FSDPModule:
    """Apply ``fully_shard`` to each block and the root of ``model``, in place.

    Args:
        mesh: two axes, ``(dp_replicate, dp_shard)``; each may be of size 1.
        precision: ``fp32`` or ``bf16``.

    Gradients are summed over the processes, not averaged: the loss is divided by the global token count already.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if precision == "fp32" else COMPUTE_DTYPES[precision], reduce_dtype=torch.float32
    )
    # With nothing to shard, keeping the compute copy until the step's end saves a cast a forward pass.
    reshard = mesh.size(1) > 1
    for block in decoder_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def set_gradient_sync(root: FSDPModule, last: bool, shards: bool) -> None:
    """Reduce over replicas in the window's last backward pass only; over shards in every one (or when it is free)."""
    root.set_requires_all_reduce(last)
    if not shards:
        root.set_requires_gradient_sync(last)
    root.set_is_last_backward(last)


def reshard_all(root: FSDPModule) -> None:
    """Free the gathered compute copies of every block, so that ``named_parameters()`` are the sharded masters again."""
    assert isinstance(root, torch.nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
