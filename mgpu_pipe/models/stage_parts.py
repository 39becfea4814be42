"""Where the families keep what a pipeline cuts apart: embeddings, layers, last norm, head. No torch.

A family is in the table when its own forward pass is right for a part of its layers: it must do nothing to the hidden
states after the last layer but what stands here, and nothing to the head's result. The tests try every one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageParts:
    """Names of modules.

    Attributes:
        embedding: the input embedding.
        layers: the list of repeated blocks.
        norm: after the last layer.
        head: the output embedding.
        added: other embeddings, added to it (learned positions).
    """

    embedding: str
    layers: str
    norm: str
    head: str
    added: tuple[str, ...] = ()

    @property
    def first(self) -> tuple[str, ...]:
        """What the first stage alone has."""
        return (self.embedding, *self.added)

    @property
    def last(self) -> tuple[str, ...]:
        """What the last stage alone has."""
        return (self.norm, self.head)


_LLAMA = StageParts("model.embed_tokens", "model.layers", "model.norm", "lm_head")
_GPT2 = StageParts("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head", ("transformer.wpe",))

STAGE_PARTS: dict[str, StageParts] = {
    "gpt2": _GPT2,
    **dict.fromkeys(["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"], _LLAMA),
}
"""By ``model_type``."""
