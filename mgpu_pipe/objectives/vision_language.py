"""Answers to questions about pictures: the next token's cross-entropy over the answers of conversations.

A sample is one row, filled up at its end; no token sees what is behind it, so there is no mask. Each picture stands in
the row as many times as the language model gets vectors of it. A micro-batch without any picture gets a blank one, in
a row of its own that counts nothing: every process then runs every part of the model in every pass, so none waits for
another, and every part's gradients are there, and zero, also where a step happens to hold no picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import BatchSpec, Field
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.fields import picture_shape, places_of
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.loss_head import TokenLoss
from mgpu_pipe.objectives.vision_language_keys import DESCRIPTION, VisionLanguageConfig
from mgpu_pipe.parallel.randomness import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST = 4
"""Tokens of text in a random sample."""


class VisionLanguageObjective(Objective):
    """Cross-entropy of the answers under a Hugging Face model ``...ForConditionalGeneration`` of pictures and text.

    An answer is right if each of its tokens is the likeliest one behind those before it, which is so if and only if
    greedy decoding writes it (see :mod:`mgpu_pipe.objectives.seq2seq`); of several answers in one conversation all are.

    Args:
        chunk_tokens: ``objective.loss_chunk_tokens``; 0 computes the logits whole.
    """

    description = DESCRIPTION
    num_sums = 3

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, chunk_tokens: int | str
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config = cast(Any, model.config)
        self._config.use_cache = False
        self._loss = TokenLoss(model, chunk_tokens)

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(VisionLanguageConfig, config.objective)
        return cls(model, optimizer_factory, learning_rate, keys.loss_chunk_tokens)

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids`` and ``labels``, int64, (rows, seq_len), labels shifted; ``pictures``, how many a row has,
        int64, (rows,); ``pixel_values``, float32, (rows, most, channels, height, width), those first that there are."""
        return BatchSpec(
            {
                "input_ids": Field(),
                "labels": Field(padding=IGNORE_INDEX, target=True),
                "pictures": Field(sequence_dim=None),
                "pixel_values": Field(sequence_dim=None, dtype="float32", shape=(1, *picture_shape(self._config))),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        ids, pixels = batch["input_ids"], batch["pixel_values"]
        there = torch.arange(pixels.shape[1], device=pixels.device) < batch["pictures"].unsqueeze(1)
        pixels = pixels[there]
        if not len(pixels):
            blank = ids.new_zeros(1, ids.shape[1])
            blank[:, : places_of(self._config)] = self._config.image_token_id
            ids, pixels = torch.cat([ids, blank]), pixels.new_zeros(1, *picture_shape(self._config))
        return {"input_ids": ids, "pixel_values": pixels, "use_cache": False}

    def _passed(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
        """The model's arguments, and labels of as many rows."""
        inputs, labels = self.model_inputs(batch), batch["labels"]
        return inputs, F.pad(labels, (0, 0, 0, len(inputs["input_ids"]) - len(labels)), value=IGNORE_INDEX)

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(*self._passed(batch))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        inputs, labels = self._passed(batch)
        loss, right = self._loss.predictions(inputs, labels)
        counts = labels != IGNORE_INDEX
        answers = counts.any(1)
        sums = (loss, ((right | ~counts).all(1) & answers).sum(), answers.sum())
        return torch.stack([value.double() for value in sums])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Rows with no picture, one, or as many as fit, uneven in length and in what counts.

        Of every three steps the first has no pictures in the first half of its rows, the second none at all, and in the
        third the last row counts nothing.
        """
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        image, places = int(self._config.image_token_id), places_of(self._config)
        most = (seq_len - SHORTEST) // places
        ids = draw(0, int(self._config.get_text_config().vocab_size) - 1, samples, seq_len + 1)
        ids = torch.where(ids >= image, ids + 1, ids)
        counts = draw(0, most + 1, samples)
        counts[-1] = most
        if step % 3 == 0:
            counts[: samples // 2] = 0
        elif step % 3 == 1:
            counts[:] = 0
        counted = torch.zeros(samples, seq_len + 1, dtype=torch.bool)
        for row, number in enumerate(counts.tolist()):
            begin, text = int(draw(0, 2, 1)), number * places
            ids[row, begin : begin + text] = image
            end = int(draw(begin + text + 2, seq_len + 2, 1))
            counted[row, int(draw(begin + text + 1, end, 1)) : end] = True
            ids[row, end:] = 0
        if step % 3 == 2 and samples > 2:
            counted[-1] = False
        pixels = torch.randn(samples, int(counts.max()), *picture_shape(self._config), generator=generator)
        return {
            "input_ids": ids[:, :-1].contiguous(),
            "labels": ids.where(counted, torch.tensor(IGNORE_INDEX))[:, 1:].contiguous(),
            "pictures": counts,
            "pixel_values": pixels,
        }

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One conversation at a time, without what fills its row up; a blank picture only where no row has one."""
        losses = []
        if not batch["pictures"].any():
            blank = torch.full((1, places_of(self._config)), int(self._config.image_token_id))
            seen = forward(input_ids=blank, pixel_values=torch.zeros(1, *picture_shape(self._config)))
            losses.append(0.0 * seen.logits.float().sum())
        for ids, labels, number, pixels in zip(*(batch[name] for name in self.batch_spec.fields), strict=True):
            counted = (labels != IGNORE_INDEX).nonzero()
            if len(counted):
                end = int(counted.max()) + 1
                pictures = {"pixel_values": pixels[: int(number)]} if number else {}
                logits = forward(input_ids=ids[None, :end], **pictures).logits[0].float()
                losses.append(F.cross_entropy(logits, labels[:end], ignore_index=IGNORE_INDEX, reduction="sum"))
        return Reference(torch.stack(losses).sum())


OBJECTIVE = VisionLanguageObjective
