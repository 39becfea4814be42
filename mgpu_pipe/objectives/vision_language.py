"""Answers to questions about pictures: the next token's cross-entropy over the answers of conversations.

A sample is one row, filled up at its end; no token sees what is behind it, so there is no mask; in PaliGemma's rows
those before the answer see each other. Packed rows hold several samples, each with positions of its own, which keep
them apart. Each picture stands in the row as many times as the language model gets vectors of it
(:mod:`mgpu_pipe.objectives.pictures`). A micro-batch without any picture gets a blank one, in a row of its own that
counts nothing: every process then runs every part of the model in every pass, so none waits for another, and every
part's gradients are there, and zero, also where a step happens to hold no picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import BatchSpec, Field
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.kernels.packed_attention import takes_document_starts
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference
from mgpu_pipe.objectives.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import starts_of
from mgpu_pipe.objectives.pictures import Picture, pictures_of
from mgpu_pipe.objectives.tower_features import LlavaFeatures, SeesPictures, keeps_features
from mgpu_pipe.objectives.vision_language_keys import DESCRIPTION, VisionLanguageConfig
from mgpu_pipe.parallel.randomness import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORTEST = 4
"""Tokens of text in a random sample."""


class VisionLanguageObjective(SeesPictures):
    """Cross-entropy of the answers under a Hugging Face model ``...ForConditionalGeneration`` of pictures and text.

    An answer is right if each of its tokens is the likeliest one behind those before it, which is so if and only if
    greedy decoding writes it (see :mod:`mgpu_pipe.objectives.seq2seq`); of several answers in one conversation all are.

    Args:
        chunk_tokens: ``objective.loss_chunk_tokens``; 0 computes the logits whole.
        keeps: ``data.cache_features``.
        packed: a row may hold several conversations.
    """

    description = DESCRIPTION
    num_sums = 3

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        chunk_tokens: int | str,
        keeps: bool = False,
        packed: bool = False,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config = cast(Any, model.config)
        self._config.use_cache = False
        self._packed, self._pictures = packed, pictures_of(self._config, packed)
        self._loss = TokenLoss(model, chunk_tokens)
        self.features = LlavaFeatures(model) if keeps else None

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(VisionLanguageConfig, config.objective)
        packed = config.data.packing != "none"
        return cls(model, optimizer_factory, learning_rate, keys.loss_chunk_tokens, keeps_features(config), packed)

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_ids`` and ``labels``, int64, (rows, seq_len), labels shifted; then the pictures, and where their
        features are kept ``shown``, the pictures' numbers, int64, (rows, most)."""
        labels = Field(padding=IGNORE_INDEX, target=True)
        shown = {"shown": Field(sequence_dim=None, shape=(1,))} if self.features else {}
        return BatchSpec({"input_ids": Field(), "labels": labels, **self._pictures.fields, **shown})

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if self.features is not None:
            self.features.show(batch)
        inputs = self._pictures.inputs(batch)
        apart = self._pictures.apart(inputs)
        if apart is not None and takes_document_starts(cast(Any, self.model).get_decoder()):
            inputs["attention_mask"] = starts_of(batch, apart)
        return inputs

    def sampling_batch(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        return inputs

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
        third the last row counts nothing. Packed rows hold two such rows of half the length.
        """
        if packed:
            return self._in_pairs(self.random_batch(seed, step, 2 * samples, seq_len // 2, False), seq_len)
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))

        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator)

        standing = sorted(one for one in (self._pictures.token, self._pictures.video) if one is not None)
        most = (seq_len - SHORTEST) // (self._pictures.most_tokens + 1)
        ids = draw(0, int(self._config.get_text_config().vocab_size) - len(standing), samples, seq_len + 1)
        for token in standing:
            ids = torch.where(ids >= token, ids + 1, ids)
        counts = draw(0, most + 1, samples)
        counts[-1] = most
        if step % 3 == 0:
            counts[: samples // 2] = 0
        elif step % 3 == 1:
            counts[:] = 0
        counted = torch.zeros(samples, seq_len + 1, dtype=torch.bool)
        shown: list[list[Picture]] = []
        for row, number in enumerate(counts.tolist()):
            begin = int(draw(0, 2, 1))
            shown.append([self._pictures.drawn(generator) for _ in range(number)])
            for picture in shown[-1]:  # a token of text between each two
                ids[row, begin : begin + picture.tokens] = self._pictures.token_of(picture)
                begin += picture.tokens + 1
            end = int(draw(begin + 2, seq_len + 2, 1))
            counted[row, int(draw(begin + 1, end, 1)) : end] = True
            ids[row, end:] = 0
        if step % 3 == 2 and samples > 2:
            counted[-1] = False
        labels = ids.where(counted, torch.tensor(IGNORE_INDEX))[:, 1:].contiguous()
        ids = ids[:, :-1].contiguous()
        return {"input_ids": ids, "labels": labels, **self._pictures.collated(ids, shown)}

    def _in_pairs(self, batch: Batch, seq_len: int) -> Batch:
        """Each two rows of a random batch in one."""
        shown = [self._pictures.of_row(batch, row) for row in range(len(batch["input_ids"]))]
        rows, length = len(shown) // 2, 2 * batch["input_ids"].shape[1]
        ids, labels = (
            F.pad(batch[name].reshape(rows, length), (0, seq_len - length), value=padding)
            for name, padding in (("input_ids", 0), ("labels", IGNORE_INDEX))
        )
        positions = torch.cat([torch.arange(one) for one in (length // 2, length // 2, seq_len - length)])
        positions = positions.repeat(rows, 1)
        if "position_ids" in batch:  # along axes of their own
            axes = batch["position_ids"].unflatten(0, (rows, 2)).transpose(1, 2).flatten(2)
            axes = torch.cat([axes, torch.arange(seq_len - length).expand(rows, axes.shape[1], -1)], 2)
            positions = torch.cat([positions[:, None], axes], 1)
        collated = self._pictures.collated(ids, [shown[at] + shown[at + 1] for at in range(0, len(shown), 2)])
        return {"input_ids": ids, "labels": labels, **collated, "position_ids": positions}

    def _conversations(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Picture]]]:
        """Ids, labels and pictures of each of a random batch."""
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            if not self._packed:
                yield ids, labels, self._pictures.of_row(batch, row)
                continue
            pictures, positions = iter(self._pictures.of_row(batch, row)), batch["position_ids"][row]
            begins = (positions if positions.dim() == 1 else positions[0]) == 0
            sizes = begins.nonzero().flatten().tolist()
            sizes = [end - begin for begin, end in zip(sizes, [*sizes[1:], len(ids)], strict=True)]
            for own, learned in zip(ids.split(sizes), labels.split(sizes), strict=True):
                shown, places = list[Picture](), int(self._pictures.placed(own).sum())
                while places > sum(one.tokens for one in shown):
                    shown.append(next(pictures))
                yield own, learned, shown

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One conversation at a time, without what fills its row up; a blank picture only where no row has one."""
        losses, kind = [], self._pictures
        rows = list(self._conversations(batch))
        if not any(pictures for _, _, pictures in rows):
            blank = kind.blank()
            seen = forward(**kind.alone(torch.full((blank.tokens,), kind.token), [blank], blank.tokens))
            losses.append(0.0 * seen.logits.float().sum())
        for ids, labels, pictures in rows:
            counted = (labels != IGNORE_INDEX).nonzero()
            if len(counted):
                end = int(counted.max()) + 1
                logits = forward(**kind.alone(ids[:end], pictures, int(counted.min()) + 1)).logits[0].float()
                losses.append(F.cross_entropy(logits, labels[:end], ignore_index=IGNORE_INDEX, reduction="sum"))
        return Reference(torch.stack(losses).sum())


OBJECTIVE = VisionLanguageObjective
