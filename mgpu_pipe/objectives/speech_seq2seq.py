"""Speech recognition by an encoder of recordings and a decoder of transcripts (Whisper: Radford et al. 2022).

A recording fills a window of fixed length, so its loss does not depend on its micro-batch. The word error rate is that
of greedy decoding. Where each transcript token is the likeliest after those before it, the greedy transcript is known
and nothing is generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.audio.speech_keys import AudioConfig
from mgpu_pipe.data.samples import Prepared, SampleSet
from mgpu_pipe.data.step_batch import IGNORE_INDEX, BatchSpec, Field
from mgpu_pipe.models.speech import greedy_transcripts, prepare_spectrogram_encoder, spectrogram_shape
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Objective, Reference
from mgpu_pipe.objectives.losses.loss_head import TokenLoss
from mgpu_pipe.objectives.spectrogram_inputs import Spectrograms
from mgpu_pipe.objectives.speech_seq2seq_keys import DESCRIPTION, SpeechSeq2SeqConfig
from mgpu_pipe.objectives.transcripts import count_errors
from mgpu_pipe.parallel.random_streams import step_seed
from mgpu_pipe.system.compat.transformers_private import hide_nothing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.data.audio.transcript_tokens import Words

VERIFY_MAX_TOKENS = 12
"""Most tokens of a transcript of ``verify``."""


class SpeechSeq2SeqObjective(Objective):
    """Cross-entropy of the transcripts under a Hugging Face model ``...ForSpeechSeq2Seq``.

    Args:
        keys: ``objective.*``.
    """

    description = DESCRIPTION
    num_sums = 6

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: SpeechSeq2SeqConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        prepare_spectrogram_encoder(model)
        self._loss, self._most = TokenLoss(model, keys.loss_chunk_tokens), keys.max_new_tokens
        self._words: Words | None = None
        self.gathers = torch.distributed.is_initialized()  # all ranks must end an evaluation together

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        return cls(model, optimizer_factory, learning_rate, cast(SpeechSeq2SeqConfig, config.objective))

    @classmethod
    def samples(cls, config: RunConfig, samples: SampleSet) -> SampleSet:
        assert isinstance(config.data, AudioConfig)
        window = LogMel.from_model(config.model, Sound.from_config(config.data, config.model).rate)
        assert window is not None
        return Spectrograms.from_config(config, samples, window)

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
    def _shape(self) -> tuple[int, int]:
        return spectrogram_shape(self.model.config)

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Arguments of encoder and decoder. The decoder reads its start token, then the labels before the next one."""
        labels = batch["labels"]
        before = labels.new_full(labels.shape, int(cast(Any, self.model.config).decoder_start_token_id))
        before[:, 1:] = labels[:, :-1].clamp_min(0)
        return {"input_features": batch["input_features"], "decoder_input_ids": before, "use_cache": False}

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss.sum(self.model_inputs(batch), batch["labels"])

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"]
        loss, right = self._loss.predictions(self.model_inputs(batch), labels)
        known = (right | (labels == IGNORE_INDEX)).all(1)
        written = greedy_transcripts(self.model, batch["input_features"], self._most, known)
        assert self._words is not None
        pairs = []
        for row, tokens, is_known in zip(labels.tolist(), written, known.tolist(), strict=True):
            said = self._words.decode(label for label in row if label != IGNORE_INDEX)
            pairs += [(said, said if is_known else self._words.decode(tokens))] if said else []
        sums = torch.tensor([float(right.sum()), *count_errors(pairs)], dtype=torch.float64, device=labels.device)
        return torch.cat([loss.detach().double().reshape(1), sums])

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise, and transcripts of uneven lengths. In every third step the last recording has none."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        vocabulary = int(cast(Any, self.model.config).vocab_size)
        labels = torch.randint(0, vocabulary, (samples, VERIFY_MAX_TOKENS), generator=generator)
        written = torch.randint(1, VERIFY_MAX_TOKENS + 1, (samples, 1), generator=generator)
        if step % 3 == 2 and samples > 2:
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


OBJECTIVE = SpeechSeq2SeqObjective
