"""Two random streams of a tensor-parallel rank: one that its group draws alike, and one of its own.

Where ranks hold an activation whole (between the regions of tensor parallelism) they have to drop the same elements;
where each holds a part (attention's heads, a feed-forward layer's width, under sequence parallelism the tokens) the
parts have to be dropped independently. One generator serves both: the state of the stream that is not in use is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

STREAMS = "mgpu_random_streams"
"""The attribute of a model's root module that holds its streams."""


class RankStreams:
    """The streams of this rank; outside of training steps nothing is switched.

    Args:
        model: its root keeps them, for :func:`streams_of`.
        device: whose generator is meant.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._own = False
        self._other: torch.Tensor | None = None
        model.__dict__[STREAMS] = self

    def begin(self, shared: int, own: int) -> None:
        """Start a step in the shared stream; the arguments are seeds."""
        torch.manual_seed(own)
        self._other = self._state()
        torch.manual_seed(shared)
        self._own = False

    @torch.compiler.disable
    def use(self, own: bool) -> None:
        """Draw from this rank's own stream, or from the shared one, from now on."""
        if own is self._own or self._other is None or not torch.is_grad_enabled():
            return
        state = self._state()
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._other, self._device)
        else:
            torch.set_rng_state(self._other)
        self._own, self._other = own, state

    @contextmanager
    def using(self, own: bool) -> Iterator[None]:
        """Like :meth:`use`, for the length of a block."""
        before = self._own
        self.use(own)
        try:
            yield
        finally:
            self.use(before)

    def within(self, own: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which draws from the one stream or the other."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.using(own):
                return function(*args, **kwargs)

        return run

    def region(self, module: nn.Module, enters: Sequence[nn.Module], leaves: Sequence[nn.Module]) -> None:
        """Draw from the own stream in ``module`` between its column-parallel layers and its row-parallel ones."""
        plain_forward, outside = module.forward, [False]

        def forward(*args: Any, **kwargs: Any) -> Any:
            outside.append(self._own)
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

    def replayed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose second call (a recomputation, with the generator set back) draws what the first drew."""
        first: list[tuple[bool, torch.Tensor | None]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            now = self._own, self._other
            if not first:
                first.append(now)
                return function(*args, **kwargs)
            self._own, self._other = first[0]
            try:
                return function(*args, **kwargs)
            finally:
                self._own, self._other = now

        return run

    def _state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()


def streams_of(model: nn.Module) -> RankStreams | None:
    """The streams of ``model``; None where all its ranks' activations differ, or nothing is random."""
    return model.__dict__.get(STREAMS)
