"""FSDP2 over the data-parallel axes: sharding, and the one meaning of the mixed precisions.

``bf16`` and ``fp16`` cast parameters and activations for compute, keep fp32 master weights, and reduce gradients in
fp32, or in bf16 where asked. FSDP2's mixed-precision policy is that, also on a mesh axis of size 1, so one process and
plain data parallelism get the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from mgpu_pipe.models.shard_units import FsdpUnit, sharding_units
from mgpu_pipe.system.compat.torch_private import fsdp_parameters, note_fsdp_gradient

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16_true": None, "fp8": torch.bfloat16}
"""What parameters are cast to for compute; None computes in their own type."""


@dataclass(frozen=True)
class ShardingOptions:
    """How ``strategy.fsdp`` and ``strategy.offload`` shape the sharding."""

    reshard_after_forward: bool | Literal["auto"] = "auto"
    prefetch: int = 1
    offload: bool = False
    """Keep shards and gradients in host memory, where the optimizer then runs."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """What gradients are sent in. FSDP2 also sums in it, but for what it has scattered: where replicas or a pipeline
    keep whole gradients over several micro-batches, the sums would be bf16's."""


def apply_fully_shard(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    precision: str,
    options: ShardingOptions | None = None,
    *,
    experts: Sequence[torch.nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> FSDPModule:
    """Apply ``fully_shard`` to each unit of ``model`` (see :func:`sharding_units`) and to its root, in place.

    The model may be on the meta device still; its parameters are then replaced shard by shard afterwards.

    Args:
        mesh: one axis, which shards; or ``(dp_replicate, dp_shard)``, whose sizes may be 1.
        precision: ``fp32``, ``bf16``, ``bf16_true``, ``fp16`` or ``fp8``.
        experts: modules that are units of their own on ``expert_mesh``, which has the form of ``mesh``: other ranks
            hold the same ones.

    Gradients are summed over the processes, not averaged: the loss is divided by the global token count already.
    """
    options = options or ShardingOptions()
    policy = _policy(mesh, precision, options)
    offload = CPUOffloadPolicy() if options.offload else OffloadPolicy()
    shards = mesh.size(mesh.ndim - 1) > 1
    if experts:
        assert expert_mesh is not None
        _shard_experts(experts, expert_mesh, precision, options, offload)
    shard = partial(
        fully_shard, mesh=mesh, shard_placement_fn=_placement(mesh), mp_policy=policy, offload_policy=offload
    )
    units = sharding_units(model)
    for unit in units:
        modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        # With nothing to shard, keeping the compute copy until the step's end saves a cast a forward pass.
        frees = shards or precision == "bf16_true"
        shard(modules, reshard_after_forward=frees and _reshard(unit, options))
    root = shard(model, reshard_after_forward=options.reshard_after_forward is True and shards)
    _sum_gradients(root)
    for unit in units:
        if not unit.in_backward:
            _sharded_module(unit).set_unshard_in_backward(False)
    if mesh.device_type != "cpu":  # a collective on the CPU ends before anything else begins
        _prefetch_forward(units, options.prefetch)
    return root


def _shard_experts(
    experts: Sequence[torch.nn.Module],
    mesh: DeviceMesh,
    precision: str,
    options: ShardingOptions,
    offload: OffloadPolicy,
) -> None:
    """Make each module of experts a unit on ``mesh``."""
    # Routing weights enter with the tokens and keep their precision.
    policy = replace(_policy(mesh, precision, options), cast_forward_inputs=False)
    for module in experts:
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=_placement(mesh),
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=_reshard(FsdpUnit((module,)), options),
        )


def _sum_gradients(root: FSDPModule) -> None:
    """Sum the gradients of all parameters over the processes, those without a gradient on some rank too."""
    assert isinstance(root, torch.nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Ranks may use different parameters in a pass (a branch that some samples take): all reduce all of them. FSDP2
    # before torch 2.13 cannot, and there ranks have to use the same.
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)


def _policy(mesh: DeviceMesh, precision: str, options: ShardingOptions) -> MixedPrecisionPolicy:
    sent = torch.bfloat16 if options.reduce == "bf16" and mesh.size() > 1 else torch.float32
    return MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[precision], reduce_dtype=sent)


