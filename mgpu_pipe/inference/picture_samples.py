"""Predicted classes or captions of held-out pictures, with the pictures."""

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
from mgpu_pipe.data.images.prepare_captions import CaptionedImages, PreparedCaptions
from mgpu_pipe.data.images.prepare_images import PreparedImages
from mgpu_pipe.data.images.scan_images import LabelledImages
from mgpu_pipe.data.samples import SampleSet, evaluation_numbers
from mgpu_pipe.objectives.contrastive import two_tower_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PICTURES, SHOWN, SIDE, BATCH_SIZE = 64, 12, 64, 8
"""Pictures to classify, pictures to show, pixels of their longer side, and pictures of a forward pass."""


def picture_samples(config: RunConfig, prepared: PreparedImages, model: PreTrainedModel) -> list[dict[str, str]]:
    """Samples of held-out pictures, wrong classes first: class, predicted class, and the picture as PNG.

    A collective call for a sharded model.
    """
    chosen = prepared.evaluated_samples()[:PICTURES]
    if not len(chosen):
        return []
    samples = prepared.open(config, "validation")
    data = LabelledImages(config, "validation", prepared)
    results = []
    for indices, batch, output in _outputs(model, samples, chosen):
        shares, answers = output.logits.float().softmax(-1).max(-1)
        results += list(zip(indices, batch["labels"].tolist(), answers.tolist(), shares.tolist(), strict=True))
    results.sort(key=lambda result: result[1] == result[2])
    names = prepared.classes
    return [
        {
            "prompt": names[label],
            "text": f" \u2192 {names[answer]} ({100 * share:.0f}%){'' if label == answer else ', wrong'}",
            "image": _encode_png(data, int(index)),
        }
        for index, label, answer, share in results[:SHOWN]
    ]


def retrieval_samples(config: RunConfig, prepared: PreparedCaptions, model: PreTrainedModel) -> list[dict[str, str]]:
    """Samples of held-out pictures, wrong captions first: the caption, the nearest caption of all these pictures, and
    the picture as PNG. A collective call for a sharded model.
    """
    from mgpu_pipe.inference.generation import load_tokenizer

    chosen = prepared.evaluated_samples()[:PICTURES]
    if not len(chosen) or prepared.tokenizer_folder is None:
        return []
    data, captions = CaptionedImages(config, "validation", prepared), list[list[int]]()
    pictures, texts, labels, picture_ids = [], [], list[int](), list[int]()
    for _, batch, output in _outputs(model, prepared.open(config, "validation"), chosen):
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
            "image": _encode_png(data, int(chosen[index])),
        }
        for index in order[:SHOWN]
    ]


def _outputs(
    model: PreTrainedModel, samples: SampleSet, chosen: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], dict[str, torch.Tensor], Any]]:
    """Yields indices, batch and model output of held-out samples, :data:`BATCH_SIZE` at a time."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        for start in range(0, len(chosen), BATCH_SIZE):
            indices = chosen[start : start + BATCH_SIZE]
            batch = samples.batch(indices, evaluation_numbers(indices))
            fields = {name: value.to(device) for name, value in batch.items() if name != "labels"}
            inputs = two_tower_inputs(fields, model.config) if "input_ids" in fields else fields
            with torch.no_grad():
                yield indices, batch, model(**inputs)
    finally:
        model.train(was_training)


def _encode_png(data: LabelledImages, index: int) -> str:
    picture, content = data.picture(index), io.BytesIO()
    picture.thumbnail((SIDE, SIDE))
    picture.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
