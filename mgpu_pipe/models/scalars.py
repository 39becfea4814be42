"""Parameters without a dimension (CLIP's temperature), which FSDP2 does not shard.

Models of this program hold them as vectors of one element, under every strategy and so in every checkpoint; Hugging
Face folders hold them as transformers does.
"""

from __future__ import annotations

import torch
from torch import nn

_NAMES = "_scalar_parameters"


def scalars_to_vectors(model: nn.Module) -> None:
    """Make every scalar parameter of ``model`` a vector, in place."""
    names = set(scalar_names(model))
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 0:
                module._parameters[name] = nn.Parameter(parameter.data.reshape(1), parameter.requires_grad)
                names.add(f"{prefix}.{name}" if prefix else name)
    if names:
        setattr(model, _NAMES, frozenset(names))


def scalar_names(model: nn.Module) -> frozenset[str]:
    """The names of those that transformers holds as scalars."""
    names: frozenset[str] = getattr(model, _NAMES, frozenset())
    return names


def as_saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as transformers holds them."""
    scalars = scalar_names(model)
    return {name: value.reshape(()) if name in scalars else value for name, value in tensors.items()}
