"""Continuous batching: a row whose answer ended leaves the batch, and a waiting prompt takes its place.

The keys and values of rows of different lengths end at the same place of a cache, with padding on the left. Iteration
by iteration: Yu et al. 2022, Orca, https://www.usenix.org/conference/osdi22/presentation/yu.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache, DynamicLayer

from mgpu_pipe.architectures.find import takes_media
from mgpu_pipe.inference.sampling import RowDraws, Sampling
from mgpu_pipe.system.compat.transformers_private import is_stateful

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFILL_SHARE = 4
"""A quarter of the batch is free before prompts enter: each entry costs a forward pass."""


def takes_rows(model: PreTrainedModel) -> bool:
    """Whether rows may enter and leave the model's cache: it keeps all keys and values, and no other states."""
    if model.config.is_encoder_decoder or is_stateful(model) or takes_media(model.config):
        return False
    taken = inspect.signature(model.forward).parameters
    if not {"past_key_values", "attention_mask"} <= set(taken):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


@dataclass
class Row:
    """A prompt and its answer so far.

    Attributes:
        number: of the prompt.
        room: most tokens of the answer.
        draws: uniform numbers that choose its tokens; empty takes the likeliest.
    """

    number: int
    prompt: Sequence[int]
    room: int
    draws: torch.Tensor
    new: list[int] = field(default_factory=list)
    is_ended: bool = False

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values the cache has: all but the last new one."""
        return len(self.prompt) + len(self.new) - 1

    def take(self, token: int, end_ids: Sequence[int]) -> None:
        self.is_ended = token in end_ids
        self.new += [] if self.is_ended else [token]

    @property
    def is_done(self) -> bool:
        return self.is_ended or len(self.new) >= self.room


class RowBatch:
    """Rows that go through a model together, inside :func:`~mgpu_pipe.inference.generation.generation_mode`.

    Args:
        end_ids: tokens that end a text.
        filler: stands in the places without a token.
        is_stopped: whether the new tokens of a row hold a text that ends it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling,
        end_ids: Sequence[int],
        filler: int,
        device: torch.device,
        is_stopped: Callable[[Sequence[int]], bool] = lambda ids: False,
    ) -> None:
        self._model: Any = model
        self._is_stopped = is_stopped
        self._draws, self._end_ids, self._filler, self._device = RowDraws(sampling), end_ids, filler, device
        taken = inspect.signature(model.forward).parameters
        self._takes_positions, self._last = "position_ids" in taken, {}
        if "logits_to_keep" in taken:
            self._last = {"logits_to_keep": 1}
        self.rows: list[Row] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, rows: Sequence[Row]) -> list[Row]:
        """Compute the prompts of ``rows`` and their first tokens; returns the rows that are done."""
        longest = max(len(row.prompt) for row in rows)
        ids = [[self._filler] * (longest - len(row.prompt)) + list(row.prompt) for row in rows]
        cache = DynamicCache(config=self._model.config)
        self._forward(torch.tensor(ids, device=self._device), [len(row.prompt) for row in rows], cache, rows)
        layers = _layers_of(cache)
        if self.rows:
            length = max(longest, self._layers[0][0].shape[-2])
            layers = [
                (_join(old_keys, keys, length), _join(old_values, values, length))
                for (old_keys, old_values), (keys, values) in zip(self._layers, layers, strict=True)
            ]
        self.rows, self._layers = [*self.rows, *rows], layers
        return self._leave()

    def step(self) -> list[Row]:
        """Compute one more token of each row; returns the rows that are done."""
        ids = torch.tensor([[row.new[-1]] for row in self.rows], device=self._device)
        cache = DynamicCache(self._layers)
        self._forward(ids, [row.cached_tokens + 1 for row in self.rows], cache, self.rows)
        self._layers = _layers_of(cache)
        return self._leave()

    def _forward(self, ids: torch.Tensor, lengths: Sequence[int], cache: DynamicCache, rows: Sequence[Row]) -> None:
        """One forward pass of ``ids``, (rows, most tokens); ``lengths`` are the rows' with them."""
        total = cache.get_seq_length() + ids.shape[1]
        padding = total - torch.tensor(lengths, device=self._device)[:, None]
        places = torch.arange(total, device=self._device)
        inputs: dict[str, Any] = {"attention_mask": (places >= padding).long(), **self._last}
        if self._takes_positions:
            inputs["position_ids"] = (places - padding)[:, -ids.shape[1] :].clamp_min(0)
        output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
        tokens = self._draws.choose(output.logits[:, -1].float(), [row.draws[len(row.new) :] for row in rows])
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.take(token, self._end_ids)
            row.is_ended = row.is_ended or self._is_stopped(row.new)

    def _leave(self) -> list[Row]:
        """Remove the rows that are done from the cache."""
        stays = [place for place, row in enumerate(self.rows) if not row.is_done]
        done = [row for row in self.rows if row.is_done]
        if done:
            self.rows = [self.rows[place] for place in stays]
            length = max((row.cached_tokens for row in self.rows), default=0)
            indices = torch.tensor(stays, dtype=torch.long, device=self._device)
            self._layers = [
                (keys[indices][..., keys.shape[-2] - length :, :], values[indices][..., values.shape[-2] - length :, :])
                for keys, values in self._layers
            ]
        return done


def answer_rows(batch: RowBatch, waiting: Sequence[Row], batch_size: int) -> Iterator[Row]:
    """The rows as they end; at most ``batch_size`` of them go through the model together."""
    entered = 0
    while entered < len(waiting) or batch.rows:
        free = batch_size - len(batch.rows)
        if entered < len(waiting) and (not batch.rows or free * REFILL_SHARE >= batch_size):
            yield from batch.enter(waiting[entered : entered + free])
            entered = min(entered + free, len(waiting))
        else:
            yield from batch.step()


def _layers_of(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each layer, (rows, heads, tokens, width)."""
    layers: Any = cache.layers
    return [(layer.keys, layer.values) for layer in layers]


def _join(old: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of both, with padding on the left up to ``length`` tokens."""
    return torch.cat([F.pad(states, (0, 0, length - states.shape[-2], 0)) for states in (old, new)])
