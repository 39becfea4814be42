"""fp8: the blocks' matrix products in float8 by torchao, the rest in bf16."""

from __future__ import annotations

from typing import Any

import torch

from mgpu_pipe.models.plans import decoder_blocks

MULTIPLE = 16
"""What both sides of a float8 matrix have to be a multiple of."""


def use_float8(model: torch.nn.Module, recipe: str, ranks: int = 1) -> None:
    """Let every fitting linear layer of the blocks compute in float8, in place; parameter names stay.

    Args:
        recipe: a name of torchao's, such as ``tensorwise``.
        ranks: those that the layers will be cut over. Each scales its own part.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)

    def fits(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not any(
            size % (MULTIPLE * ranks) for size in module.weight.shape
        )

    for block in decoder_blocks(model):
        convert_to_float8_training(block, module_filter_fn=fits, config=config)


def is_float8(layer: torch.nn.Module) -> bool:
    """Whether :func:`use_float8` made it."""
    return hasattr(layer, "linear_mm_config")


def float8_product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What the matrix of such a layer makes of ``x``, (..., inputs), without its bias: (..., outputs)."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    product: torch.Tensor = matmul_with_hp_or_float8_args.apply(
        x, layer.weight.t(), layer.linear_mm_config, layer.config
    )
    return product
