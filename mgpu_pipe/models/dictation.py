"""What an encoder-decoder model of speech writes down, the likeliest token at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mgpu_pipe.compat.transformers_private import hide_nothing
from mgpu_pipe.models.hearing import as_weights


def prepare_to_hear(model: Any) -> None:
    """Have ``model`` take spectrograms in float32 whatever it computes in, and hide nothing of them by itself."""
    hide_nothing(model)
    model.base_model.encoder.conv1.register_forward_pre_hook(as_weights)


@torch.no_grad()
def dictated(model: Any, features: torch.Tensor, most: int, known: torch.Tensor | None = None) -> list[list[int]]:
    """The tokens of each recording, up to its end or ``most``. A collective call: where the model is sharded, no
    process leaves before the others.

    Args:
        features: spectrograms, shape (recordings, bins, frames).
        known: boolean, of each recording; those whose text is known already are not written.
    """
    config, rows = model.config, len(features)
    done = torch.zeros(rows, dtype=torch.bool, device=features.device) if known is None else known
    ids = torch.full((rows, 1), int(config.decoder_start_token_id), device=features.device)
    inputs: dict[str, Any] = {"input_features": features}
    for _ in range(most):
        if _over(done):
            break
        found = model(**inputs, decoder_input_ids=ids[:, -1:], use_cache=True)
        inputs = {"encoder_outputs": (found.encoder_last_hidden_state,), "past_key_values": found.past_key_values}
        ids = torch.cat([ids, found.logits[:, -1:].argmax(-1)], 1)
        done = done | (ids[:, -1] == config.eos_token_id)
    written: list[list[int]] = ids[:, 1:].tolist()
    return written


def _over(done: torch.Tensor) -> bool:
    """Whether every recording of every process is written."""
    left = (~done).any().int()
    if dist.is_initialized():
        dist.all_reduce(left, op=dist.ReduceOp.MAX)
    return not bool(left)
