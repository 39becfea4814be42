"""TF32: tensor units that round the inputs of an fp32 product to 10 bits of mantissa.

Off unless ``precision.tf32`` asks for it: a product is then right to about 1e-3, and one run under two strategies
agrees to that only, where fp32 agrees to 1e-6. torch has it on for convolutions by default, so it is set both ways.

torch's older names are used: parts of it (dynamo, inductor) read them, and refuse to where ``fp32_precision`` was set.
"""

from __future__ import annotations

from typing import Any

import torch

ROTARY_BUFFER = "inv_freq"
"""How the names of transformers' buffers of rotary frequencies end."""


def set_tf32(model: torch.nn.Module, allowed: bool) -> None:
    """Let the fp32 products and convolutions of this process on CUDA use TF32, or not.

    The angles of rotary embeddings stay fp32 products: they are positions times frequencies, and TF32 tells positions
    above 2048 from their neighbours no more.
    """
    _set(allowed)
    if not allowed:
        return
    for module in model.modules():
        if any(name.endswith(ROTARY_BUFFER) for name, _ in module.named_buffers(recurse=False)):
            module.register_forward_pre_hook(_without)
            module.register_forward_hook(_with, always_call=True)


def _set(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def _without(*_: Any) -> None:
    _set(False)


def _with(*_: Any) -> None:
    _set(True)
