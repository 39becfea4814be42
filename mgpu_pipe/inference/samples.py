"""What a model makes of the configured prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sample = dict[str, str]


def make_samples(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer_folder: Path,
    *,
    together: bool = False,
    forward: Callable[..., Any] | None = None,
) -> list[Sample]:
    """Each of ``objective.prompts()`` with its continuation, or, behind an arrow, with what stands for itself.

    Args:
        together: the model is sharded: all processes make this call.
        forward: takes the place of the model's forward pass; see :meth:`EngineStrategy.sampling_forward`.
    """
    prompts, length = config.objective.prompts()
    if not prompts:
        return []
    kind = description(config.objective.name).samples
    if kind == "labelled_text":
        from mgpu_pipe.inference.classify import classify_texts

        texts = classify_texts(model, tokenizer_folder, prompts, config.data.seq_len)
    else:
        from mgpu_pipe.inference.generation import generate_text

        texts = generate_text(
            model,
            tokenizer_folder,
            prompts,
            max_new_tokens=length,
            seed=config.seed,
            together=together,
            forward=forward,
        )
    joint = "" if kind == "packed_text" else " \u2192 "
    return [{"prompt": prompt, "text": f"{joint}{text}"} for prompt, text in zip(prompts, texts, strict=True)]
