"""Gradients of a step batch after its last backward pass: reduced, with their norm and the votes of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.models.local_shards import layouts_of
from mgpu_pipe.optim.gradients import counted_norm, gradient_norm
from mgpu_pipe.parallel.ddp import GradientReducer
from mgpu_pipe.parallel.device_memory import to_device
from mgpu_pipe.parallel.fsdp import UsedParameters, set_gradient_sync
from mgpu_pipe.training.step import VOTES, StepVotes


class StepGradients:
    """Gradients of one rank's parameters over a step batch, however they are reduced.

    Args:
        parameters: those that are trained, of this rank.
        reducer: sums whole gradients; or
        used: watches the parameters of a model that FSDP2 shards; or, in one process, neither.
        counts_in_norm: for each parameter whether this rank's part counts in the norm, where the model is cut (see
            :func:`counted_once`); None where only FSDP2 shards it.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        reducer: GradientReducer | None,
        used: UsedParameters | None,
        counts_in_norm: list[bool] | None,
        device: torch.device,
    ) -> None:
        self._parameters, self._reducer, self._used = parameters, reducer, used
        self._counts_in_norm, self._device = counts_in_norm, device

    def begin(self) -> None:
        """Forget the last step batch's gradients."""
        if self._reducer is not None:
            # Here, not after the update: Lightning and its callbacks may have set gradients to None since.
            self._reducer.zero()
        if self._used is not None:
            self._used.clear()

    def begin_backward(self, last: bool, sharded: FSDPModule | None, shards: bool) -> None:
        """Announce a micro-batch; ``last`` is the step batch's last. A pipeline does so by itself."""
        if self._reducer is not None:
            self._reducer.start(last)
        elif sharded is not None:
            set_gradient_sync(sharded, last, shards)

    def note_gradients(self) -> None:
        """See :meth:`UsedParameters.note_gradients`."""
        if self._used is not None:
            self._used.note_gradients()

    def zero(self) -> None:
        """Free the gradients; the reducer's stay in its buckets and are cleared when the next step batch starts."""
        if self._reducer is None:
            for parameter in self._parameters:
                parameter.grad = None

    def drop(self) -> None:
        """Have no gradients, so that an update changes nothing."""
        for parameter in self._parameters:
            parameter.grad = None

    def end(
        self,
        loss_sum: torch.Tensor,
        votes: StepVotes,
        step_batch: StepBatch,
        reduce_axes: Callable[[], Sequence[torch.nn.Parameter]],
    ) -> tuple[float, float, StepVotes]:
        """The step batch's global loss, its gradient norm, and the votes of all ranks. A collective call.

        Gradients that no process produced are None afterwards, as in one process, and not the zeros that were reduced.

        Args:
            loss_sum: this rank's part of the sum of losses, a float64 scalar.
            reduce_axes: sums, where the model is cut, what its ranks have parts of; gives the parameters whose
                gradient is that of other ranks too.
        """
        used, parameters = self._gradient_flags()
        shared: Sequence[torch.nn.Parameter] = ()
        if self._counts_in_norm is None:
            # One small all-reduce of the loss, the votes, and which gradients exist.
            sums = _all_reduced(torch.cat([loss_sum.reshape(1), self._on_device([*votes.as_list(), *used])]))
            flags = sums[1 + VOTES :]
            norm = gradient_norm(self._parameters, self._device)
        else:
            by_mesh = _by_mesh(parameters)
            order = [index for indices in by_mesh.values() for index in indices]
            parameters = [parameters[index] for index in order]
            values = self._on_device([*votes.as_list(), *(used[index] for index in order)])
            sums = _all_reduced(torch.cat([loss_sum.reshape(1), values[:VOTES]]))
            flags = values[VOTES:]
            _sum_flags(flags, by_mesh)
            shared = reduce_axes()
            norm = counted_norm(self._parameters, self._counts_in_norm, self._device)
        unused = flags == 0
        # One host sync for everything that the host decides by.
        decisive = [sums[0] / step_batch.loss_divisor, norm, unused.sum().double(), *sums[1 : 1 + VOTES]]
        loss, total, missing, *counts = torch.stack(decisive).tolist()
        if missing:
            for parameter, is_unused in zip(parameters, unused.tolist(), strict=True):
                if is_unused and not any(parameter is other for other in shared):
                    parameter.grad = None
        return loss, total, StepVotes.from_sums(counts)

    def _gradient_flags(self) -> tuple[list[bool], list[torch.nn.Parameter]]:
        """Wait for running reductions; returns whether each parameter got a gradient here, and the parameters."""
        if self._reducer is not None:
            return self._reducer.finish(), self._reducer.parameters
        if self._used is not None:
            return self._used.flags, self._parameters
        return [], []

    def _on_device(self, values: list[float]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.float64), self._device)


def _by_mesh(parameters: list[torch.nn.Parameter]) -> dict[DeviceMesh, list[int]]:
    """The indices of the parameters that each mesh shards."""
    by_mesh: dict[DeviceMesh, list[int]] = {}
    for index, parameter in enumerate(parameters):
        assert isinstance(parameter, DTensor)
        by_mesh.setdefault(parameter.device_mesh, []).append(index)
    return by_mesh


def _sum_flags(flags: torch.Tensor, by_mesh: dict[DeviceMesh, list[int]]) -> None:
    """Sum, in place, the flags of each mesh's parameters over its ranks, which hold parts of them. Collective."""
    for mesh, of_mesh in zip(by_mesh, flags.split([len(indices) for indices in by_mesh.values()]), strict=True):
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                dist.all_reduce(of_mesh, group=mesh.get_group(dim))


def counted_once(model: torch.nn.Module) -> list[bool]:
    """For each trained parameter whether this rank's part counts in the norm: every element on one rank."""
    layouts = layouts_of(model)
    counts_in_norm = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layout = layouts.get(name)
        counts = layout is None or layout.owned
        if counts and isinstance(parameter, DTensor):
            coordinate = parameter.device_mesh.get_coordinate()
            assert coordinate is not None
            counts = all(
                coordinate[dim] == 0 for dim, kind in enumerate(parameter.placements) if isinstance(kind, Replicate)
            )
        counts_in_norm.append(counts)
    return counts_in_norm


def _all_reduced(values: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
