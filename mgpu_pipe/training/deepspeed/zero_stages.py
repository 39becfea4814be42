"""The fields of DeepSpeed's ZeRO optimizers (checked against DeepSpeed 0.19), by stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mgpu_pipe.system.compat.deepspeed_private import (
    forget_swapped_in,
    is_swapped,
    keep_one_copy,
    publish_masters,
    swap_in,
    swap_out,
    take_over_gradients,
)
from mgpu_pipe.training.deepspeed.zero_state import Fragment, ZeroState, is_flat


class ZeroTwoState(ZeroState):
    """Stages 1 and 2: whole weights on every rank, in one flat buffer a group that the ranks cut equally."""

    def __init__(self, zero: Any, names: Mapping[int, str], rank: int) -> None:
        self._rank = rank
        fragments: list[Fragment] = []
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[group])
            low, high = rank * size, (rank + 1) * size
            for parameter, offset in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
                start, stop = max(low, offset), min(high, offset + parameter.numel())
                if start < stop:
                    name, shape = names[id(parameter)], tuple(parameter.shape)
                    fragments.append(Fragment(name, shape, start - offset, stop - start, group, start - low))
        super().__init__(zero, fragments)
        if zero.dtype == torch.float32 and not zero.cpu_offload:
            self._keep_one_copy()

    def _keep_one_copy(self) -> None:
        """Let fp32 weights be their own masters, and gradients go straight into this rank's part.

        DeepSpeed keeps a second copy of the weights, and whole gradients of the parameters at the part's ends; where it
        casts gradients to fp32, it adds them up in the part itself.
        """
        for weights, master in zip(self.zero.parallel_partitioned_bit16_groups, self.masters(), strict=True):
            master.data = weights[self._rank].data
        keep_one_copy(self.zero)

    def masters(self) -> list[torch.Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def held_weights(self) -> Iterator[torch.Tensor]:
        yield from super().held_weights()
        yield from self.zero.bit16_groups_flat

    def held_gradients(self) -> Iterator[torch.Tensor]:
        yield from super().held_gradients()
        for tensors in self.zero.all_grad_tensors.values():
            yield from tensors or []
        for parameters in self.zero.bit16_groups:
            for parameter in parameters:
                copies = (parameter.grad, getattr(parameter, "grad_accum", None))
                yield from (gradient for gradient in copies if gradient is not None)

    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        if self.zero.cpu_offload:
            offloaded = [flat.grad for flat in self.masters()]
            return [(f, f.view_in(offloaded[f.group])) for f in self.fragments]  # type: ignore[arg-type]
        by_range: dict[tuple[int, int], torch.Tensor] = {}
        for group, tensors in self.zero.averaged_gradients.items():
            offset = 0
            for tensor in tensors or []:
                by_range[group, offset] = tensor.detach().view(-1)
                offset += tensor.numel()
        there = {group for group, tensors in self.zero.averaged_gradients.items() if tensors is not None}
        return [(f, by_range[f.group, f.offset][: f.numel]) for f in self.fragments if f.group in there]

    def gradients_reduced(self) -> None:
        # DeepSpeed would keep all parameters' gradients, and the bucket that they are in, until the update.
        if not self.zero.cpu_offload:
            for parameters in self.zero.bit16_groups:
                self.zero.free_grad_in_param_list(parameters)

    def clear_gradients(self) -> None:
        if self.zero.cpu_offload:
            for flat in self.masters():
                assert flat.grad is not None
                flat.grad.zero_()

    def weights_written(self) -> None:
        self.zero.update_lp_params()


class ZeroThreeState(ZeroState):
    """Stage 3: each rank holds an equal, padded part of every parameter."""

    def __init__(self, zero: Any, names: Mapping[int, str], rank: int) -> None:
        fragments: list[Fragment] = []
        self._parameters: list[Any] = []
        for parameters in zero.fp16_groups:
            for parameter in parameters:
                group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                start = rank * size
                numel = min(size, parameter.ds_numel - start)
                if numel > 0:
                    name, shape = names[id(parameter)], tuple(parameter.ds_shape)
                    fragments.append(Fragment(name, shape, start, numel, group, offset))
                    self._parameters.append(parameter)
        super().__init__(zero, fragments)
        # The buffer is laid out in the order of all groups' parameters, wherever the update takes its gradients from.
        position, self._positions, self._group_positions = 0, dict[int, int](), list[int]()
        for parameters in zero.fp16_groups:
            self._group_positions.append(position)
            for parameter in parameters:
                self._positions[id(parameter)] = position
                position += parameter.partition_numel()
        self._factor = 1.0
        if zero.dtype == torch.float32 and not (zero.offload_optimizer or zero.offload_param):
            # As DeepSpeed means to, but it compares a device with a name (0.19.8, stage3.py, 1162).
            for weights, master in zip(zero.fp16_partitioned_groups_flat, self.masters(), strict=True):
                master.data = weights.data
        # Norm and clipping are done when DeepSpeed's update begins.
        take_over_gradients(zero, self._take_gradients, self._show_gradients)

    def masters(self) -> list[torch.Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def held_weights(self) -> Iterator[torch.Tensor]:
        yield from super().held_weights()
        for parameters in self.zero.fp16_groups:
            yield from (parameter.ds_tensor for parameter in parameters)

    def held_gradients(self) -> Iterator[torch.Tensor]:
        yield from super().held_gradients()
        yield self.zero.grad_partitions_flat_buffer

    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        # Gradients are accumulated here, also where the update takes them from elsewhere (offload).
        buffer = self.zero.grad_partitions_flat_buffer
        return [
            (f, buffer.narrow(0, self._positions[id(parameter)], f.numel))
            for f, parameter in zip(self.fragments, self._parameters, strict=True)
        ]

    def clear_gradients(self) -> None:
        # DeepSpeed overwrites a part in the first backward pass that produces it, and keeps it where none does.
        self.zero.grad_partitions_flat_buffer.zero_()
        self._factor = 1.0
        if self.zero.offload_optimizer:
            for flat in self.masters():
                if flat.grad is not None:
                    flat.grad.zero_()

    def clip(self, factor: float) -> None:
        super().clip(factor)
        self._factor = factor

    def _take_gradients(self, group: int, norm: object) -> None:
        """Replaces DeepSpeed's clipping, just before the update of a group."""
        if self.zero.offload_optimizer and self._factor != 1.0:
            self._copy_gradients(group)

    def _show_gradients(self, group: int) -> None:
        """Give the update of a group its gradients in place, where DeepSpeed would copy them."""
        master = self.masters()[group]
        master.grad = self.zero.grad_partitions_flat_buffer.narrow(0, self._group_positions[group], master.numel())
        self.zero.averaged_gradients[group] = None

    def _copy_gradients(self, group: int) -> None:
        gradient = self.masters()[group].grad
        if gradient is not None:
            for f, values in self.gradients():
                if f.group == group:
                    f.view_in(gradient).copy_(values)

    def weights_written(self) -> None:
        for group in range(len(self.zero.fp16_groups)):
            publish_masters(self.zero, group)
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """Parameters that a raw setting keeps whole on every rank."""
        persistent = self.zero.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)


