"""``torch.compile``, a block at a time.

The blocks of a model share their code, so one compilation serves all of them; what lies between blocks (FSDP2's
gathering, the loss) stays as it is. Hooks on a block run outside of its compiled ``forward``.
"""

from __future__ import annotations

import torch

from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.kernels.compiled import gpu_kernels_compile
from mgpu_pipe.models.plans import decoder_blocks
from mgpu_pipe.parallel.pipeline_streams import splits_backward

AUTO_FROM = 100_000_000
"""Parameters from which ``model.compile=auto`` compiles: small models are trained before compiling has paid."""


def compiles(config: RunConfig, device: torch.device, parameters: int) -> bool:
    """What ``model.compile`` means for a model of so many parameters."""
    wanted = config.model.compile
    if wanted != "auto":
        return wanted
    if config.model.kernels == "liger":  # instead of it
        return False
    if device.type != "cuda" or not gpu_kernels_compile():
        return False
    strategy = config.strategy
    by_hooks = strategy.engine == "deepspeed" and strategy.deepspeed.stage == 3  # weights come and go inside a block
    large = parameters >= AUTO_FROM or resolve_precision(config) == "fp8"  # float8 pays off in compiled blocks alone
    return large and not by_hooks and not splits_backward(strategy)


def compile_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Compile the ``forward`` of every block of ``model``, in place; the blocks.

    Called after activation checkpointing, which the compiler then sees, and before sharding.
    """
    blocks = decoder_blocks(model)
    for block in blocks:
        block.forward = torch.compile(block.forward)
    return blocks
