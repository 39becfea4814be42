"""Where ZeRO holds what: each rank's flat parts of weights, gradients and optimizer state, by parameter.

DeepSpeed concatenates parameters (or, at stage 3, each rank's equal part of every parameter) into flat tensors, one or
more for each parameter group, and gives those to the optimizer. :mod:`.zero_stages` knows its fields; everything above
works with :class:`Fragment` and local shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_pipe.checkpoint.live_tensors import number_piece
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice, flat_slices
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.system.compat.torch_private import foreach_multiply


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

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """This fragment's elements of the group's flat tensor, as a live view."""
        return flat.narrow(0, self.offset, self.numel)


def fragment_shards(name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> Iterator[LocalShard]:
    """Live local shards of a flattened tensor's elements from ``start`` on; ``values`` (flat) holds them."""
    offset = 0
    for tensor_slice in flat_slices(name, shape, start, start + values.numel()):
        yield LocalShard(tensor_slice, shape, values.narrow(0, offset, tensor_slice.volume).view(tensor_slice.shape))
        offset += tensor_slice.volume


class ZeroState(ABC):
    """A rank's part of the state, over the optimizer that DeepSpeed made; see :mod:`.zero_stages`."""

    def __init__(self, zero: Any, fragments: list[Fragment]) -> None:
        self.zero = zero
        self.fragments = fragments

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates the flat tensors."""
        wrapped: torch.optim.Optimizer = self.zero.optimizer
        return wrapped

    @abstractmethod
    def masters(self) -> list[torch.Tensor]:
        """The flat fp32 weights of every group, live; also the keys of the optimizer's state."""

    @abstractmethod
    def gradients(self) -> list[tuple[Fragment, torch.Tensor]]:
        """The reduced fp32 gradient of every fragment, flat and live, once a step batch's backward passes are
        through.
        """

    def gradients_reduced(self) -> None:  # noqa: B027  not every stage has something to free
        """Free what was reduced; called once a step batch's backward passes are through."""

    def clear_gradients(self) -> None:  # noqa: B027  not every stage keeps some
        """Forget the last step batch's gradients, so that a parameter which a step batch does not use has none."""

    def clip(self, factor: float) -> None:
        """Scale all gradients: those of :meth:`gradients` and those that the update takes."""
        reduced = [gradient for _, gradient in self.gradients()]
        if reduced:
            foreach_multiply(reduced, factor)

    @abstractmethod
    def weights_written(self) -> None:
        """Update the weights that forward passes use from the masters. A collective call."""

    # -- memory -------------------------------------------------------------------------------------------------

    def held_weights(self) -> Iterator[torch.Tensor]:
        """All tensors of trained weights on this rank, those of compute and the masters."""
        yield from self.masters()

    def held_gradients(self) -> Iterator[torch.Tensor]:
        """All tensors of gradients on this rank that outlive a backward pass."""
        for flat in self.masters():
            if flat.grad is not None:
                yield flat.grad
        for tensors in self.zero.averaged_gradients.values():
            yield from tensors or []

    def held_state(self) -> Iterator[torch.Tensor]:
        """All tensors of the optimizer's state on this rank."""
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    # -- local shards -------------------------------------------------------------------------------------------------

    def values(self, group: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The flat weights of a group, and the optimizer's state for it, to be read and written into."""
        flat = self.masters()[group]
        return flat.detach(), self.optimizer.state.get(flat, {})

    def master_shards(self) -> list[LocalShard]:
        values = {group: self.values(group)[0] for group in {f.group for f in self.fragments}}
        return [
            p for f in self.fragments for p in fragment_shards(f.name, f.shape, f.start, f.view_in(values[f.group]))
        ]

    def gradient_shards(self, unused: Iterable[str] = ()) -> list[LocalShard]:
        without = set(unused)
        return [
            shard
            for f, gradient in self.gradients()
            if f.name not in without
            for shard in fragment_shards(f.name, f.shape, f.start, gradient)
        ]

    def optimizer_shards(self) -> list[LocalShard]:
        """State as local shards ``<parameter>/<state key>``; CheckpointError if it is no number or of another size."""
        values = {group: self.values(group) for group in {f.group for f in self.fragments}}
        shards: list[LocalShard] = []
        for f in self.fragments:
            flat, state = values[f.group]
            for key, value in state.items():
                name = f"{f.name}/{key}"
                if isinstance(value, torch.Tensor) and is_flat(value, flat):
                    shards += fragment_shards(name, f.shape, f.start, f.view_in(value.detach()))
                elif isinstance(value, torch.Tensor) and value.ndim == 0:
                    shards.append(LocalShard(TensorSlice.whole(name, ()), (), value.detach()))
                elif isinstance(value, bool | int | float):
                    shards.append(number_piece(name, value))
                elif value is not None:
                    raise CheckpointError(
                        f"optimizer._target_={type(self.optimizer).__name__}: its state {key!r} cannot be cut along "
                        "ZeRO's flat pieces, and cannot be saved; use another optimizer"
                    )
        return shards

    def create_optimizer_state(
        self,
        stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        weights: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Give every flat tensor the (empty) state that a checkpoint holds values for.

        Args:
            weights: the type of every weight of the checkpoint. State of the weight's own type has the masters' type,
                so that a run may resume from another precision.
        """
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
                    dtype = flat.dtype if dtype == (weights or {}).get(f.name) else dtype
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
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            pairs.clear()
            present = {id(p) for group in optimizer.param_groups for p in group["params"]}
            masters = self.masters()
            for f in spared:
                flat = masters[f.group]
                if id(flat) in present:
                    values = [flat.detach(), *optimizer.state.get(flat, {}).values()]
                    pairs.extend((f.view_in(v), f.view_in(v).clone()) for v in values if is_flat(v, flat))

        def put_back(*_: object) -> None:
            for live, copy in pairs:
                live.copy_(copy)

        hooks = [self.optimizer.register_step_pre_hook(keep), self.optimizer.register_step_post_hook(put_back)]
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()


def is_flat(value: object, flat: torch.Tensor) -> bool:
    """Whether ``value`` is a tensor with an element for each of the flat tensor's."""
    return isinstance(value, torch.Tensor) and value.shape == flat.shape