def _placement(mesh: DeviceMesh | None) -> Callable[[torch.nn.Parameter], Shard | None]:
    """Along which dimension FSDP2 cuts a parameter; None is its rows.

    It pads the rows up to a multiple of the ranks: eight stacked experts on 64 ranks would be gathered as if they were
    64, and eight ranks would hold and update all of them. So another dimension is cut where rows leave more than a
    tenth of padding and that one leaves none. torchtitan does so for experts.
    """
    size = 1 if mesh is None else mesh.size(mesh.ndim - 1)

    def placement(parameter: torch.nn.Parameter) -> Shard | None:
        rows, *others = parameter.shape or (1,)
        if -(-rows // size) * size <= 1.1 * rows:
            return None
        return next((Shard(dim) for dim, length in enumerate(others, 1) if length % size == 0), None)

    return placement


def _reshard(unit: FsdpUnit, options: ShardingOptions) -> bool:
    return not unit.keep if options.reshard_after_forward == "auto" else options.reshard_after_forward


def _sharded_module(unit: FsdpUnit) -> FSDPModule:
    module = unit.modules[0]
    assert isinstance(module, FSDPModule)
    return module


def _prefetch_forward(units: Sequence[FsdpUnit], ahead: int) -> None:
    for index, unit in enumerate(units):
        following = [_sharded_module(other) for other in units[index + 1 : index + 1 + ahead]]
        if following:
            _sharded_module(unit).set_modules_to_forward_prefetch(following)


def set_gradient_sync(root: FSDPModule, last: bool, shards: bool) -> None:
    """Reduce over replicas in the step batch's last backward pass only; over shards in every one (or when it is free).

    Over shards, because whole gradients of all parameters would have to be kept otherwise; what is reduced over
    shards is summed up in fp32 until the last pass reduces the sum over replicas. ``set_is_last_backward`` stays as it
    is: without the tidying at the end of each pass, the next one's prefetch gathers a unit that nobody needs.
    """
    root.set_requires_all_reduce(last)
    if not shards:
        root.set_requires_gradient_sync(last)
        assert isinstance(root, torch.nn.Module)
        for module in root.modules():  # torch fails to put off the sync of a unit that never ran, such as a tower
            if isinstance(module, FSDPModule) and not any(part.requires_grad for part in module.parameters()):
                module.set_requires_gradient_sync(True, recurse=False)


def reshard_all(root: FSDPModule) -> None:
    """Free the gathered compute copies of every block, so that ``named_parameters()`` are the sharded masters again."""
    assert isinstance(root, torch.nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class UsedParameters:
    """Which parameters got a gradient on this process since :meth:`clear`.

    FSDP2 reduces zeros where a rank has none, so that ranks stay together; whether *any* rank had one decides
    between a gradient of zero and none, as in one process.

    Args:
        model: sharded, and filled.
        parameters: the ones to watch, in the order of :attr:`flags`.
    """

    def __init__(self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.flags = [False] * len(parameters)
        self._sharded: list[tuple[Any, int]] = []
        index = {id(parameter): number for number, parameter in enumerate(parameters)}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._watch(module, index)
                for record, parameter in fsdp_parameters(module):
                    if (number := index.get(id(parameter))) is not None:
                        self._sharded.append((record, number))

    def clear(self) -> None:
        self.flags[:] = [False] * len(self.flags)

    def note_gradients(self) -> None:
        """Record the gathered parameters that hold a gradient now.

        For backward passes that return gradients instead of accumulating them: no hook fires, and FSDP2 does not cast
        them to the type of the reduction. This method does.
        """
        for record, number in self._sharded:
            if note_fsdp_gradient(record):
                self.flags[number] = True

    def _watch(self, unit: torch.nn.Module, index: dict[int, int]) -> None:
        """Hook the unit's gathered parameters at its first forward pass; they last as long as the unit."""
        parameters = [
            (module, name, index[id(parameter)])
            for module in _modules_of_unit(unit)
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in index
        ]

        def on_first_forward(_: torch.nn.Module, __: object) -> None:
            handle.remove()
            for module, name, number in parameters:
                gathered = module._parameters[name]
                if gathered is not None and gathered.requires_grad and not isinstance(gathered, DTensor):
                    gathered.register_post_accumulate_grad_hook(partial(self._note_gradient, number))

        handle = unit.register_forward_pre_hook(on_first_forward)

    def _note_gradient(self, number: int, _: torch.Tensor) -> None:
        self.flags[number] = True


def _modules_of_unit(unit: torch.nn.Module) -> list[torch.nn.Module]:
    """``unit`` and the modules below it down to the next units."""
    modules, waiting = [], [unit]
    while waiting:
        module = waiting.pop()
        modules.append(module)
        waiting += [child for child in module.children() if not isinstance(child, FSDPModule)]
    return modules
