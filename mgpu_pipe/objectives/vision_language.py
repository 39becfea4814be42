"""Answers to questions about pictures: the next token's cross-entropy over the answers of conversations.

A sample is one row, padded at its end. Attention is causal, so there is no mask; in PaliGemma's rows the tokens before
the answer see each other. Packed rows hold several samples, separated by their positions. Each picture takes as many
tokens of the row as the language model gets vectors of it (:mod:`mgpu_pipe.objectives.picture_inputs`).

A micro-batch without pictures gets a blank one in an extra row that counts nothing. So every process runs every part of
the model in every pass and none waits for another. Every part has gradients, zero in a step without pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.kernels.packed_attention import takes_document_starts
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, draw_integers, step_generator
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import skips_last, starts_of
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs
from mgpu_pipe.objectives.picture_inputs import Picture
from mgpu_pipe.objectives.picture_keys import VISION_LANGUAGE, VisionLanguageConfig
from mgpu_pipe.objectives.seq2seq import count_answers
from mgpu_pipe.objectives.tower_features import LlavaFeatures, PictureObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST = 4
"""Fewest text tokens of a random sample."""


class VisionLanguageObjective(PictureObjective):
    """Cross-entropy of the answers under a Hugging Face model ``...ForConditionalGeneration`` of pictures and text.

    An answer is right if each of its tokens is the likeliest after those before it, i.e. greedy decoding writes it (see
    :mod:`mgpu_pipe.objectives.seq2seq`). A conversation of several answers is right if all are.

    Args:
        chunk_tokens: ``objective.loss_chunk_tokens``; 0 computes the logits whole.
        cache_features: ``data.cache_features``.
        packed: whether a row may hold several conversations.
    """

    description = VISION_LANGUAGE
    num_sums = 3

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        chunk_tokens: int | str,
        cache_features: bool = False,
        packed: bool = False,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config = cast(Any, model.config)
        self._config.use_cache = False
        self._packed, self._pictures = packed, build_picture_inputs(self._config, packed)
        self._loss = TokenLoss(model, chunk_tokens)
        self.features = LlavaFeatures(model) if cache_features else None

    @classmethod
    def arguments(cls, keys: VisionLanguageConfig) -> tuple[Any, ...]:
        return (keys.loss_chunk_tokens,)

    @classmethod
    def from_config(cls, config: RunConfig, *built: Any, **options: Any) -> Self:
        packed = resolve_packing(config.model, config.data, config.objective) != "none"
        return super().from_config(config, *built, packed=packed, **options)

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids`` and shifted ``labels``, int64, (rows, seq_len); then the picture fields, and with cached
        features ``shown``, the pictures' numbers, int64, (rows, most)."""
        labels = Field(padding=IGNORE_INDEX, target=True)
        numbers = {"shown": Field(sequence_dim=None, shape=(1,))} if self.features else {}
        return BatchSpec({"input_ids": Field(), "labels": labels, **self._pictures.fields, **numbers})

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if self.features is not None:
            self.features.set_pictures(batch)
        inputs = self._pictures.inputs(batch)
        positions = self._pictures.conversation_positions(inputs)
        if positions is not None and takes_document_starts(cast(Any, self.model).get_decoder()):
            inputs["attention_mask"] = starts_of(batch, positions)
        return inputs

    def sampling_batch(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        return inputs

    def _inputs_and_labels(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
        """Model arguments, and labels padded to as many rows."""
        inputs, labels = self.model_inputs(batch), batch["labels"]
        return inputs, F.pad(labels, (0, 0, 0, len(inputs["input_ids"]) - len(labels)), value=IGNORE_INDEX)

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(*self._inputs_and_labels(batch))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        inputs, labels = self._inputs_and_labels(batch)
        loss, right = self._loss.predictions(inputs, labels)
        return torch.stack([value.double() for value in (loss, *count_answers(right, labels))])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Rows with no picture, one, or as many as fit, of uneven lengths and labels.

        Every three steps, one has no pictures in its first half of rows, one has none, and in one the last row counts
        nothing. Packed rows contain two such rows of half the length.
        """
        if packed:
            return self._in_pairs(self.random_batch(seed, step, 2 * samples, seq_len // 2, False), seq_len)
        generator = step_generator(seed, step)

        draw = partial(draw_integers, generator)
        kinds = {self._pictures.token, self._pictures.video, self._pictures.audio}
        placeholders = sorted(token for token in kinds if token is not None)
        most = (seq_len - SHORTEST) // (self._pictures.most_tokens + 1)
        ids = draw(0, int(self._config.get_text_config().vocab_size) - len(placeholders), samples, seq_len + 1)
        for token in placeholders:
            ids = torch.where(ids >= token, ids + 1, ids)
        counts = draw(0, most + 1, samples)
        counts[-1] = most
        if step % 3 == 0:
            counts[: samples // 2] = 0
        elif step % 3 == 1:
            counts[:] = 0
        is_label = torch.zeros(samples, seq_len + 1, dtype=torch.bool)
        pictures: list[list[Picture]] = []
        for row, number in enumerate(counts.tolist()):
            begin = int(draw(0, 2, 1))
            pictures.append([self._pictures.random_picture(generator) for _ in range(number)])
            for picture in pictures[-1]:  # one text token between pictures
                ids[row, begin : begin + picture.tokens] = self._pictures.placeholder_of(picture)
                begin += picture.tokens + 1
            end = int(draw(begin + 2, seq_len + 2, 1))
            is_label[row, int(draw(begin + 1, end, 1)) : end] = True
            ids[row, end:] = 0
        if skips_last(step, samples):
            is_label[-1] = False
        labels = ids.where(is_label, torch.tensor(IGNORE_INDEX))[:, 1:].contiguous()
        ids = ids[:, :-1].contiguous()
        return {"input_ids": ids, "labels": labels, **self._pictures.collate(ids, pictures)}

    def _in_pairs(self, batch: Batch, seq_len: int) -> Batch:
        """Random batch with every two rows joined into one."""
        pictures = [self._pictures.row_pictures(batch, row) for row in range(len(batch["input_ids"]))]
        rows, length = len(pictures) // 2, 2 * batch["input_ids"].shape[1]
        ids, labels = (
            F.pad(batch[name].reshape(rows, length), (0, seq_len - length), value=padding)
            for name, padding in (("input_ids", 0), ("labels", IGNORE_INDEX))
        )
        positions = torch.cat([torch.arange(size) for size in (length // 2, length // 2, seq_len - length)])
        positions = positions.repeat(rows, 1)
        if "position_ids" in batch:  # positions along three axes
            axes = batch["position_ids"].unflatten(0, (rows, 2)).transpose(1, 2).flatten(2)
            axes = torch.cat([axes, torch.arange(seq_len - length).expand(rows, axes.shape[1], -1)], 2)
            positions = torch.cat([positions[:, None], axes], 1)
        collated = self._pictures.collate(
            ids, [pictures[row] + pictures[row + 1] for row in range(0, len(pictures), 2)]
        )
        return {"input_ids": ids, "labels": labels, **collated, "position_ids": positions}

    def _conversations(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Picture]]]:
        """Ids, labels and pictures of each conversation of a random batch."""
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            if not self._packed:
                yield ids, labels, self._pictures.row_pictures(batch, row)
                continue
            pictures, positions = iter(self._pictures.row_pictures(batch, row)), batch["position_ids"][row]
            begins = (positions if positions.dim() == 1 else positions[0]) == 0
            sizes = begins.nonzero().flatten().tolist()
            sizes = [end - begin for begin, end in zip(sizes, [*sizes[1:], len(ids)], strict=True)]
            for part, part_labels in zip(ids.split(sizes), labels.split(sizes), strict=True):
                part_pictures, places = list[Picture](), int(self._pictures.is_placeholder(part).sum())
                while places > sum(picture.tokens for picture in part_pictures):
                    part_pictures.append(next(pictures))
                yield part, part_labels, part_pictures

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One conversation at a time, without padding; a blank picture or recording only if no row has one."""
        losses, kind = [], self._pictures
        rows = list(self._conversations(batch))
        for blank in kind.missing([picture for _, _, pictures in rows for picture in pictures]):
            ids = torch.full((blank.tokens,), kind.placeholder_of(blank))
            seen = forward(**kind.single_row(ids, [blank], blank.tokens))
            losses.append(0.0 * seen.logits.float().sum())
        for ids, labels, pictures in rows:
            valid = (labels != IGNORE_INDEX).nonzero()
            if len(valid):
                end = int(valid.max()) + 1
                logits = forward(**kind.single_row(ids[:end], pictures, int(valid.min()) + 1)).logits[0].float()
                losses.append(F.cross_entropy(logits, labels[:end], ignore_index=IGNORE_INDEX, reduction="sum"))
        return Reference(torch.stack(losses).sum())
