"""``torch.compile``, a block at a time.

The blocks of a model share their code, so one compilation serves all of them; what lies between blocks (FSDP2's
gathering, the loss) stays as it is. Hooks on a block run outside of its compiled ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch

from mgpu_pipe.architectures.formulas.pipeline_schedules import splits_backward
from mgpu_pipe.config.group_keys import PrecisionConfig, StrategyConfig
from mgpu_pipe.config.resolve import prefers_compiled
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.kernels.layers import gpu_kernels_compile
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.system.compat.torch_private import compile_function


def compiles(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, device: torch.device, parameters: int
) -> bool:
    """Whether ``model.compile`` compiles a model with this many parameters on ``device``."""
    wanted = prefers_compiled(model, strategy, precision, device.type, parameters)
    return wanted and (model.compile is True or (gpu_kernels_compile() and not splits_backward(strategy)))


def compile_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Compile each block's ``forward`` in place; returns the blocks. After activation checkpointing, before
    sharding."""
    blocks = decoder_blocks(model)
    for block in blocks:
        block.forward = compile_function(block.forward)
    return blocks


FLOAT8_MULTIPLE = 16
"""Both sides of a float8 matrix are a multiple of this."""


def use_float8(model: torch.nn.Module, recipe: str, ranks: int = 1) -> None:
    """Make every fitting linear layer of the blocks compute in float8, in place; parameter names stay.

    Args:
        recipe: torchao's name of a recipe, such as ``tensorwise``.
        ranks: number of ranks that the layers will be cut over. Each scales its own part.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)

    def fits(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not any(
            size % (FLOAT8_MULTIPLE * ranks) for size in module.weight.shape
        )

    for block in decoder_blocks(model):
        convert_to_float8_training(block, module_filter_fn=fits, config=config)


def is_float8(layer: torch.nn.Module) -> bool:
    """Whether :func:`use_float8` converted the layer."""
    return hasattr(layer, "linear_mm_config")


def float8_product(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The product of a float8 layer's matrix and ``x``, (..., inputs), without the bias: (..., outputs)."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    product: torch.Tensor = matmul_with_hp_or_float8_args.apply(
        x, layer.weight.t(), layer.linear_mm_config, layer.config
    )
    return product
