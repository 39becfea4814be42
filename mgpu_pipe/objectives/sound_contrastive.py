"""Contrastive learning of recordings and captions, CLAP, over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.models.field_sizes import usable_positions
from mgpu_pipe.models.speech import fix_norms, spectrogram_shape
from mgpu_pipe.objectives.base import Batch, Forward, Reference, step_generator
from mgpu_pipe.objectives.contrastive import ContrastiveObjective, caption_mask, random_captions
from mgpu_pipe.objectives.global_batch import Features, at_least_fp32
from mgpu_pipe.objectives.losses.vectors import pairing_losses
from mgpu_pipe.objectives.picture_keys import SOUND_CONTRASTIVE
from mgpu_pipe.objectives.sound_inputs import SoundObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SoundContrastiveObjective(SoundObjective, ContrastiveObjective):
    """Learns which caption of the step belongs to each recording, and which recording to each caption.

    The loss is the mean of the two cross-entropies, each with its own temperature (Wu et al. 2023, arXiv:2211.06687).
    transformers' ``ClapModel`` returns a loss that counts the captions twice and the recordings never. The batch norm
    of the audio tower keeps its statistics. The arguments are those of the base class; ``max_scale`` bounds both
    temperatures' inverses.
    """

    description = SOUND_CONTRASTIVE

    def __init__(self, model: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        fix_norms(model)
        super().__init__(model, *arguments, **options)
        self._shape = spectrogram_shape(self._config)

    @property
    def batch_spec(self) -> BatchSpec:
        """``input_features``, float32, (rows, 1, frames, bands); ``input_ids``, int64, (rows, seq_len); ``labels`` and
        ``recording_ids``, int64, (rows,), equal for equal captions and equal recordings."""
        return BatchSpec(
            {
                "input_features": Field(sequence_dim=None, dtype="float32", shape=self._shape),
                "input_ids": Field(),
                "labels": Field(sequence_dim=None),
                "recording_ids": Field(sequence_dim=None),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        inputs = {name: batch[name] for name in ("input_features", "input_ids")}
        return {**inputs, "attention_mask": caption_mask(inputs["input_ids"], self._end)}

    def _scale(self, model: Any, _: object, output: Any) -> Any:
        """Adds the features times their temperature's inverse, whose products with the others are the logits."""
        for name, scale in (("audio_embeds", model.logit_scale_a), ("text_embeds", model.logit_scale_t)):
            features = at_least_fp32(output[name])
            scaled = features * at_least_fp32(scale).clamp(max=self._most).exp()
            setattr(output, name, torch.cat([features, scaled], dim=1))
        return output

    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        output = self.model(**self.model_inputs(batch))
        sounds, scaled_sounds = output.audio_embeds.chunk(2, dim=1)
        texts, scaled_texts = output.text_embeds.chunk(2, dim=1)
        return {"sounds": sounds, "scaled_sounds": scaled_sounds, "texts": texts, "scaled_texts": scaled_texts}

    def pair_labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        return {name: batch[name] for name in ("labels", "recording_ids")}

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        losses = []
        for queries, keys in (("scaled_sounds", "texts"), ("scaled_texts", "sounds")):
            buffers = (gradients[queries], gradients[keys]) if gradients else None
            losses.append(pairing_losses(features[queries], features[keys], rows, buffers))
        for gradient in (gradients or {}).values():
            gradient.div_(2)
        return (losses[0] + losses[1]) / 2

    def collect_heldout(self, features: Features, rows: slice) -> None:
        """Keeps the features under the names of pictures and captions, for the same metrics."""
        names = {"images": "sounds", "texts": "texts", "labels": "labels", "picture_ids": "recording_ids"}
        super().collect_heldout({ours: features[name] for ours, name in names.items()}, rows)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Noise, and captions padded with their end token. The last caption fills its row."""
        generator, text = step_generator(seed, step), self._config.text_config
        most = usable_positions(text.max_position_embeddings, text.pad_token_id, text.model_type)
        ids = random_captions(samples, min(seq_len, most), text.vocab_size, self._end, generator)
        sounds = torch.randn(samples, *self._shape, generator=generator)
        numbered = {name: torch.arange(samples) for name in ("labels", "recording_ids")}
        return {"input_features": sounds, "input_ids": ids, **numbered}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """Logits of transformers of one recording and one caption at a time, with the stored statistics."""
        cast(Any, model).audio_model.audio_encoder.batch_norm.eval()
        pairs = [
            forward(input_features=sound[None], input_ids=row[None, : row.tolist().index(self._end) + 1])
            for sound, row in zip(batch["input_features"], batch["input_ids"], strict=True)
        ]
        sounds, texts = (torch.cat([pair[name] for pair in pairs]) for name in ("audio_embeds", "text_embeds"))
        scales = [cast(torch.Tensor, getattr(model, f"logit_scale_{name}")).exp() for name in ("a", "t")]
        by_sound, by_caption = sounds @ texts.T * scales[0], texts @ sounds.T * scales[1]
        logs = sum(logits.float().log_softmax(1).diagonal() for logits in (by_sound, by_caption))
        return Reference(-cast(torch.Tensor, logs).sum() / 2)
