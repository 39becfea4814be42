"""A world of ranks of which this process is one; its collectives send nothing, and its tensors attend as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import device_mesh

from mgpu_pipe.system.compat.fake_tensors_private import fake_store
from mgpu_pipe.system.compat.torch_private import operator
from mgpu_pipe.training.step_gradients import MicroBatchStop


@contextmanager
def process_group(ranks: int, rank: int) -> Iterator[dict[str, int]]:
    """A world that sends nothing; gives the sizes of the device's groups that this process is in, the world's aside."""
    sizes: dict[str, int] = {}
    new_group: Any = dist.new_group

    def new_fake_group(*args: Any, backend: str | None = None, **options: Any) -> Any:
        group = new_group(*args, backend="fake", **options)
        if isinstance(group, dist.ProcessGroup) and backend != "gloo":  # gloo's are the host's
            sizes[group.group_name] = group.size()
        return group

    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=ranks)
    with (
        mock.patch.object(dist, "new_group", new_fake_group),
        mock.patch.object(device_mesh, "new_group", new_fake_group),
    ):
        yield sizes
    dist.destroy_process_group()


@contextmanager
def without_others() -> Iterator[None]:
    """Let what is received be zero, which the fake group leaves as it was, and whole numbers 1, which torch's stages
    tell one another where they know their shapes. And nobody is asked, by the clock, whether to stop."""
    receive: Any = dist.ProcessGroup.recv

    def received(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        with torch.no_grad():  # torch before 2.12 receives into leaves that need gradients
            for tensor in tensors:
                tensor.fill_(0 if tensor.is_floating_point() else 1)
        return receive(group, tensors, *args)

    never = mock.patch.object(MicroBatchStop, "should_leave", return_value=False)
    with mock.patch.object(dist.ProcessGroup, "recv", received), never:
        yield


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
