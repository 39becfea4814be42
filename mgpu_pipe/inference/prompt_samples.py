"""Samples of a trained model: outputs for the configured prompts or for held-out pictures and recordings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.audio.prepare_labelled import PreparedLabelledSounds, PreparedTaggedSounds
from mgpu_pipe.data.images.prepare_captions import PreparedCaptions
from mgpu_pipe.data.images.prepare_chats import PreparedPictureChats
from mgpu_pipe.data.images.prepare_images import PreparedImages
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.inference.audio_samples import sound_samples, transcript_samples
from mgpu_pipe.inference.picture_samples import answer_samples, picture_samples, retrieval_samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sample = dict[str, str]
SHOWN = (
    *(PreparedImages.kind, PreparedCaptions.kind, PreparedPictureChats.kind),
    *(PreparedSpeech.kind, PreparedLabelledSounds.kind, PreparedTaggedSounds.kind),
)


def shows_samples(config: RunConfig) -> bool:
    """Whether the run makes samples: of prompts, or of held-out pictures or recordings."""
    return bool(config.objective.prompts()[0]) or description(config.objective.name).samples in SHOWN


def make_samples(
    config: RunConfig,
    model: PreTrainedModel,
    tokenizer_folder: Path | None,
    prepared: Prepared,
    *,
    together: bool = False,
    forward: Callable[..., Any] | None = None,
) -> list[Sample]:
    """Each of ``objective.prompts()`` with its continuation, or with its answer after an arrow. Runs on pictures show
    held-out pictures with their class, caption or answers, and runs on sound show recordings with transcripts or
    classes.

    Args:
        together: the model is sharded and all processes make this call.
        forward: replaces the model's forward pass; see :meth:`EngineStrategy.sampling_forward`.
    """
    prompts, length = config.objective.prompts()
    if isinstance(prepared, PreparedCaptions):
        return retrieval_samples(config, prepared, model)
    if isinstance(prepared, PreparedImages):
        return picture_samples(config, prepared, model)
    if isinstance(prepared, PreparedPictureChats):
        return answer_samples(config, prepared, model, forward)
    if isinstance(prepared, PreparedSpeech):
        return transcript_samples(config, prepared, model)
    if isinstance(prepared, PreparedLabelledSounds):
        return sound_samples(config, prepared, model)
    if not prompts or tokenizer_folder is None:
        return []
    kind, joint = description(config.objective.name).samples, " \u2192 "
    if kind == "labelled_text":
        from mgpu_pipe.inference.evaluate import classify_texts

        texts = classify_texts(model, tokenizer_folder, prompts, config.data.seq_len)
    else:
        from mgpu_pipe.inference.generation import generate_text

        chat = chat_of(tokenizer_folder) if config.data.holds_conversations() else None
        joint = "" if kind == "packed_text" and chat is None else joint
        texts = generate_text(
            model,
            tokenizer_folder,
            prompts,
            chat=chat,
            max_new_tokens=length,
            seed=config.seed,
            together=together,
            forward=forward,
        )
    return [{"prompt": prompt, "text": f"{joint}{text}"} for prompt, text in zip(prompts, texts, strict=True)]
