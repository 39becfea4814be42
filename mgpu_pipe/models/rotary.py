"""Rotary factors that depend on a sequence's length, decided once for a run.

transformers chooses the factors of ``longrope`` (Phi-3-128k, Phi-4-mini) and of ``dynamic`` from the longest position
of the micro-batch at hand. So the result of a document would depend on its neighbours in the pack and in the
micro-batch. Here every micro-batch gets the factors that transformers takes for a sequence of ``data.seq_len`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BY_LONGEST_POSITION = ("dynamic", "longrope")
"""Kinds of rotary tables that depend on the longest position at hand."""
FIXED = "mgpu_rotary_length"
"""The attribute of a root module that holds its run's length."""


def fix_rotary_length(model: nn.Module, seq_len: int) -> None:
    """Let the rotary tables of ``model`` always be those of sequences of ``seq_len`` tokens, in place.

    Its rotary modules are shown one position more, ``seq_len - 1``, and their result for it is left out. Modules whose
    tables do not depend on the length are left alone.
    """
    longest = _LongestPosition(seq_len)
    model.__dict__[FIXED] = longest
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else (kind,)
        if any(one in BY_LONGEST_POSITION for one in kinds):
            module.register_forward_pre_hook(longest.show, with_kwargs=True)
            module.register_forward_hook(longest.leave_out)


@contextmanager
def length_at_hand(model: nn.Module) -> Iterator[None]:
    """Leave the tables to transformers, which takes them from each text's own length: for generation."""
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
    """Shows rotary modules the longest position of a run beside those at hand."""

    def __init__(self, seq_len: int) -> None:
        self.applies = True
        self._last = seq_len - 1

    def show(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.applies:
            return args, kwargs
        return tuple(map(self._with_last, args)), {name: self._with_last(value) for name, value in kwargs.items()}

    def _with_last(self, value: Any) -> Any:
        """Positions, the one argument of whole numbers, with the longest one behind them."""
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            return value
        return torch.cat([value, value.new_full((*value.shape[:-1], 1), self._last)], dim=-1)

    def leave_out(self, _: nn.Module, __: object, tables: Any) -> Any:
        """Tables have the shape (..., positions, width): a tensor, or cosine and sine."""
        if not self.applies:
            return tables
        if isinstance(tables, torch.Tensor):
            return tables[..., :-1, :]
        return tuple(table[..., :-1, :] for table in tables)
