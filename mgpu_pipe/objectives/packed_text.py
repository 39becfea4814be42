"""Micro-batches of packed text: their fields, the arguments of a model's forward pass, and random ones.

Positions restart with every document. Most families of transformers read the boundaries from them and build the
block-diagonal mask (``masking_utils.find_packed_sequence_indices``), if they get no attention mask and no cache. A few
need the mask from here (:func:`block_diagonal_mask`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.architectures.family import FLASH
from mgpu_pipe.architectures.find import document_isolation
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field, Stages
from mgpu_pipe.models.kernels.packed_attention import (
    document_starts,
    dynamic_starts,
    flash_lengths,
    takes_document_starts,
)
from mgpu_pipe.system.compat.transformers_private import attention_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST_DOCUMENT = 3
STARTS = "document_starts"
"""Field of a micro-batch, computed on the host, for attention of packed rows."""


def packed_text(labels_on: Stages = "last") -> BatchSpec:
    """int64 tensors of shape ``(micro_batch_size, seq_len)``.

    ``input_ids``; ``labels``, already shifted (``labels[:, t]`` is the token after ``input_ids[:, t]`` in the same
    document, or ``IGNORE_INDEX``); ``position_ids``, which restart at 0 with every document of a pack.
    Padding is its own document whose labels are all ``IGNORE_INDEX``.

    Args:
        labels_on: the pipeline stages that need the labels.
    """
    return BatchSpec(
        {
            "input_ids": Field(),
            "labels": Field(padding=IGNORE_INDEX, target=True, stages=labels_on),
            "position_ids": Field(counting=True),
        },
        documents="position_ids",
    )


def forward_kwargs(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments of ``model(...)`` (or of its base model) for one micro-batch, without labels.

    Args:
        batch: ``input_ids`` and ``position_ids`` of shape (rows, seq_len), see :func:`packed_text`.

    Returns:
        ``input_ids``, ``use_cache=False`` and the arguments that separate documents. Flash attention gets all rows
        concatenated, shape (1, rows * seq_len), since transformers finds packed documents only in a batch of one.
        Outputs then have that shape too; ``labels.reshape(1, -1)`` or any reshape to tokens fits them.
    """
    input_ids, position_ids = batch["input_ids"], batch["position_ids"]
    isolation = document_isolation(model.config.model_type, vars(model.config))
    kwargs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if isolation == "none":
        return kwargs
    if attention_of(model.config) in FLASH:
        lengths = flash_lengths(starts_of(batch, position_ids), input_ids.shape[1]) if wants_starts(model) else {}
        rows = {"input_ids": input_ids.reshape(1, -1), "position_ids": position_ids.reshape(1, -1)}
        return {**kwargs, **rows, **lengths}
    kwargs["position_ids"] = position_ids
    if takes_document_starts(model):
        kwargs["attention_mask"] = starts_of(batch, position_ids)
    elif isolation == "mask":
        kwargs["attention_mask"] = block_diagonal_mask(position_ids, attention_of(model.config) == "sdpa")
    return kwargs


def wants_starts(model: Any) -> bool:
    """Whether attention takes :func:`document_starts` of packed rows: ours, and flash attention of some models."""
    if attention_of(model.config) not in FLASH:
        return takes_document_starts(model)
    return any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(model.forward).parameters.values()
    )


def starts_of(batch: Mapping[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
    """The :func:`document_starts` of a micro-batch: its field, or computed from ``positions``."""
    return dynamic_starts(batch[STARTS] if STARTS in batch else document_starts(positions))


def block_diagonal_mask(
    position_ids: torch.Tensor, as_bool: bool, causal: bool = True, window: int | None = None
) -> torch.Tensor:
    """Block-diagonal attention mask of documents, (rows, 1, seq_len, seq_len).

    Args:
        position_ids: shape (rows, seq_len); a document begins where it does not increase by one.
        as_bool: True where visible (for sdpa), else additive fp32: 0 where visible (for eager attention).
        causal: whether a token sees only tokens before it.
        window: largest distance at which a token sees another, to both sides; None: the whole document.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=-1) != 1
    document, length = starts.cumsum(-1), position_ids.shape[1]
    visible = document[:, :, None] == document[:, None, :]
    everywhere = torch.ones(length, length, dtype=torch.bool, device=position_ids.device)
    if causal:
        visible &= everywhere.tril()
    if window is not None:
        visible &= everywhere.triu(-window).tril(window)
    visible = visible[:, None]
    if as_bool:
        return visible
    return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, torch.finfo(torch.float32).min)


def is_first_document(position_ids: torch.Tensor) -> torch.Tensor:
    """True for tokens of each row's first document, (rows, seq_len); it ends where positions do not increase by one."""
    return position_ids == torch.arange(position_ids.shape[1], device=position_ids.device)


def skips_last(step: int, samples: int) -> bool:
    """Whether the last of these random samples counts nothing: in every third step."""
    return step % 3 == 2 and samples > 2


def random_packed_text(
    generator: torch.Generator, step: int, samples: int, seq_len: int, vocabulary: int, packed: bool = True
) -> dict[str, torch.Tensor]:
    """Samples of one optimizer step: random documents with uneven label masks, padding, and a masked sample.

    Every fourth sample ends in padding. In every third step the last sample has no valid label.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, max(low + 1, high), (), generator=generator))

    ids = torch.randint(0, vocabulary, (samples, seq_len + 1), generator=generator)
    labels = ids[:, 1:].clone()
    positions = torch.zeros(samples, seq_len, dtype=torch.int64)
    for row in range(samples):
        padded = row % 4 == 1 or not packed
        end = draw(seq_len // 3, seq_len - 1) if padded else seq_len
        start = 0
        while start < end:
            longest = end - start
            length = draw(SHORTEST_DOCUMENT, longest + 1) if packed else longest
            length = longest if longest - length < SHORTEST_DOCUMENT else length
            positions[row, start : start + length] = torch.arange(length)
            labels[row, start + length - 1] = IGNORE_INDEX
            labels[row, start : start + draw(0, length // 2)] = IGNORE_INDEX  # a prompt has no loss
            start += length
        positions[row, end:] = torch.arange(seq_len - end)
        labels[row, end:] = IGNORE_INDEX
    if skips_last(step, samples):
        labels[-1] = IGNORE_INDEX
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "position_ids": positions}
