"""Attention over blocks by torch's own operators that give the log-sum-exp, and their backward passes.

On the CPU each block is one call. On CUDA bf16 and fp16 go through the flash operator of varying lengths, which takes
all blocks at once but no mask; fp32 and head sizes that it refuses through the memory-efficient operator, block by
block. Queries have shape (rows, heads, tokens, head size), keys and values as many heads or a divisor of them
(grouped-query attention); log-sum-exps are fp32 of shape (rows, heads, tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mgpu_pipe.parallel.context.sequences import Block, Blocks
from mgpu_pipe.system.compat.torch_private import operator

LSE_ALIGNMENT = 32
"""The memory-efficient operator pads the rows of its log-sum-exps to a multiple of it."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_SIZES = range(8, 257, 8)
FLASH_CAPABILITY = (8, 0)
"""The first GPUs that the flash operator has kernels for (Ampere)."""


class Partial:
    """Attention of queries to the keys seen so far, in fp32 at least, merged block by block (Milakov and Gimelshein
    2018, "Online normalizer calculation for softmax", arXiv:1805.02867).

    The first blocks have to name every query once, as a rank's own keys do: so no query is ever without a key, whose
    log-sum-exp the operators give as 0.
    """

    def __init__(self, query: torch.Tensor) -> None:
        rows, heads, tokens, size = query.shape
        # Tokens before heads in memory, as the output projection takes it: so it keeps no copy for its backward pass.
        out = torch.empty(rows, tokens, heads, size, dtype=wide(query), device=query.device)
        self.out = out.transpose(1, 2)
        self.lse = torch.empty(query.shape[:-1], dtype=wide(query), device=query.device)
        self._untouched = True

    def take(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, scale: float) -> None:
        """Add the attention of ``query`` to the keys of ``blocks``."""
        if not blocks.blocks:
            return
        if _by_flash(query):
            self._merge_packed(query, key, value, blocks, scale)
        else:
            for block in blocks.blocks:
                out, lse = _block_forward(*_parts(query, key, value, block), blocks.causal, scale)
                self._merge(block, out, lse)
        self._untouched = False

    def _merge(self, block: Block, out: torch.Tensor, lse: torch.Tensor) -> None:
        mine, mine_lse = _queries_of(self.out, block), _queries_of(self.lse, block)
        if self._untouched:
            mine.copy_(out)
            mine_lse.copy_(lse)
            return
        both = torch.logaddexp(mine_lse, lse)
        mine.lerp_(out.to(mine.dtype), (lse - both).exp_().unsqueeze(-1))
        mine_lse.copy_(both)

    def _merge_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks, scale: float
    ) -> None:
        pack = blocks.packing(query.shape[0], query.shape[2], key.shape[2], query.device)
        packed_out, packed_lse, *_ = operator("_flash_attention_forward")(
            _pack(query, pack.queries),
            _pack(key, pack.keys),
            _pack(value, pack.keys),
            pack.query_starts,
            pack.key_starts,
            pack.longest_query,
            pack.longest_key,
            0.0,
            blocks.causal,
            False,
            scale=scale,
        )
        out = _unpack(packed_out.float(), pack.queries, query, 0.0)
        lse = _unpack(packed_lse.t().unsqueeze(-1), pack.queries, query, float("-inf")).squeeze(-1)
        self._merge(Block((0, query.shape[0]), (0, query.shape[2]), (0, key.shape[2])), out, lse)


