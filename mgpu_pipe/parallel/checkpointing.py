"""Activation checkpointing of the repeated blocks, the same under every strategy.

``full`` keeps only a block's inputs and recomputes it in the backward pass (Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost", arXiv:1604.06174). ``selective`` also keeps the results of matrix products and attention
and recomputes only the cheap rest (Korthikanti et al. 2022, arXiv:2205.05198, section 5).

A block's ``forward`` is replaced on the instance, so parameter names stay, and hooks on the block (FSDP2's gathering)
run once around both computations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mgpu_pipe.models.model_parts import present_towers
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.parallel.context.attention import bind_context
from mgpu_pipe.parallel.random_streams import RankStreams, streams_of, uses_dropout
from mgpu_pipe.system.compat.torch_private import operator

Mode = Literal["none", "full", "selective"]
TowerMode = Literal["same", "none", "full"]

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        *(
            operator(name).default
            for name in (
                "_grouped_mm",
                "_scaled_mm",
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_flash_attention",
                "_scaled_dot_product_efficient_attention",
                "_scaled_dot_product_cudnn_attention",
                "_scaled_dot_product_attention_math",
                "_scaled_dot_product_fused_attention_overrideable",
                "_flash_attention_forward",
                "_efficient_attention_forward",
            )
        ),
        torch.ops.mgpu_pipe.ring_forward.default,  # in compiled blocks
        torch.ops.mgpu_pipe.ulysses_forward.default,
    }
)
"""Operators whose results ``selective`` keeps."""
KEPT_PACKAGES = ("flash_attn", "flash_attn_3")
"""Packages whose operators are attention."""


def apply_activation_checkpointing(
    model: torch.nn.Module, mode: Mode, towers: TowerMode = "same"
) -> list[torch.nn.Module]:
    """Checkpoint every block of ``model`` in place, and return the blocks; ``none`` changes nothing.

    Args:
        towers: mode of the blocks of vision and audio towers; ``same``: like the others.
    """
    if towers == "same":
        return _checkpoint_blocks(model, decoder_blocks(model), mode)
    inside = {id(block) for name in present_towers(model) for block in model.get_submodule(name).modules()}
    by_tower: dict[bool, list[torch.nn.Module]] = {True: [], False: []}
    for block in decoder_blocks(model):
        by_tower[id(block) in inside].append(block)
    return [*_checkpoint_blocks(model, by_tower[False], mode), *_checkpoint_blocks(model, by_tower[True], towers)]


def _checkpoint_blocks(model: torch.nn.Module, blocks: list[torch.nn.Module], mode: Mode) -> list[torch.nn.Module]:
    if mode == "none":
        return []
    # Restoring the generators costs a copy of their state a block, and only dropout draws from them.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": uses_dropout(model)}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = _checkpoint(block.forward, options, streams_of(model))
    return blocks


def _checkpoint(
    forward: Callable[..., Any], options: dict[str, Any], streams: RankStreams | None
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run_checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        repeatable = bind_context(forward) if streams is None else streams.make_repeatable(bind_context(forward))
        return checkpoint(repeatable, *args, **options, **kwargs)

    return run_checkpointed


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    namespace = getattr(operation, "namespace", "")
    if operation in KEPT or namespace in KEPT_PACKAGES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
