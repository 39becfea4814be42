"""Attention of packed rows from the starts of their documents, without a mask of tokens by tokens.

The starts replace the attention mask: models pass it unchanged to every layer, even if a block is compiled, recomputed
or on another pipeline stage. Each call chooses its implementation. bf16 and fp16 on CUDA use the flash kernel of
variable-length sequences (Dao 2023, "FlashAttention-2", arXiv:2307.08691). The CPU takes one document after another.
Everything else uses a mask built from the starts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.system.compat.torch_private import mark_sizes, operator
from mgpu_pipe.system.compat.transformers_private import (
    attention_of,
    looks_up_attention,
    set_attention,
    works_with_flash_attention,
)

NAME = "mgpu_packed"
"""Name of the attention function in transformers."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZES = range(8, 257, 8)
FLASH_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with kernels of the flash operator (Ampere)."""
COUNT_STEP, LENGTH_STEP = 16, 512
"""Multiples to which the number of documents and the longest length are rounded up."""
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
BEYOND_FLASH = ("softcap", "position_bias", "s_aux", "head_mask")
"""Arguments of some attention functions that the flash operator does not support."""


def use_flash_attention_3() -> None:
    """Makes torch's flash operators those of FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608)."""
    from torch.nn.attention import activate_flash_attention_impl  # torch 2.10 may lack it; the checks report that

    activate_flash_attention_impl("FA3")


def use_packed_attention(model: Any) -> bool:
    """Makes a transformers ``model`` accept :func:`document_starts` as attention mask, in place, if it can.

    Ordinary masks and no mask, as in generation, still work.

    Returns:
        Whether the model accepts them.
    """
    config = model.config
    both_ways = any(getattr(module, "is_causal", True) is False for module in model.modules())
    windows = any(getattr(config, name, None) is not None for name in ("sliding_window", "local_attention"))
    fits = (
        not config.is_encoder_decoder
        and config.get_text_config() is config
        and attention_of(config) == "sdpa"
        and looks_up_attention(model)
        and works_with_flash_attention(model)
        and set(getattr(config, "layer_types", None) or ()) <= PLAIN_LAYERS
        and not getattr(config, "output_router_logits", False)  # that loss reads the mask of padding
        and not (both_ways and windows)  # families count such windows differently
    )
    if fits:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        set_attention(config, NAME)
    return fits


def takes_document_starts(model: Any) -> bool:
    """Whether :func:`use_packed_attention` changed ``model``."""
    return attention_of(model.config) == NAME


def document_starts(positions: torch.Tensor) -> torch.Tensor:
    """Starts of the documents in concatenated rows; on the CPU without a host sync.

    Args:
        positions: shape (rows, tokens); a document begins with each row and where they do not increase by one.

    Returns:
        int32 of shape (1, 1, length of the longest document in units of 512 plus one, documents + 1), both rounded up.
        The last dimension has the starts, then the number of all tokens, once or several times, for empty documents.
        The third dimension only carries its size, which is never 1: compiled code would be recompiled for that.
    """
    rows, tokens = positions.shape
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    starts = begins.flatten().nonzero().flatten()
    count = len(starts)
    starts = F.pad(starts, (0, 1 + -count % COUNT_STEP), value=rows * tokens).int()
    longest = int(starts.diff().max())
    return starts.repeat(1, 1, 1 - (-longest // LENGTH_STEP), 1)


def dynamic_starts(starts: torch.Tensor) -> torch.Tensor:
    """Marks :func:`document_starts` as dynamic, so that other numbers and lengths of documents cause no recompile."""
    mark_sizes(starts, 2, 3)
    return starts


def flash_lengths(starts: torch.Tensor, longest: int) -> dict[str, Any]:
    """Arguments of flash attention from :func:`document_starts`; ``longest`` bounds documents, and a new one
    recompiles."""
    edges = starts[0, 0, 0]
    mark_sizes(edges, 0)
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


def visibility_mask(starts: torch.Tensor, rows: int, tokens: int, causal: bool, window: int | None) -> torch.Tensor:
    """Mask of ``starts``: bool, (rows, 1, tokens, tokens), True where visible; ``window`` tokens, itself last."""
    edges = starts[0, 0, 0].contiguous()
    position = torch.arange(rows * tokens, device=starts.device, dtype=torch.int32).view(rows, tokens)
    document = torch.searchsorted(edges, position.flatten(), right=True).view(rows, -1)
    visible = document[:, :, None] == document[:, None, :]
    distance = position[:, :, None] - position[:, None, :]
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    return visible[:, None]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function in transformers' form; returns (rows, tokens, heads, head size)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None and attention_mask.dtype == torch.int32:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window: int | None = kwargs.get("sliding_window")
        plain = not dropout and all(kwargs.get(name) is None for name in BEYOND_FLASH)
        if plain and _flash_computes(query, value):
            return _flash(query, key, value, attention_mask, causal, window, scaling), None
        if plain and query.device.type == "cpu" and not torch.compiler.is_compiling():
            return _each_document(query, key, value, attention_mask, causal, window, scaling), None
        attention_mask, is_causal = (
            visibility_mask(attention_mask, query.shape[0], query.shape[2], causal, window),
            False,
        )
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def _flash_computes(query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in FLASH_DTYPES
        and query.shape[-1] in FLASH_HEAD_SIZES
        and value.shape[-1] == query.shape[-1]
        and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    causal: bool,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    rows, _, tokens, _ = query.shape
    packed = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    edges, longest = starts[0, 0, 0], (starts.shape[2] - 1) * LENGTH_STEP
    out = operator("_flash_attention_forward")(
        *packed,
        edges,
        edges,
        longest,
        longest,
        0.0,
        causal,
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=0 if causal else None,
    )[0]
    return out.view(rows, tokens, *out.shape[1:])


def _each_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    causal: bool,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one document after another, without work across documents."""
    rows, heads, tokens, _ = query.shape
    lengths = [length for length in starts[0, 0, 0].diff().tolist() if length]
    groups = heads // key.shape[1]
    end_to_end = (states.transpose(0, 1).flatten(1, 2) for states in (query, key, value))
    documents = zip(*(states.split(lengths, 1) for states in end_to_end), strict=True)
    out = []
    for length, (queries, keys, values) in zip(lengths, documents, strict=True):
        mask = None
        if window is not None and window < length:
            mask = visibility_mask(starts.new_tensor([[[[0, length]]]]), 1, length, causal, window)
        keys, values = (states.repeat_interleave(groups, 0)[None] for states in (keys, values))
        plain = causal and mask is None
        out.append(F.scaled_dot_product_attention(queries[None], keys, values, mask, 0.0, plain, scale=scaling)[0])
    return torch.cat(out, 1).unflatten(1, (rows, tokens)).permute(1, 2, 0, 3)