class Gradients:
    """Gradients of queries, keys and values, in fp32 at least, summed over blocks."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.query = torch.zeros(query.shape, dtype=wide(query), device=query.device)
        self.start(key, value)

    def start(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Start with other keys and values, whose gradients are :attr:`key_value`, (2, *key.shape)."""
        self.key_value = torch.zeros((2, *key.shape), dtype=wide(key), device=key.device)

    def take(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        blocks: Blocks,
        scale: float,
    ) -> None:
        """Add the gradients through ``blocks``; ``out`` and ``lse`` cover all the keys that a query sees."""
        if not blocks.blocks:
            return
        if _by_flash(query):
            self._take_packed(grad_out, query, key, value, out, lse, blocks, scale)
            return
        for block in blocks.blocks:
            parts = _parts(query, key, value, block)
            outer = (_queries_of(grad_out, block), _queries_of(out, block), _queries_of(lse, block))
            grad_query, grad_key, grad_value = _block_backward(*outer, *parts, blocks.causal, scale)
            _queries_of(self.query, block).add_(grad_query)
            _keys_of(self.key_value[0], block).add_(grad_key)
            _keys_of(self.key_value[1], block).add_(grad_value)

    def _take_packed(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        blocks: Blocks,
        scale: float,
    ) -> None:
        pack = blocks.packing(query.shape[0], query.shape[2], key.shape[2], query.device)
        # Without dropout the operator reads no random state, but wants one.
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grad_query, grad_key, grad_value = operator("_flash_attention_backward")(
            _pack(grad_out, pack.queries),
            _pack(query, pack.queries),
            _pack(key, pack.keys),
            _pack(value, pack.keys),
            _pack(out, pack.queries),
            _pack(lse.unsqueeze(-1), pack.queries).squeeze(-1).t().contiguous(),
            pack.query_starts,
            pack.key_starts,
            pack.longest_query,
            pack.longest_key,
            0.0,
            blocks.causal,
            unused,
            unused,
            scale=scale,
        )
        self.query += _unpack(grad_query.float(), pack.queries, query, 0.0)
        self.key_value[0] += _unpack(grad_key.float(), pack.keys, key, 0.0)
        self.key_value[1] += _unpack(grad_value.float(), pack.keys, value, 0.0)


def _by_flash(query: torch.Tensor) -> bool:
    able = query.is_cuda and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    return able and query.dtype in FLASH_DTYPES and query.shape[-1] in FLASH_HEAD_SIZES


def _queries_of(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    return tensor[slice(*block.rows), :, slice(*block.queries)]


def _keys_of(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    return tensor[slice(*block.rows), :, slice(*block.keys)]


def _parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _queries_of(query, block), _keys_of(key, block), _keys_of(value, block)


def _block_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if query.is_cuda:
        groups = query.shape[1] // key.shape[1]
        out, lse, _, _ = operator("_scaled_dot_product_efficient_attention")(
            query, _repeat(key, groups), _repeat(value, groups), None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : query.shape[2]]
    out, lse = operator("_scaled_dot_product_flash_attention_for_cpu")(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _block_backward(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not query.is_cuda:
        grads = operator("_scaled_dot_product_flash_attention_for_cpu_backward")(
            grad_out, query, key, value, out, lse, 0.0, causal, scale=scale
        )
        return grads[0], grads[1], grads[2]
    groups = query.shape[1] // key.shape[1]
    lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    grad_query, grad_key, grad_value, _ = operator("_scaled_dot_product_efficient_attention_backward")(
        grad_out,
        query,
        _repeat(key, groups),
        _repeat(value, groups),
        None,
        out,
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return grad_query, _sum_groups(grad_key, groups), _sum_groups(grad_value, groups)


def _repeat(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _sum_groups(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups)).sum(2)


def _pack(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """(rows, heads, tokens, size) as (all tokens, heads, size), or those of ``index``."""
    flat = tensor.transpose(1, 2).flatten(0, 1)
    return flat.contiguous() if index is None else flat.index_select(0, index)


def wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _unpack(flat: torch.Tensor, index: torch.Tensor | None, like: torch.Tensor, fill: float) -> torch.Tensor:
    """The reverse of ``_pack``, into (rows, heads, tokens, size) of ``like``; ``fill`` where ``index`` names none."""
    rows, _, tokens, _ = like.shape
    if index is not None:
        padded = flat.new_full((rows * tokens, *flat.shape[1:]), fill)
        flat = padded.index_copy_(0, index, flat)
    return flat.unflatten(0, (rows, tokens)).transpose(1, 2)
