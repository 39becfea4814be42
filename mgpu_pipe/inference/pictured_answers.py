"""What a model answers to held-out questions about pictures and videos, with these."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.chat_packs import PackedChats
from mgpu_pipe.data.image.chat_samples import PictureChatSamples
from mgpu_pipe.data.image.chats import PreparedPictureChats
from mgpu_pipe.data.samples import evaluation_numbers
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.chat import SEEN, ChatTemplate
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.objectives.pictures import pictures_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel

LOOKED_AT, SHOWN, SIDE, FRAMES, AT_ONCE = 32, 12, 48, 6, 8
"""Questions that are asked, those of them that are kept, the pixels of a picture's longer side, pictures of a question
that are shown, and questions of a forward pass."""


def answer_samples(
    config: RunConfig, prepared: PreparedPictureChats, model: PreTrainedModel, forward: Callable[..., Any] | None = None
) -> list[dict[str, str]]:
    """Some held-out conversations, those first that the model gets wrong: the question without what the chat template
    writes around it, the answer token by token behind the right one, and the pictures side by side as PNG. Of a sharded
    model a collective call.

    Args:
        forward: of a micro-batch's fields; see :meth:`EngineStrategy.sampling_forward`.
    """
    from mgpu_pipe.inference.generation import load_tokenizer

    chosen = prepared.evaluated_samples()[:LOOKED_AT]
    if not len(chosen):
        return []
    samples = prepared.open(config, "validation")
    samples = samples.alone if isinstance(samples, PackedChats) else samples
    assert isinstance(samples, PictureChatSamples)
    tokenizer, kind = load_tokenizer(prepared.tokenizer_folder), pictures_of(model.config)
    was_training, device = model.training, next(model.parameters()).device
    found = list[tuple[str, str, str, int]]()

    def text(ids: Any) -> str:
        return " ".join(str(tokenizer.decode(ids, skip_special_tokens=True)).split())

    before, after = _around(chat_of(prepared.tokenizer_folder), lambda said: text(tokenizer(said)["input_ids"]))
    model.eval()
    try:
        for at in range(0, len(chosen), AT_ONCE):
            indices = chosen[at : at + AT_ONCE]
            batch = samples.batch(indices, evaluation_numbers(indices))
            given = {name: value.to(device) for name, value in batch.items()}
            with torch.no_grad():
                seen = model(**kind.inputs(given)) if forward is None else forward(**given, logits_to_keep=0)
            logits = seen.logits
            best = logits.argmax(-1).cpu()
            for row, index in enumerate(indices.tolist()):
                labels = batch["labels"][row]
                answered = labels != IGNORE_INDEX
                question = text(samples.asked(index)).removeprefix(before).removesuffix(after).strip()
                found.append((question, text(labels[answered]), text(best[row][answered]), index))
    finally:
        model.train(was_training)
    found.sort(key=lambda one: one[1] == one[2])
    return [
        {
            "prompt": asked,
            "text": f" \u2192 {answer}{'' if answer == right else f', wrong: {right}'}",
            "image": _png([image for several in samples.images(index) for image in several]),
        }
        for asked, right, answer, index in found[:SHOWN]
    ]


def _around(chat: ChatTemplate | None, plain: Callable[[str], str]) -> tuple[str, str]:
    """What a chat template writes before a question and behind it, as people read it; nothing where it wants more."""
    try:
        parts = chat.prompt([{"role": "user", "content": SEEN}]).split(SEEN) if chat is not None else []
    except BadInputError:
        parts = []
    return (plain(parts[0]), plain(parts[1])) if len(parts) == 2 else ("", "")


def _png(images: Sequence[Image]) -> str:
    """Pictures side by side; nothing without any."""
    if not images:
        return ""
    shown = [images[at] for at in np.unique(np.linspace(0, len(images) - 1, FRAMES).round().astype(int))]
    for one in shown:
        one.thumbnail((SIDE, SIDE))
    size = sum(one.width + 1 for one in shown) - 1, max(one.height for one in shown)
    strip, content = shown[0].resize(size), io.BytesIO()
    strip.paste(255 if strip.mode == "L" else (255, 255, 255), (0, 0, *size))
    left = 0
    for one in shown:
        strip.paste(one, (left, 0))
        left += one.width + 1
    strip.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
