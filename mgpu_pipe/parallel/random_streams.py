"""Two random streams of a tensor-parallel rank: one shared by its group, and one per rank.

Where ranks hold an activation whole (between the regions of tensor parallelism) they must drop the same elements;
where each holds a part (attention's heads, a feed-forward layer's width, under sequence parallelism the tokens) the
parts have to be dropped independently. One generator serves both: this module keeps the state of the unused stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mgpu_pipe.models.fields import is_noise

STATISTICAL = "statistical only: dropout draws different masks under each topology"
"""How a run with dropout compares with the same run on other processes."""


def step_seed(seed: int, step: int, place: int) -> int:
    """A 63-bit seed for one optimizer step at one place, as ``ParallelDims.randomness_rank`` numbers them."""
    digest = hashlib.sha256(f"{seed}/{step}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def uses_dropout(model: torch.nn.Module) -> bool:
    """Whether anything random is on in ``model``: a dropout module, or a field of its configuration, for attention's
    dropout is a function, and so is a router's noise."""
    if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    return config is not None and _has_noise(config.to_dict())


def _has_noise(fields: Mapping[Any, Any]) -> bool:
    """Whether a field, or one of a nested configuration (a language model inside of another), is noise."""
    return any(
        _has_noise(value)
        if isinstance(value, Mapping)
        else is_noise(str(name)) and isinstance(value, int | float) and value > 0
        for name, value in fields.items()
    )


STREAMS = "mgpu_random_streams"
"""The attribute of a model's root module that holds its streams."""


class RankStreams:
    """The two random streams of this rank. Passes without a graph switch them only in :meth:`also_without_graph`.

    Args:
        model: root module that stores the streams, for :func:`streams_of`.
        device: device whose generator is switched.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._is_per_rank = self._also_without_graph = False
        self._other: torch.Tensor | None = None
        model.__dict__[STREAMS] = self

    def begin(self, shared_seed: int, rank_seed: int) -> None:
        """Start a step in the shared stream."""
        torch.manual_seed(rank_seed)
        self._other = self._state()
        torch.manual_seed(shared_seed)
        self._is_per_rank = False

    @torch.compiler.disable
    def use(self, per_rank: bool) -> None:
        """Switch to this rank's own stream, or to the shared one."""
        switches = torch.is_grad_enabled() or self._also_without_graph
        if per_rank is self._is_per_rank or self._other is None or not switches:
            return
        state = self._state()
        _set_generator_state(self._device, self._other)
        self._is_per_rank, self._other = per_rank, state

    @contextmanager
    def also_without_graph(self) -> Iterator[None]:
        """Lets passes without a graph draw the same random numbers as those with one."""
        self._also_without_graph = True
        try:
            yield
        finally:
            self._also_without_graph = False

    @contextmanager
    def using(self, per_rank: bool) -> Iterator[None]:
        """Switches streams like :meth:`use`, for the length of a block."""
        before = self._is_per_rank
        self.use(per_rank)
        try:
            yield
        finally:
            self.use(before)

    def within(self, per_rank: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function`` so that it draws from this rank's own stream, or from the shared one."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.using(per_rank):
                return function(*args, **kwargs)

        return run

    def region(self, module: nn.Module, enters: Sequence[nn.Module], leaves: Sequence[nn.Module]) -> None:
        """Draw from the own stream in ``module`` between its column-parallel layers and its row-parallel ones."""
        plain_forward, outside = module.forward, [False]

        def forward(*args: Any, **kwargs: Any) -> Any:
            outside.append(self._is_per_rank)
            try:
                return plain_forward(*args, **kwargs)
            finally:
                self.use(outside.pop())

        def enter(_: nn.Module, __: object, ___: object) -> None:
            self.use(True)

        def leave(_: nn.Module, __: object) -> None:
            self.use(outside[-1])

        module.forward = forward
        for layer in enters:
            layer.register_forward_hook(enter)
        for layer in leaves:
            layer.register_forward_pre_hook(leave)

    def make_repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function`` so that its second call, a recomputation with a reset generator, draws the same."""
        first_call: list[tuple[bool, torch.Tensor | None]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._is_per_rank, self._other
            if not first_call:
                first_call.append(before)
                return function(*args, **kwargs)
            self._is_per_rank, self._other = first_call[0]
            try:
                return function(*args, **kwargs)
            finally:
                self._is_per_rank, self._other = before

        return run

    def _state(self) -> torch.Tensor:
        return _generator_state(self._device)


@dataclass(frozen=True)
class RandomState:
    """State of a device's generator, and of the unused stream of a tensor-parallel rank."""

    generator: torch.Tensor
    other: torch.Tensor | None

    @classmethod
    def read(cls, model: nn.Module, device: torch.device) -> RandomState:
        streams = streams_of(model)
        return cls(_generator_state(device), None if streams is None else streams._other)

    def restore(self, model: nn.Module, device: torch.device) -> None:
        _set_generator_state(device, self.generator)
        if (streams := streams_of(model)) is not None:
            streams._other = self.other


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def streams_of(model: nn.Module) -> RankStreams | None:
    """The streams of ``model``; None where all its ranks' activations differ, or nothing is random."""
    return model.__dict__.get(STREAMS)
