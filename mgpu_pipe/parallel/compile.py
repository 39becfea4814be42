"""``torch.compile``, a block at a time.

The blocks of a model share their code, so one compilation serves all of them; what lies between blocks (FSDP2's
gathering, the loss) stays as it is. Hooks on a block run outside of its compiled ``forward``.
"""

from __future__ import annotations

import torch

from mgpu_pipe.models.plans import decoder_blocks


def compile_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Compile the ``forward`` of every block of ``model``, in place; the blocks.

    Called after activation checkpointing, which the compiler then sees, and before sharding.
    """
    blocks = decoder_blocks(model)
    for block in blocks:
        block.forward = torch.compile(block.forward)
    return blocks
