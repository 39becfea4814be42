"""What a model makes of held-out pictures, with the pictures: their classes, or their captions."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.captions import CaptionedImages, PreparedCaptions
from mgpu_pipe.data.image.dataset import LabelledImages
from mgpu_pipe.data.image.prepare import PreparedImages
from mgpu_pipe.data.samples import SampleSet, evaluation_numbers
from mgpu_pipe.objectives.contrastive import seen_and_read

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKED_AT, SHOWN, SIDE, AT_ONCE = 64, 12, 64, 8
"""Pictures that are classified, those of them that are kept, the pixels of their longer side, and of a forward pass."""


def picture_samples(config: RunConfig, prepared: PreparedImages, model: PreTrainedModel) -> list[dict[str, str]]:
    """Some held-out pictures, those first whose class the model gets wrong: class, answer, and the picture as PNG.

    Of a sharded model a collective call.
    """
    chosen = prepared.evaluated_samples()[:LOOKED_AT]
    if not len(chosen):
        return []
    samples = prepared.open(config, "validation")
    data = LabelledImages(config, "validation", prepared)
    found = []
    for indices, batch, output in _looked_at(model, samples, chosen):
        shares, answers = output.logits.float().softmax(-1).max(-1)
        found += list(zip(indices, batch["labels"].tolist(), answers.tolist(), shares.tolist(), strict=True))
    found.sort(key=lambda one: one[1] == one[2])
    names = prepared.classes
    return [
        {
            "prompt": names[label],
            "text": f" \u2192 {names[answer]} ({100 * share:.0f}%){'' if label == answer else ', wrong'}",
            "image": _png(data, int(index)),
        }
        for index, label, answer, share in found[:SHOWN]
    ]


def retrieval_samples(config: RunConfig, prepared: PreparedCaptions, model: PreTrainedModel) -> list[dict[str, str]]:
    """Some held-out pictures, those first for which the model finds another caption among all of theirs: the caption,
    the one that is found, and the picture as PNG. Of a sharded model a collective call.
    """
    from mgpu_pipe.inference.generation import load_tokenizer

    chosen = prepared.evaluated_samples()[:LOOKED_AT]
    if not len(chosen) or prepared.tokenizer_folder is None:
        return []
    data, captions = CaptionedImages(config, "validation", prepared), list[list[int]]()
    pictures, texts, labels = [], [], list[int]()
    for _, batch, output in _looked_at(model, prepared.open(config, "validation"), chosen):
        pictures.append(F.normalize(output.image_embeds.float(), dim=1))
        texts.append(F.normalize(output.text_embeds.float(), dim=1))
        labels += batch["labels"].tolist()
        captions += batch["input_ids"].tolist()
    nearest = (torch.cat(pictures) @ torch.cat(texts).T).argmax(1).tolist()
    tokenizer = load_tokenizer(prepared.tokenizer_folder)
    said = [str(tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in captions]
    order = sorted(range(len(chosen)), key=lambda at: labels[at] == labels[nearest[at]])
    return [
        {
            "prompt": said[at],
            "text": f" \u2192 {said[nearest[at]]}{'' if labels[at] == labels[nearest[at]] else ', wrong'}",
            "image": _png(data, int(chosen[at])),
        }
        for at in order[:SHOWN]
    ]


def _looked_at(
    model: PreTrainedModel, samples: SampleSet, chosen: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], dict[str, torch.Tensor], Any]]:
    """The model's output for held-out samples, a few at a time."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        for at in range(0, len(chosen), AT_ONCE):
            indices = chosen[at : at + AT_ONCE]
            batch = samples.batch(indices, evaluation_numbers(indices))
            there = {name: value.to(device) for name, value in batch.items() if name != "labels"}
            inputs = seen_and_read(there, model.config) if "input_ids" in there else there
            with torch.no_grad():
                yield indices, batch, model(**inputs)
    finally:
        model.train(was_training)


def _png(data: LabelledImages, index: int) -> str:
    picture, content = data.picture(index), io.BytesIO()
    picture.thumbnail((SIDE, SIDE))
    picture.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
