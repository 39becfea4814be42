"""Placeholders in a pipeline stage for modules on other stages.

A stage's layers keep their numbers, so its parameters have the same names as in the whole model.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from mgpu_pipe.system.compat.torch_private import is_view


class Removed(nn.Module):
    """Passes its first argument on, for a layer, norm or head of another stage.

    Args:
        as_tuple: whether to return it in a tuple, like some families' blocks.
    """

    device = torch.device("cpu")
    """Device of a tower, which Qwen2-Audio asks for in every stage and uses in the first."""

    def __init__(self, as_tuple: bool = False) -> None:
        super().__init__()
        self._as_tuple = as_tuple

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        return (hidden_states,) if self._as_tuple else hidden_states


class Sent(Removed):
    """Placeholder after a stage's last layer that stores the hidden states to send.

    It copies views, because the tensor leaves the model and views cannot be detached in place.
    """

    hidden_states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        self.hidden_states = hidden_states.clone() if is_view(hidden_states) else hidden_states
        return super().forward(self.hidden_states)


class Received(Removed):
    """Placeholder before a stage's first layer that returns the received hidden states instead of its input.

    So the model's forward pass builds masks and rotary tables for the whole micro-batch, whatever part of the hidden
    states the stages exchange (e.g. under sequence parallelism).
    """

    hidden_states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        assert self.hidden_states is not None, "a later stage runs with what it received"
        return super().forward(self.hidden_states)


class RemovedEmbedding(nn.Module):
    """Zeros in the shape and type of embedded tokens, (rows, seq_len, width), without a lookup."""

    weight = SimpleNamespace(device=None)
    """Llama 4 moves token ids to the device of this weight; None leaves them where they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.dtype = width, torch.float32

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # A view of a single number.
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class RemovedAddend(nn.Module):
    """Zero instead of an embedding that is added to the token embeddings."""

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros((), device=ids.device)


def is_removed(module: nn.Module) -> bool:
    """Whether ``module`` is a placeholder for one of another stage."""
    return isinstance(module, Removed | RemovedEmbedding | RemovedAddend)
