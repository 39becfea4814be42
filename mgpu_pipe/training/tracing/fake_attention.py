"""Attention of fake tensors by the operators that torch chooses on a GPU; without one, it computes all scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from mgpu_pipe.system.compat.torch_private import operator

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZES = range(8, 257, 8)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function of this name: flash attention of half types without a mask, else memory-efficient attention.

    Args:
        query: (rows, heads, tokens, head size), as key and value, which may have fewer heads.
    """
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, 1) if groups > 1 else states for states in (key, value))
    if attn_mask is None and query.dtype in FLASH_DTYPES and query.shape[-1] in FLASH_HEAD_SIZES:
        flash = operator("_scaled_dot_product_flash_attention")
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    bias: Any = attn_mask
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = attn_mask.logical_not()
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = operator("_scaled_dot_product_efficient_attention")
    out = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return out


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """A context in which torch's attention is :func:`scaled_dot_product_attention`."""
    with mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield
