"""Predicted classes, captions or answers about held-out pictures, with the pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.images.chat_tensors import PackedChats, PictureChatSamples
from mgpu_pipe.data.images.prepare_captions import CaptionedImages, PreparedCaptions
from mgpu_pipe.data.images.prepare_chats import PreparedPictureChats
from mgpu_pipe.data.images.prepare_images import PreparedImages
from mgpu_pipe.data.images.scan_images import LabelledImages
from mgpu_pipe.data.samples import SampleSet, evaluation_numbers
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.conversations import SEEN
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.generation import load_tokenizer
from mgpu_pipe.objectives.contrastive import two_tower_inputs
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel

PICTURES, SHOWN, SIDE, BATCH_SIZE = 64, 12, 64, 8
"""Pictures to classify, pictures to show, pixels of their longer side, and pictures or questions of a forward pass."""
QUESTIONS, FRAME_SIDE, FRAMES = 32, 48, 6
"""Questions to ask, pixels of the longer side of their pictures, and most pictures of a question."""


def picture_samples(
    keys: ModelConfig, data: DataConfig, prepared: PreparedImages, samples: SampleSet, model: PreTrainedModel
) -> list[dict[str, str]]:
    """Samples of held-out pictures, wrong classes first: class, predicted class, and the picture as PNG.

    A collective call for a sharded model.
    """
    pictures, results = LabelledImages(keys, data, "validation", prepared), []

    def compute(fields: dict[str, torch.Tensor]) -> Any:
        return model(**{name: value for name, value in fields.items() if name != "labels"})

    for indices, batch, output in _outputs(model, samples, prepared.evaluated_samples()[:PICTURES], compute):
        shares, answers = output.logits.float().softmax(-1).max(-1)
        results += list(zip(indices, batch["labels"].tolist(), answers.tolist(), shares.tolist(), strict=True))
    results.sort(key=lambda result: result[1] == result[2])
    names = prepared.classes
    return [
        {
            "prompt": names[label],
            "text": f" \u2192 {names[answer]} ({100 * share:.0f}%){'' if label == answer else ', wrong'}",
            "image": _encode_picture(pictures, int(index)),
        }
        for index, label, answer, share in results[:SHOWN]
    ]


def retrieval_samples(
    keys: ModelConfig, data: DataConfig, prepared: PreparedCaptions, samples: SampleSet, model: PreTrainedModel
) -> list[dict[str, str]]:
    """Samples of held-out pictures, wrong captions first: the caption, the nearest caption of all these pictures, and
    the picture as PNG. A collective call for a sharded model.
    """
    if prepared.tokenizer_folder is None:
        return []
    chosen = prepared.evaluated_samples()[:PICTURES]
    captioned, captions = CaptionedImages(keys, data, "validation", prepared), list[list[int]]()
    pictures, texts, labels, picture_ids = [], [], list[int](), list[int]()

    def compute(fields: dict[str, torch.Tensor]) -> Any:
        return model(**two_tower_inputs(fields, model.config))

    for _, batch, output in _outputs(model, samples, chosen, compute):
        pictures.append(F.normalize(output.image_embeds.float(), dim=1))
        texts.append(F.normalize(output.text_embeds.float(), dim=1))
        labels += batch["labels"].tolist()
        picture_ids += batch["picture_ids"].tolist()
        captions += batch["input_ids"].tolist()
    nearest = (torch.cat(pictures) @ torch.cat(texts).T).argmax(1).tolist()
    tokenizer = load_tokenizer(prepared.tokenizer_folder)
    texts_of_captions = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in captions]
    pairs = set(zip(picture_ids, labels, strict=True))
    right = [(picture, labels[other]) in pairs for picture, other in zip(picture_ids, nearest, strict=True)]
    once = {picture: index for index, picture in reversed(list(enumerate(picture_ids)))}
    order = sorted(sorted(once.values()), key=right.__getitem__)
    return [
        {
            "prompt": texts_of_captions[index],
            "text": f" \u2192 {texts_of_captions[nearest[index]]}{'' if right[index] else ', wrong'}",
            "image": _encode_picture(captioned, int(chosen[index])),
        }
        for index in order[:SHOWN]
    ]


def _outputs(
    model: PreTrainedModel,
    samples: SampleSet,
    chosen: NDArray[np.int64],
    compute: Callable[[dict[str, torch.Tensor]], Any],
) -> Iterator[tuple[NDArray[np.int64], dict[str, torch.Tensor], Any]]:
    """Yields indices, batch and ``compute``'s output of held-out samples, :data:`BATCH_SIZE` at a time."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        for start in range(0, len(chosen), BATCH_SIZE):
            indices = chosen[start : start + BATCH_SIZE]
            batch = samples.batch(indices, evaluation_numbers(indices))
            with torch.no_grad():
                yield indices, batch, compute({name: value.to(device) for name, value in batch.items()})
    finally:
        model.train(was_training)


def _encode_picture(data: LabelledImages, index: int) -> str:
    picture = data.picture(index)
    picture.thumbnail((SIDE, SIDE))
    return _encode_png(picture)


def _encode_png(picture: Image) -> str:
    """The picture as base64 PNG."""
    content = io.BytesIO()
    picture.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def answer_samples(
    prepared: PreparedPictureChats, samples: SampleSet, model: PreTrainedModel, forward: Callable[..., Any] | None
) -> list[dict[str, str]]:
    """Samples of held-out conversations, wrong answers first: the question without the chat template's text, the
    likeliest token at each place of the right answer, and the pictures side by side as PNG. A collective call for a
    sharded model.

    Args:
        forward: takes a micro-batch's fields; see :meth:`EngineStrategy.sampling_forward`.
    """
    chosen = prepared.evaluated_samples()[:QUESTIONS]
    samples = samples.alone if isinstance(samples, PackedChats) else samples
    assert isinstance(samples, PictureChatSamples)
    tokenizer, kind = load_tokenizer(prepared.tokenizer_folder), build_picture_inputs(model.config)
    results = list[tuple[str, str, str, int]]()

    def text(ids: Any) -> str:
        return " ".join(str(tokenizer.decode(ids, skip_special_tokens=True)).split())

    before, after = _template_affixes(
        chat_of(prepared.tokenizer_folder), lambda words: text(tokenizer(words)["input_ids"])
    )

    def compute(fields: dict[str, torch.Tensor]) -> Any:
        return model(**kind.inputs(fields)) if forward is None else forward(**fields, logits_to_keep=0)

    for indices, batch, output in _outputs(model, samples, chosen, compute):
        predicted = output.logits.argmax(-1).cpu()
        for row, index in enumerate(indices.tolist()):
            question = text(samples.prompt_tokens(index)).removeprefix(before).removesuffix(after).strip()
            right, answer = _answer_texts(batch["labels"][row], predicted[row], text)
            results.append((question, right, answer, index))
    results.sort(key=lambda result: result[1] == result[2])
    return [
        {
            "prompt": question,
            "text": f" \u2192 {answer}{'' if answer == right else f', wrong: {right}'}",
            "image": _encode_strip([image for several in samples.images(index) for image in several]),
        }
        for question, right, answer, index in results[:SHOWN]
    ]


def _answer_texts(labels: torch.Tensor, predicted: torch.Tensor, text: Callable[[Any], str]) -> tuple[str, str]:
    """The right and the predicted answer of a row of token ids, (seq_len,), turn by turn."""
    answered = labels != IGNORE_INDEX
    turns = np.flatnonzero(np.diff(np.flatnonzero(answered)) > 1) + 1
    right, answer = (
        " ".join(text(turn) for turn in np.split(ids[answered].numpy(), turns)) for ids in (labels, predicted)
    )
    return right, answer


def _template_affixes(chat: ChatTemplate | None, plain: Callable[[str], str]) -> tuple[str, str]:
    """The chat template's text before and after a question, decoded; empty strings where it cannot be determined."""
    try:
        parts = chat.prompt([{"role": "user", "content": SEEN}]).split(SEEN) if chat is not None else []
    except BadInputError:
        parts = []
    return (plain(parts[0]), plain(parts[1])) if len(parts) == 2 else ("", "")


def _encode_strip(images: Sequence[Image]) -> str:
    """The pictures side by side as base64 PNG; an empty string without pictures."""
    if not images:
        return ""
    frames = [images[index] for index in np.unique(np.linspace(0, len(images) - 1, FRAMES).round().astype(int))]
    for frame in frames:
        frame.thumbnail((FRAME_SIDE, FRAME_SIDE))
    size = sum(frame.width + 1 for frame in frames) - 1, max(frame.height for frame in frames)
    strip = frames[0].resize(size)
    strip.paste(255 if strip.mode == "L" else (255, 255, 255), (0, 0, *size))
    left = 0
    for frame in frames:
        strip.paste(frame, (left, 0))
        left += frame.width + 1
    return _encode_png(strip)
