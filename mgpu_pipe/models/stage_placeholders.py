"""What stands in a pipeline stage where a module of the whole model is on another stage.

Names are kept: a stage's layers keep their numbers, so its parameters are called what the whole model calls them.
"""

from __future__ import annotations

import torch
from torch import nn

from mgpu_pipe.compat.torch_private import is_view


class Removed(nn.Module):
    """Hands its first argument on: a layer, norm or head that another stage has.

    Args:
        as_tuple: gives a tuple of it, as some families' blocks do.
    """

    def __init__(self, as_tuple: bool = False) -> None:
        super().__init__()
        self._as_tuple = as_tuple

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        return (hidden_states,) if self._as_tuple else hidden_states


class Sent(Removed):
    """Stands behind a stage's last layer and keeps what is to be sent on, whatever is done to it afterwards.

    It is kept in memory of its own: it leaves the model, and views cannot be detached in place.
    """

    hidden_states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        self.hidden_states = hidden_states.clone() if is_view(hidden_states) else hidden_states
        return super().forward(self.hidden_states)


class Received(Removed):
    """Stands before a stage's first layer and gives what was received in place of what it is called with.

    So the model's own forward pass makes masks and rotary tables from the micro-batch's whole shape, whatever part of
    the hidden states (under sequence parallelism, say) is handed from stage to stage.
    """

    hidden_states: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        assert self.hidden_states is not None, "a later stage runs with what it received"
        return super().forward(self.hidden_states)


class RemovedEmbedding(nn.Module):
    """Gives what only has the shape and type of embedded tokens, (rows, seq_len, width): nothing is looked up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.dtype = width, torch.float32

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # One number, seen as the whole.
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class RemovedAddend(nn.Module):
    """Gives a zero in place of an embedding that is added to the tokens' own."""

    def forward(self, ids: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros((), device=ids.device)


def is_removed(module: nn.Module) -> bool:
    """Whether ``module`` only stands for one of another stage."""
    return isinstance(module, Removed | RemovedEmbedding | RemovedAddend)