class SwappedState(ZeroThreeState):
    """Stage 3 with the optimizer state on a disk: large groups are in memory during their own update only.

    What is read or written between steps is a copy in memory, which :meth:`weights_written` writes back and the next
    step drops.
    """

    def __init__(self, zero: Any, names: Mapping[int, str], rank: int) -> None:
        super().__init__(zero, names, rank)
        self._copies: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def values(self, group: int) -> tuple[torch.Tensor, dict[str, Any]]:
        if not is_swapped(self.zero, group):
            return super().values(group)
        if group not in self._copies:
            swap_in(self.zero, group)
            flat, state = super().values(group)
            copy = {key: value.clone() if is_flat(value, flat) else value for key, value in state.items()}
            self._copies[group] = flat.clone(), copy
            forget_swapped_in(self.zero, group)
        return self._copies[group]

    def add_state(self, group: int, key: str, value: torch.Tensor) -> None:
        if group in self._copies:
            self._copies[group][1][key] = value
        else:
            super().add_state(group, key, value)

    def clear_gradients(self) -> None:
        self._copies.clear()
        super().clear_gradients()

    def weights_written(self) -> None:
        for group in range(len(self.zero.fp16_groups)):
            copied = self._copies.pop(group, None)
            if copied is None:
                if not is_swapped(self.zero, group):
                    publish_masters(self.zero, group)
                continue
            swap_in(self.zero, group)
            flat, state = super().values(group)
            flat.copy_(copied[0])
            for key, value in copied[1].items():
                if is_flat(state.get(key), flat):
                    state[key].copy_(value)
                else:
                    super().add_state(group, key, value)
            publish_masters(self.zero, group)
            swap_out(self.zero, group)
        self._gather_persistent()

    def _take_gradients(self, group: int, norm: object) -> None:
        # What was swapped out may be the last step batch's, or not clipped.
        if self._factor != 1.0 or is_swapped(self.zero, group):
            self._copy_gradients(group)
