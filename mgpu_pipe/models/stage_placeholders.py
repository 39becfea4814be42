"""What stands in a pipeline stage where a module of the whole model is on another stage.

Names are kept: a stage's layers keep their numbers, so its parameters are called what the whole model calls them.
"""

from __future__ import annotations

import torch
from torch import nn


class Removed(nn.Module):
    """Hands its first argument on: a layer, norm or head that another stage has."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states


class RemovedHead(Removed):
    """Hands on hidden states in memory of their own: they leave the model, and views cannot be detached in place."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return hidden_states.clone() if hidden_states._is_view() else hidden_states


class RemovedEmbedding(nn.Module):
    """Gives what only has the shape and type of embedded tokens, (rows, seq_len, width): nothing is looked up.

    Called with the tokens (or positions) of shape (rows, seq_len).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.dtype = width, torch.float32

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # One number, seen as the whole.
        return torch.zeros((), dtype=self.dtype, device=ids.device).expand(*ids.shape, self.width)


class Received(nn.Module):
    """Stands before a stage's first layer and gives what was received in place of what it is called with.

    So the model's own forward pass makes masks and rotary tables from the micro-batch's whole shape, whatever part of
    the hidden states (under sequence parallelism, say) is handed from stage to stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        assert self.hidden_states is not None, "a later stage runs with what it received"
        return self.hidden_states


def is_removed(module: nn.Module) -> bool:
    """Whether ``module`` only stands for one of another stage."""
    return isinstance(module, Removed | RemovedEmbedding | Received)
