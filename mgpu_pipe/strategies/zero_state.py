"""Where ZeRO holds what: each rank's flat parts of weights, gradients and optimizer state, by parameter.

DeepSpeed concatenates parameters (or, at stage 3, each rank's equal part of every parameter) into flat tensors, one or
more for each parameter group, and gives those to the optimizer. This file is the one place that knows its fields
(checked against DeepSpeed 0.19); everything above works with :class:`Fragment` and pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_pipe.checkpoint.boxes import Box, Piece
from mgpu_pipe.checkpoint.flat_ranges import flat_boxes
from mgpu_pipe.errors import CheckpointError


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a flattened parameter that this rank updates.

    Attributes:
        start: its first element in the flattened parameter.
        group: the flat tensor of the optimizer that holds it.
        offset: its first element there.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    group: int
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This fragment's elements of the group's flat tensor, as a live view."""
        return flat.narrow(0, self.offset, self.numel)


def fragment_pieces(name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> Iterator[Piece]:
    """Live pieces of elements ``start`` and following of a flattened tensor, which ``values`` (flat) holds."""
    at = 0
    for box in flat_boxes(name, shape, start, start + values.numel()):
        yield Piece(box, shape, values.narrow(0, at, box.volume).view(box.shape))
        at += box.volume


class ZeroState:
    """A rank's part of the state, over the optimizer that DeepSpeed made; see :class:`ZeroTwoState`."""

    def __init__(self, zero: Any, fragments: list[Fragment]) -> None:
        self.zero = zero
        self.fragments = fragments

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates the flat tensors."""
        found: torch.optim.Optimizer = self.zero.optimizer
        return found

    def masters(self) -> list[torch.Tensor]:
        """The flat fp32 weights of every group, live; also the keys of the optimizer's state."""
        raise NotImplementedError

    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        """The reduced fp32 gradient of every fragment, flat and live, once a window's backward passes are through."""
        raise NotImplementedError

    def clear_gradients(self) -> None:
        """Forget the last window's gradients, so that a parameter which a window does not use has none."""

    def clip(self, factor: float) -> None:
        """Scale all gradients, those shown and those that the update takes."""
        shown = [gradient for _, gradient in self.gradients()]
        if shown:
            torch._foreach_mul_(shown, factor)  # type: ignore[attr-defined]

    def weights_written(self) -> None:
        """Bring the weights that forward passes use up to date with the masters. A collective call."""
        raise NotImplementedError

    # -- pieces -------------------------------------------------------------------------------------------------

    def values(self, group: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The flat weights of a group, and the optimizer's state for it, to be read and written into."""
        flat = self.masters()[group]
        return flat.detach(), self.optimizer.state.get(flat, {})

    def master_pieces(self) -> list[Piece]:
        found = {group: self.values(group)[0] for group in {f.group for f in self.fragments}}
        return [p for f in self.fragments for p in fragment_pieces(f.name, f.shape, f.start, f.of(found[f.group]))]

    def gradient_pieces(self, unused: Iterable[str] = ()) -> list[Piece]:
        without = set(unused)
        return [
            piece
            for f, gradient in self.gradients() if f.name not in without
            for piece in fragment_pieces(f.name, f.shape, f.start, gradient)
        ]  # fmt: skip

    def optimizer_pieces(self) -> list[Piece]:
        """The optimizer's state as pieces named ``<parameter>/<state key>``.

        Raises:
            CheckpointError: a state that is not a tensor, or one that is neither of the flat tensor's size nor scalar.
        """
        found = {group: self.values(group) for group in {f.group for f in self.fragments}}
        pieces: list[Piece] = []
        for f in self.fragments:
            flat, state = found[f.group]
            for key, value in state.items():
                name = f"{f.name}/{key}"
                if isinstance(value, torch.Tensor) and _is_flat(value, flat):
                    pieces += fragment_pieces(name, f.shape, f.start, f.of(value.detach()))
                elif isinstance(value, torch.Tensor) and value.ndim == 0:
                    pieces.append(Piece(Box.whole(name, ()), (), value.detach()))
                elif value is not None:
                    raise CheckpointError(
                        f"optimizer._target_={type(self.optimizer).__name__}: its state {key!r} cannot be cut along "
                        "ZeRO's flat pieces, and cannot be saved; use another optimizer"
                    )
        return pieces

    def create_optimizer_state(self, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Give every flat tensor the (empty) state that a checkpoint holds values for."""
        keys: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
        for name, entry in stored.items():
            parameter, _, key = name.rpartition("/")
            keys.setdefault(parameter, {})[key] = entry
        options = self.optimizer.param_groups[0]  # all groups are of one construction
        on_device = bool(options.get("fused") or options.get("capturable"))
        for f in self.fragments:
            flat, state = self.values(f.group)
            for key, (shape, dtype) in keys.get(f.name, {}).items():
                if key in state:
                    continue
                if shape == f.shape and shape != ():
                    self.add_state(f.group, key, torch.zeros_like(flat, dtype=dtype))
                else:
                    device = flat.device if on_device else torch.device("cpu")
                    self.add_state(f.group, key, torch.zeros(shape, dtype=dtype, device=device))

    def add_state(self, group: int, key: str, value: torch.Tensor) -> None:
        """Put a new entry into the optimizer's state for a group."""
        self.optimizer.state[self.masters()[group]][key] = value

    # -- parameters that no process used ------------------------------------------------------------------------

    def update(self, step: Callable[[], object], unused: Iterable[str]) -> None:
        """Run DeepSpeed's update, leaving the weights and state of ``unused`` parameters as one process leaves them.

        ZeRO knows zero gradients only, and to weight decay and momentum a zero gradient is not the same as none.
        """
        without = set(unused)
        spared = [f for f in self.fragments if f.name in without]
        if not spared:
            step()
            return
        held: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            held.clear()
            present = {id(p) for group in optimizer.param_groups for p in group["params"]}
            masters = self.masters()
            for f in spared:
                flat = masters[f.group]
                if id(flat) in present:
                    values = [flat.detach(), *optimizer.state.get(flat, {}).values()]
                    held.extend((f.of(v), f.of(v).clone()) for v in values if _is_flat(v, flat))

        def put_back(*_: object) -> None:
            for live, copy in held:
                live.copy_(copy)

        hooks = [self.optimizer.register_step_pre_hook(keep), self.optimizer.register_step_post_hook(put_back)]
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()


def _is_flat(value: object, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape


class ZeroTwoState(ZeroState):
    """Stages 1 and 2: whole weights on every rank, in one flat buffer a group that the ranks cut equally."""

    def __init__(self, zero: Any, names: Mapping[int, str], rank: int) -> None:
        fragments: list[Fragment] = []
        for group, parameters in enumerate(zero.round_robin_bit16_groups):
            size = int(zero.partition_size[group])
            low, high = rank * size, (rank + 1) * size
            for parameter, at in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
                start, stop = max(low, at), min(high, at + parameter.numel())
                if start < stop:
                    name, shape = names[id(parameter)], tuple(parameter.shape)
                    fragments.append(Fragment(name, shape, start - at, stop - start, group, start - low))
        super().__init__(zero, fragments)

    def masters(self) -> list[torch.Tensor]:
        return list(self.zero.single_partition_of_fp32_groups)

    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        if self.zero.cpu_offload:
            offloaded = [flat.grad for flat in self.masters()]
            return [(f, f.of(offloaded[f.group])) for f in self.fragments]  # type: ignore[arg-type]
        found: dict[tuple[int, int], torch.Tensor] = {}
        for group, tensors in self.zero.averaged_gradients.items():
            at = 0
            for tensor in tensors or []:
                found[group, at] = tensor.detach().view(-1)
                at += tensor.numel()
        there = {group for group, tensors in self.zero.averaged_gradients.items() if tensors is not None}
        return [(f, found[f.group, f.offset][: f.numel]) for f in self.fragments if f.group in there]

    def clear_gradients(self) -> None:
        if self.zero.cpu_offload:
            for flat in self.masters():
                assert flat.grad is not None
                flat.grad.zero_()

    def weights_written(self) -> None:
        self.zero.update_lp_params()


class ZeroThreeState(ZeroState):
    """Stage 3: of every parameter each rank holds an equal part, padded."""

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
        at, self._at = 0, dict[int, int]()
        for parameters in zero.fp16_groups:
            for parameter in parameters:
                self._at[id(parameter)] = at
                at += parameter.partition_numel()
        self._factor = 1.0
        # Norm and clipping are done when DeepSpeed's update begins.
        zero._get_norm_groups = lambda: [torch.ones(())]
        zero.unscale_and_clip_grads = self._take_gradients

    def masters(self) -> list[torch.Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        # Gradients are accumulated here, also where the update takes them from elsewhere (offload).
        buffer = self.zero.grad_partitions_flat_buffer
        return [
            (f, buffer.narrow(0, self._at[id(parameter)], f.numel))
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
        """In the place of DeepSpeed's clipping, just before the update of a group."""
        if self.zero.offload_optimizer and self._factor != 1.0:
            self._copy_gradients(group)

    def _copy_gradients(self, group: int) -> None:
        gradient = self.masters()[group].grad
        if gradient is not None:
            for f, values in self.gradients():
                if f.group == group:
                    f.of(gradient).copy_(values)

    def weights_written(self) -> None:
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
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
        if not self.zero._swappable_optimizer_subgroup(group):
            return super().values(group)
        if group not in self._copies:
            self.zero._optimizer_states_and_gradient_swap_in(group)
            flat, state = super().values(group)
            copy = {key: value.clone() if _is_flat(value, flat) else value for key, value in state.items()}
            self._copies[group] = flat.clone(), copy
            self.zero._release_swap_buffers(group)
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
                if not self.zero._swappable_optimizer_subgroup(group):
                    self.zero._reassign_or_swap_out_partitioned_parameters(group)
                continue
            self.zero._optimizer_states_and_gradient_swap_in(group)
            flat, state = super().values(group)
            flat.copy_(copied[0])
            for key, value in copied[1].items():
                if _is_flat(state.get(key), flat):
                    state[key].copy_(value)
                else:
                    super().add_state(group, key, value)
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
            self.zero._optimizer_states_and_gradient_swap_out(group)
        self._gather_persistent()

    def _take_gradients(self, group: int, norm: object) -> None:
        # What was swapped out may be the last window's, or not clipped.
        if self._factor != 1.0 or self.zero._swappable_optimizer_subgroup(group):
            self._copy_gradients(group)
