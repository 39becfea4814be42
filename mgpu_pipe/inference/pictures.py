"""Which class a classifier takes held-out pictures for, with the pictures."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.dataset import LabelledImages
from mgpu_pipe.data.image.prepare import PreparedImages
from mgpu_pipe.data.samples import evaluation_numbers

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
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    found = []
    try:
        for at in range(0, len(chosen), AT_ONCE):
            indices = chosen[at : at + AT_ONCE]
            batch = samples.batch(indices, evaluation_numbers(indices))
            with torch.no_grad():
                logits = model(pixel_values=batch["pixel_values"].to(device)).logits
            shares, answers = cast(Any, logits).float().softmax(-1).max(-1)
            found += list(zip(indices, batch["labels"].tolist(), answers.tolist(), shares.tolist(), strict=True))
    finally:
        model.train(was_training)
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


def _png(data: LabelledImages, index: int) -> str:
    picture, content = data.picture(index), io.BytesIO()
    picture.thumbnail((SIDE, SIDE))
    picture.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
