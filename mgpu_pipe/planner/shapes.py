"""The sizes of a decoder that every other formula starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Width, layers and attention heads of a decoder."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int

    @classmethod
    def of(cls, fields: Any) -> Shape:
        """From a configuration's standard fields: a mapping, or transformers' own text configuration."""

        def read(name: str) -> Any:
            return fields.get(name) if isinstance(fields, Mapping) else getattr(fields, name, None)

        width, heads = read("hidden_size"), read("num_attention_heads") or 1
        return cls(
            width=width,
            layers=read("num_hidden_layers"),
            heads=heads,
            key_value_heads=read("num_key_value_heads") or heads,
            head_dim=read("head_dim") or width // heads,
        )
