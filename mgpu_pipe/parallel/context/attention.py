"""Context parallelism: ranks share the tokens of every sequence, and attention runs over all of them.

Weights are whole on every rank and their gradients are to be summed over the ranks; everything but attention sees a
rank's own tokens alone. Attention is registered with transformers under two names, so it reaches every model that asks
for its attention function by name::

    apply_context_parallel(model, group, "ring", spec)
    with context_of(model, micro_batch) as part:   # part: this rank's tokens
        loss = ...(model, part)
    loss.backward()

A forward pass outside of :func:`context_of` is that of the plain model over whole sequences, for generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.data.step_batch import BatchSpec
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.parallel.context.ring import ring_attention
from mgpu_pipe.parallel.context.sequences import ContextAxis, Method, SequenceContext, split_micro_batch
from mgpu_pipe.parallel.context.ulysses import ulysses_attention
from mgpu_pipe.system.compat.transformers_private import looks_up_attention, set_attention

NAMES: Mapping[Method, str] = {"ring": "mgpu_ring", "ulysses": "mgpu_ulysses"}
"""The names under which transformers knows the attention functions."""
DOCUMENTS = "documents"
"""The entry of a part of a micro-batch that holds the document numbers of its whole sequences."""
AXIS = "mgpu_context_axis"
"""The attribute of a model's root module that holds its :class:`ContextAxis`."""
UNSUPPORTED = ("softcap", "position_bias", "s_aux", "head_mask")
"""Arguments that some models pass to their attention function and these two do not compute."""


_active: SequenceContext | None = None
"""The context of the one forward pass that a process runs at a time. It is not thread-local: on CUDA the backward pass,
which may recompute a block, runs on another thread."""


def apply_context_parallel(model: nn.Module, group: dist.ProcessGroup, method: Method, spec: BatchSpec) -> None:
    """Run the attention of ``model`` over the ranks of ``group``, in place. Parameters stay as they are.

    Args:
        model: one of transformers, also on the meta device and with its heads cut by tensor parallelism.
        group: the ranks that share sequences.
        method: ``ring`` or ``ulysses``.
        spec: describes the micro-batches that are cut.

    Raises:
        ValueError: the model does not look up its attention function.
    """
    if not looks_up_attention(model):
        raise ValueError(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface")
    _register()
    set_attention(model.config, NAMES[method])
    model.__dict__[AXIS] = ContextAxis(group, method, spec)


def context_axis(model: nn.Module) -> ContextAxis | None:
    """The axis that :func:`apply_context_parallel` gave ``model``; None for any other model."""
    return model.__dict__.get(AXIS)


@contextmanager
def context_of(model: nn.Module, micro_batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Wraps the forward pass over one whole micro-batch, which every rank of the axis has; yields this rank's part.

    The backward pass may run outside: it knows its micro-batch, also where checkpointed blocks are recomputed.
    """
    part = with_documents(model, micro_batch)
    with in_sequences(model, part):
        part.pop(DOCUMENTS, None)
        yield part


def with_documents(model: nn.Module, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of a whole micro-batch and the documents of its sequences, for :func:`in_sequences`."""
    axis = context_axis(model)
    if axis is None:
        return dict(micro_batch)
    whole = dict(micro_batch)
    documents = whole.pop(DOCUMENTS) if DOCUMENTS in whole else SequenceContext.from_micro_batch(whole, axis).documents
    return {**split_micro_batch(whole, axis.spec, axis.size, axis.rank, axis.method), DOCUMENTS: documents}


def documents_of(model: nn.Module, micro_batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Documents of the sequences, for :func:`with_documents`; a host sync if the micro-batch is on a device."""
    axis = context_axis(model)
    return {} if axis is None else {DOCUMENTS: SequenceContext.from_micro_batch(micro_batch, axis).documents}


@contextmanager
def in_sequences(model: nn.Module, part: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Wraps a forward pass over a part from :func:`with_documents`; other tokens run through the plain model."""
    axis = context_axis(model)
    if axis is None or DOCUMENTS not in part:
        yield
        return
    with _within(SequenceContext(axis, part[DOCUMENTS])):
        yield


@contextmanager
def _within(context: SequenceContext | None) -> Iterator[None]:
    global _active
    before, _active = _active, context
    try:
        yield
    finally:
        _active = before


def bind_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function`` so that every later call runs in the current context."""
    context = _active
    if context is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        # Checked at the call: a compiled function may fall back to eager code where a part cannot be compiled.
        if torch.compiler.is_compiling():  # the graph already takes the context's values as inputs
            return function(*args, **kwargs)
        with _within(context):
            return function(*args, **kwargs)

    return run


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function with transformers' signature; returns (rows, tokens, heads, head size)."""
    context = _active
    if context is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    wanted = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    wanted += ["dropout"] if dropout else []
    wanted += ["a mask beyond causal attention inside documents"] if attention_mask is not None else []
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        wanted.append("attention that is not causal")
    if sliding_window is not None and sliding_window < context.documents.shape[1]:
        wanted.append(f"sliding_window={sliding_window}")
    if wanted:
        reason = f"context parallelism does not compute what {type(module).__name__} asks for: {', '.join(wanted)}"
        raise ConfigError("strategy.cp", context.axis.size, "use strategy.cp=1", reason)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(context, query, key, value, scale).transpose(1, 2).contiguous(), None


def attend(
    context: SequenceContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention inside documents for this rank's queries, (rows, heads, tokens, size); a collective call."""
    if query.shape[0] != context.documents.shape[0] or query.shape[2] != context.tokens:
        raise RuntimeError(
            f"attention got {query.shape[0]} x {query.shape[2]} tokens where this rank's part of the micro-batch "
            f"has {context.documents.shape[0]} x {context.tokens}: hand the model what context_of gives"
        )
    attention = ring_attention if context.axis.method == "ring" else ulysses_attention
    return attention(query, key, value, context, scale)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """A mask function with transformers' signature: no mask in a context, the mask of sdpa without one."""
    from transformers.masking_utils import sdpa_mask

    if _active is None:
        return sdpa_mask(*args, **kwargs)
    local_size = kwargs.get("local_size")
    windowed = local_size is not None and local_size < _active.documents.shape[1]
    # Models make masks that no layer uses; the layer that would use this one refuses it.
    return torch.empty(0) if windowed or kwargs.get("use_vmap") else None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in NAMES.values():
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
