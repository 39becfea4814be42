"""Activation functions that a model's configuration names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

KNOWN = frozenset(
    (
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu"),
        *("relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    )
)
"""Names in transformers' table, which it imports torch to build. A few families take others besides."""
_NAMES_ONE = re.compile(r"(^|_)(act|activation)(_fn|_function)?$|^hidden_mamba_act$")
"""Fields that name an activation function."""


def unknown_activations(fields: Mapping[str, Any], within: str = "model.config") -> Iterator[tuple[str, str]]:
    """Key and value of each field, parts of the model included, that names none of :data:`KNOWN`."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            yield from unknown_activations(value, f"{within}.{name}")
        elif isinstance(value, str) and _NAMES_ONE.search(name) and value not in KNOWN:
            yield f"{within}.{name}", value
