"""Rotary factors that depend on a sequence's length, decided once for a run.

transformers chooses the factors of ``longrope`` (Phi-3-128k, Phi-4-mini) and of ``dynamic`` from the longest position
in the micro-batch. So a document's result would depend on its neighbours in the pack and in the micro-batch. Here every
micro-batch gets transformers' factors for a sequence of ``data.seq_len`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BY_LONGEST_POSITION = ("dynamic", "longrope")
"""Rotary types whose tables depend on the longest position."""
FIXED = "mgpu_rotary_length"
"""Attribute of a root module with its run's length."""


def fix_rotary_length(model: nn.Module, seq_len: int) -> None:
    """Fixes the rotary tables of ``model`` to those of sequences of ``seq_len`` tokens, in place.

    Its rotary modules get one more position, ``seq_len - 1``, and its result is dropped. Modules with tables that do
    not depend on the length are unchanged.
    """
    longest = _LongestPosition(seq_len)
    model.__dict__[FIXED] = longest
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else (kind,)
        if any(rope_type in BY_LONGEST_POSITION for rope_type in kinds):
            module.register_forward_pre_hook(longest.append, with_kwargs=True)
            module.register_forward_hook(longest.drop)


@contextmanager
def length_at_hand(model: nn.Module) -> Iterator[None]:
    """Context in which transformers takes the tables from each text's length, for generation."""
    longest = model.__dict__.get(FIXED)
    if longest is None:
        yield
        return
    longest.applies = False
    try:
        yield
    finally:
        longest.applies = True


class _LongestPosition:
    """Hooks that append the longest position of a run to the inputs of rotary modules."""

    def __init__(self, seq_len: int) -> None:
        self.applies = True
        self._last = seq_len - 1

    def append(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.applies:
            return args, kwargs
        return tuple(map(self._with_last, args)), {name: self._with_last(value) for name, value in kwargs.items()}

    def _with_last(self, value: Any) -> Any:
        """Positions, the only integer argument, with the longest one appended."""
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return value
        return torch.cat([value, value.new_full((*value.shape[:-1], 1), self._last)], dim=-1)

    def drop(self, _: nn.Module, __: object, tables: Any) -> Any:
        """Removes the last position of tables (..., positions, width): a tensor, or cosine and sine."""
        if not self.applies:
            return tables
        if isinstance(tables, torch.Tensor):
            return tables[..., :-1, :]
        return tuple(table[..., :-1, :] for table in tables)
