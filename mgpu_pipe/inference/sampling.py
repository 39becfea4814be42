"""Choice of the next token: its settings, draws from a random stream of each row, and texts that end an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mgpu_pipe.errors import BadInputError

SMALLEST_TEMPERATURE = 1e-5
"""Below it logits overflow; the likeliest token has all of the probability anyway."""


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token, see :func:`mgpu_pipe.inference.generation.generate_text`."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise BadInputError("stop=: every text holds an empty one; give a text")
        if self.temperature < SMALLEST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    def settings(self) -> dict[str, Any]:
        """Fields of transformers' ``GenerationConfig``."""
        if self.temperature > 0:
            return {
                "do_sample": True,
                "temperature": self.temperature,
                "top_k": self.top_k or 0,
                "top_p": self.top_p or 1.0,
                "min_p": self.min_p,
            }
        return {"do_sample": False}


class RowDraws:
    """Chooses the next token of each row: the likeliest, or the one drawn from a random stream of the row."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._warpers = sampling, LogitsProcessorList()
        if sampling.temperature > 0:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k is not None:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p is not None:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p is not None:
                self._warpers.append(MinPLogitsWarper(sampling.min_p))

    def numbers(self, seed: int) -> torch.Tensor:
        """Uniform numbers of a row with ``seed``, one for each new token, float64; empty for the likeliest tokens."""
        if self._sampling.temperature == 0:
            return torch.empty(0, dtype=torch.float64)
        stream = torch.Generator().manual_seed(seed)
        return torch.rand(self._sampling.max_new_tokens, dtype=torch.float64, generator=stream)

    def choose(self, scores: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """The next tokens, int64 (rows,), by logits (rows, vocabulary) and each row's ``numbers``, of which the first
        decides."""
        if self._sampling.temperature == 0:
            return scores.argmax(-1)
        warped: torch.Tensor = self._warpers(scores, scores)  # type: ignore[arg-type]  # they read no tokens
        sums = warped.double().softmax(-1).cumsum(-1)
        uniform = torch.stack([row[0] for row in numbers]).to(sums.device) * sums[:, -1]
        # right: a token of probability 0 is never drawn, also where the number drawn is 0
        return torch.searchsorted(sums, uniform[:, None], right=True)[:, 0]


class RowSampling(LogitsProcessor):
    """Leaves one token of each row: the one drawn. Used with a greedy search, which takes it.

    Args:
        seeds: of each row.
        prompt_length: tokens of the padded prompts.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int], prompt_length: int) -> None:
        self._prompt_length, self._draws = prompt_length, RowDraws(sampling)
        self._numbers = [self._draws.numbers(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        place = input_ids.shape[1] - self._prompt_length
        tokens = self._draws.choose(scores, [numbers[place:] for numbers in self._numbers])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)  # type: ignore[return-value]


class StopTexts(StoppingCriteria):
    """Ends a text whose new tokens hold one of ``stop``, also where it lies across tokens.

    Args:
        start: tokens before the new ones.
        lead: text that a chat template writes before an answer; a stop in it does not count.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], start: int = 0, lead: str = "") -> None:
        self._tokenizer, self._stop, self._start, self._lead = tokenizer, stop, start, lead

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        ended = [self.is_in(row) for row in input_ids[:, self._start :].tolist()]
        return torch.tensor(ended, device=input_ids.device)  # type: ignore[return-value]

    def is_in(self, new_ids: Sequence[int]) -> bool:
        """Whether the text of new tokens holds a stop."""
        text = str(self._tokenizer.decode(list(new_ids), skip_special_tokens=True)) if self._stop else ""
        return self.cut(text) != text

    def cut(self, text: str) -> str:
        """The text before the first stop."""
        start = len(self._lead) if text.startswith(self._lead) or self._lead.startswith(text) else 0
        return text[: min((place for stop in self._stop if (place := text.find(stop, start)) >= 0), default=None)]


def row_seed(seed: int, line: int) -> int:
    """The seed of the row at ``line`` of a file of prompts, in a job with ``seed``."""
    digest = hashlib.sha256(f"answer/{seed}/{line}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
