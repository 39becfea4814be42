"""Sequence-to-sequence learning: an encoder reads the source, a decoder learns to write the target.

The exact match of greedy answers needs no generation. The greedy answer is the target if and only if each target token,
with the end token, is the likeliest one after those before it. The evaluation's forward pass shows that. (If all are,
greedy decoding takes them one by one; if not, it leaves the target at the first.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.speech import greedy_transcripts, prepare_spectrogram_encoder, spectrogram_shape
from mgpu_pipe.objectives.base import Batch, Forward, KeyedObjective, LearningRate, Objective, Reference, step_generator
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.packed_text import skips_last
from mgpu_pipe.objectives.sound_inputs import SoundObjective
from mgpu_pipe.objectives.text_keys import SEQ2SEQ, Seq2SeqConfig
from mgpu_pipe.objectives.transcript_keys import SPEECH_SEQ2SEQ, SpeechSeq2SeqConfig, count_errors
from mgpu_pipe.system.compat.transformers_private import hide_nothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.data.audio.transcript_tokens import Words


class Seq2SeqObjective(Objective):
    """Cross-entropy of the targets under a Hugging Face encoder-decoder model.

    Args:
        chunk_tokens: ``objective.loss_chunk_tokens``; 0 computes the logits whole.
    """

    description = SEQ2SEQ
    num_sums = 4

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, chunk_tokens: int | str
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._loss = TokenLoss(model, chunk_tokens)

    @classmethod
    def arguments(cls, keys: Seq2SeqConfig) -> tuple[Any, ...]:
        return (keys.loss_chunk_tokens,)

    @property
    def batch_spec(self) -> BatchSpec:
        """int64 tensors: ``input_ids`` and ``attention_mask`` (1 where there is a token), shape ``(rows, seq_len)``;
        ``labels``, shape ``(rows, target_len)``, which end with the end-of-sequence token.
        """
        return BatchSpec(
            {"input_ids": Field(), "attention_mask": Field(), "labels": Field(padding=IGNORE_INDEX, target=True)}
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        labels, mask = batch["labels"], batch["attention_mask"].clone()
        mask[:, 0] = 1  # attention of an empty row needs a token
        return {"input_ids": batch["input_ids"], "attention_mask": mask, **decoder_inputs(self.model.config, labels)}

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(self.model_inputs(batch), batch["labels"])

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"]
        loss, right = self._loss.predictions(self.model_inputs(batch), labels)
        return torch.stack([value.double() for value in (loss, right.sum(), *count_answers(right, labels))])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Pairs of uneven lengths; targets are the shorter ones. In every third step the last has no target."""
        generator = step_generator(seed, step)
        room = max(2, seq_len * 2 // 3)
        vocabulary = int(self.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        ids = torch.randint(0, vocabulary, (samples, seq_len), generator=generator)
        labels = torch.randint(0, vocabulary, (samples, room), generator=generator)
        lengths = torch.randint(1, seq_len + 1, (samples, 1), generator=generator)
        targets = torch.randint(1, room + 1, (samples, 1), generator=generator)
        if skips_last(step, samples):
            targets[-1] = 0
        mask = torch.arange(seq_len) < lengths
        return {
            "input_ids": ids.masked_fill(~mask, 0),
            "attention_mask": mask.long(),
            "labels": labels.masked_fill(torch.arange(room) >= targets, IGNORE_INDEX),
        }

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One pair at a time, without padding; the model builds the decoder's inputs from the labels."""
        losses = []
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            source, target = ids[mask == 1], labels[labels != IGNORE_INDEX]
            if len(target):
                logits = forward(input_ids=source[None], labels=target[None]).logits[0].float()
                losses.append(F.cross_entropy(logits, target, reduction="sum"))
        return Reference(torch.stack(losses).sum())


def decoder_inputs(config: Any, labels: torch.Tensor) -> dict[str, Any]:
    """Arguments of the decoder, which reads its start token, then the labels before the next one."""
    before = labels.new_full(labels.shape, int(config.decoder_start_token_id))
    before[:, 1:] = labels[:, :-1].clamp_min(0)
    return {"decoder_input_ids": before, "use_cache": False}


def count_answers(right: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of rows whose labels are all ``right``, a mask of (rows, tokens), and of rows with labels."""
    counts = labels != IGNORE_INDEX
    answers = counts.any(1)
    return ((right | ~counts).all(1) & answers).sum(), answers.sum()


VERIFY_MAX_TOKENS = 12
"""Most tokens of a transcript of ``verify``."""


class SpeechSeq2SeqObjective(KeyedObjective, SoundObjective):
    """Cross-entropy of the transcripts under a Hugging Face model ``...ForSpeechSeq2Seq``."""

    description = SPEECH_SEQ2SEQ
    num_sums = 6
    keys: SpeechSeq2SeqConfig

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: SpeechSeq2SeqConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate, keys)
        prepare_spectrogram_encoder(model)
        self._loss = TokenLoss(model, keys.loss_chunk_tokens)
        self._words: Words | None = None
        self.gathers = torch.distributed.is_initialized()  # all ranks must end an evaluation together

    def of_data(self, prepared: Prepared) -> None:
        assert isinstance(prepared, PreparedSpeech)
        self._words = cast("Words", prepared.alphabet())

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_features``, float32, (rows, bands, frames); ``labels``, int64, (rows, tokens), which end with the
        end-of-text token."""
        return BatchSpec(
            {
                "input_features": Field(sequence_dim=None, dtype="float32", shape=self._shape),
                "labels": Field(padding=IGNORE_INDEX, target=True),
            }
        )

    @property
    def _shape(self) -> tuple[int, ...]:
        return spectrogram_shape(self.model.config)

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {"input_features": batch["input_features"], **decoder_inputs(self.model.config, batch["labels"])}

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(self.model_inputs(batch), batch["labels"])

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"]
        loss, right = self._loss.predictions(self.model_inputs(batch), labels)
        known = (right | (labels == IGNORE_INDEX)).all(1)
        written = greedy_transcripts(self.model, batch["input_features"], self.keys.max_new_tokens, known)
        assert self._words is not None
        pairs = []
        for row, tokens, is_known in zip(labels.tolist(), written, known.tolist(), strict=True):
            said = self._words.decode(label for label in row if label != IGNORE_INDEX)
            pairs += [(said, said if is_known else self._words.decode(tokens))] if said else []
        sums = torch.tensor([float(right.sum()), *count_errors(pairs)], dtype=torch.float64, device=labels.device)
        return torch.cat([loss.detach().double().reshape(1), sums])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise, and transcripts of uneven lengths. In every third step the last recording has none."""
        generator = step_generator(seed, step)
        vocabulary = int(cast(Any, self.model.config).vocab_size)
        labels = torch.randint(0, vocabulary, (samples, VERIFY_MAX_TOKENS), generator=generator)
        written = torch.randint(1, VERIFY_MAX_TOKENS + 1, (samples, 1), generator=generator)
        if skips_last(step, samples):
            written[-1] = 0
        return {
            "input_features": torch.randn(samples, *self._shape, generator=generator),
            "labels": labels.masked_fill(torch.arange(VERIFY_MAX_TOKENS) >= written, IGNORE_INDEX),
        }

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """One recording at a time; the model builds the decoder's inputs from the labels."""
        hide_nothing(model)  # the samples already have hidden spans
        losses = []
        for features, labels in zip(batch["input_features"], batch["labels"], strict=True):
            target = labels[labels != IGNORE_INDEX]
            if len(target):
                logits = forward(input_features=features[None], labels=target[None]).logits[0].float()
                losses.append(F.cross_entropy(logits, target, reduction="sum"))
        return Reference(torch.stack(losses).sum())
