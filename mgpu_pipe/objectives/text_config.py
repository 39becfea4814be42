"""Keys that objectives over tokens share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from typing_extensions import Self

from mgpu_pipe.config.identity import FREE
from mgpu_pipe.config.schema import Auto, ObjectiveConfig


@dataclass
class TokenLossConfig(ObjectiveConfig):
    """Keys of objectives whose loss walks over a vocabulary."""

    loss_chunk_tokens: int | Auto = field(default="auto", metadata={**FREE, "at_least": 0})
    """Tokens whose logits exist at once in the loss; auto bounds them to 64 MiB (GPUs: 256); 0 computes them whole."""

    def shrunk(self, tokens: int) -> Self:
        chunk = 0 if self.loss_chunk_tokens == 0 else max(1, tokens * 2 // 5)
        return replace(self, loss_chunk_tokens=chunk)


@dataclass
class SampledTextConfig(TokenLossConfig):
    """Keys of objectives whose model writes texts."""

    sample_prompts: list[str] = field(default_factory=list, metadata=FREE)
    """Prompts that are continued or answered after training and shown with the result."""
    sample_max_new_tokens: int = field(default=64, metadata={**FREE, "at_least": 1})
    """Tokens of a continuation or answer, at most."""

    def shrunk(self, tokens: int) -> Self:
        return replace(super().shrunk(tokens), sample_prompts=[])

    def prompts(self) -> tuple[list[str], int]:
        return self.sample_prompts, self.sample_max_new_tokens
