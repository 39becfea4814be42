"""fp8: the blocks' matrix products in float8 by torchao, the rest in bf16."""

from __future__ import annotations

import torch

from mgpu_pipe.models.plans import decoder_blocks

MULTIPLE = 16
"""What both sides of a float8 matrix have to be a multiple of."""


def use_float8(model: torch.nn.Module, recipe: str) -> None:
    """Let every fitting linear layer of the blocks compute in float8, in place; parameter names stay.

    Args:
        recipe: a name of torchao's, such as ``tensorwise``.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)

    def fits(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not any(size % MULTIPLE for size in module.weight.shape)

    for block in decoder_blocks(model):
        convert_to_float8_training(block, module_filter_fn=fits, config=config)
