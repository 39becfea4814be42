"""Keys and values of earlier tokens while a pipeline generates text: each stage keeps those of its layers.

``generate()`` asks its cache how many tokens it holds, and transformers' masks ask the first layer of a kind. A rank
has no values of other stages' layers, so their entries hold zeros of one head and one element, of the same length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STAGES = "mgpu_caches_of_stages"
"""The attribute of generate()'s cache that holds the caches of this rank's stages."""


def can_cache_stages(config: PreTrainedConfig) -> bool:
    """Whether all layers of a language model keep keys and values of tokens alone, and not states of another kind."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if config.is_encoder_decoder or config is not config.get_text_config():
        return False
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    layers = DynamicCache(config=config).layers
    return len(layers) == config.num_hidden_layers and all(type(layer) in kinds for layer in layers)


def caches_of_stages(cache: Any, stages: Sequence[int]) -> Mapping[int, Any]:
    """The cache of each of a rank's ``stages``; that of the first is ``cache``, whose length ``generate()`` reads.

    Args:
        cache: the ``DynamicCache`` of this call of ``generate()``, empty in its first forward pass.
    """
    if not hasattr(cache, STAGES):
        caches = [cache, *(copy.deepcopy(cache) for _ in stages[1:])]
        setattr(cache, STAGES, dict(zip(stages, caches, strict=True)))
    of_stages: Mapping[int, Any] = getattr(cache, STAGES)
    return of_stages


def lengthen_missing(cache: Any, layers: range, shape: tuple[int, ...], device: torch.device) -> None:
    """Add tokens, of ``shape`` (rows, tokens), to the entries of layers that the stage does not hold."""
    rows, tokens = shape
    nothing = torch.zeros(rows, 1, tokens, 1, device=device)
    for index in range(len(cache.layers)):
        if index not in layers:
            cache.update(nothing, nothing, index)
