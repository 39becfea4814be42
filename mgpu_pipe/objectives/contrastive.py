"""Contrastive learning of pictures and captions, CLIP and SigLIP, over the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.data.step_batch import BatchSpec, Field
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, step_generator
from mgpu_pipe.objectives.class_sums import ClassPrompts, ClassSums, class_vectors
from mgpu_pipe.objectives.global_batch import Features, GlobalBatchObjective, at_least_fp32
from mgpu_pipe.objectives.losses.vectors import pairing_losses
from mgpu_pipe.objectives.picture_keys import CONTRASTIVE, DIRECTIONS, RANKS, ContrastiveConfig, SoundContrastiveConfig
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.objectives.tower_features import PictureObjective, PooledFeatures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HELDOUT_CHUNK = 1024
"""Number of held-out samples that are compared with all others at a time."""


class ContrastiveObjective(PictureObjective, GlobalBatchObjective):
    """Learns which caption of the step belongs to each picture, and which picture to each caption.

    CLIP's loss is the mean of the two cross-entropies (Radford et al. 2021, arXiv:2103.00020). A model with a bias gets
    SigLIP's: the sum over all pairs of the binary ones (Zhai et al. 2023, arXiv:2303.15343). Its captions travel a ring
    of processes where no two share samples. Both are a mean over samples.

    Args:
        max_scale: upper bound of the temperature's inverse.
        cache_features: ``data.cache_features``.
    """

    description = CONTRASTIVE
    num_sums = 3 + len(DIRECTIONS) * len(RANKS)

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        max_scale: float = 100.0,
        cache_features: bool = False,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config, self._most = cast(Any, model.config), math.log(max_scale)
        self._pairwise = hasattr(model, "logit_bias")
        self._end = caption_end_token(self._config)
        self.features = PooledFeatures(model) if cache_features else None
        self._held_out: list[tuple[Features, slice]] = []
        self._prompts: ClassPrompts | None = None
        self._class_sums: ClassSums | None = None
        # A hook of the model itself: only there sharded parameters are whole.
        model.register_forward_hook(self._scale)

    @classmethod
    def arguments(cls, keys: ContrastiveConfig | SoundContrastiveConfig) -> tuple[Any, ...]:
        return (keys.max_scale,)

    @property
    def batch_spec(self) -> BatchSpec:
        """``pixel_values``, float32, (rows, channels, height, width); ``input_ids``, int64, (rows, seq_len);
        ``labels`` and ``picture_ids``, int64, (rows,), equal for equal captions and equal pictures; then
        :meth:`picture_number_field`."""
        return BatchSpec(
            {
                "pixel_values": Field(sequence_dim=None, dtype="float32", shape=picture_shape(self._config)),
                "input_ids": Field(),
                "labels": Field(sequence_dim=None),
                "picture_ids": Field(sequence_dim=None),
                **self.picture_number_field(),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if self.features is not None:
            self.features.set_pictures(batch)
        return two_tower_inputs(batch, self._config)

    def _scale(self, model: Any, _: object, output: Any) -> Any:
        """Folds temperature and bias into the features, so that their products are the logits."""
        images, texts = at_least_fp32(output.image_embeds), at_least_fp32(output.text_embeds)
        images = images * at_least_fp32(model.logit_scale).clamp(max=self._most).exp()
        if self._pairwise:
            ones = texts.new_ones(len(texts), 1)
            images = torch.cat([images, at_least_fp32(model.logit_bias) * ones], dim=1)
            texts = torch.cat([texts, ones], dim=1)
        output.image_embeds, output.text_embeds = images, texts
        return output

    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        output = self.model(**self.model_inputs(batch))
        return {"images": output.image_embeds, "texts": output.text_embeds}

    def pair_labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        return {name: batch[name] for name in ("labels", "picture_ids")}

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        images, texts = features["images"], features["texts"]
        buffers = (gradients["images"], gradients["texts"]) if gradients else None
        if self._pairwise:
            return pairing_losses(images, texts, rows, buffers, _sigmoid_pairing)
        by_picture = pairing_losses(images, texts, rows, buffers)
        by_caption = pairing_losses(texts, images, rows, buffers and buffers[::-1])
        for gradient in buffers or ():
            gradient.div_(2)
        return (by_picture + by_caption) / 2

    def losses_by_ring(self, mine: Features, world: SampleGroup) -> tuple[torch.Tensor, Features] | None:
        """SigLIP's losses. Captions travel the ring with their gradients, to which each process adds, and return to
        the process they came from (Zhai et al. 2023, section 3.3)."""
        if not self._pairwise:
            return None
        images, rows = mine["images"], slice(0, len(mine["images"]))
        image_gradients = torch.zeros_like(images)
        travelling = torch.stack([mine["texts"], torch.zeros_like(mine["texts"])])
        losses = images.new_zeros(len(images))
        for turn in range(world.ring):
            pairing, buffers = _sigmoid_strangers if turn else _sigmoid_pairing, (image_gradients, travelling[1])
            losses += pairing_losses(images, travelling[0], rows, buffers, pairing)
            travelling = world.pass_on(travelling if turn + 1 < world.ring else travelling[1:])
        return losses, {"images": image_gradients, "texts": travelling[-1]}

    def classify_by(self, prompts: ClassPrompts) -> None:
        """Lets the evaluation classify its pictures by these prompts too; their labels are the classes. The findings
        then have ``zero_shot``, with the figures of :meth:`ClassSums.findings`."""
        self._prompts, self._class_sums = prompts, ClassSums(len(prompts.names))
        self.num_sums += self._class_sums.num_sums  # type: ignore[misc]  # the data has the classes

    def findings(self, sums: Sequence[float]) -> dict[str, Any]:
        prompts, class_sums = self._prompts, self._class_sums
        if prompts is None or class_sums is None:
            return {}
        last = sums[-1 - class_sums.num_sums :]
        shares = {"accuracy": last[1] / last[-1], "top5_accuracy": last[2] / last[-1]}
        shape = {"names": prompts.names, "templates": prompts.tokens.shape[1]}
        return {"zero_shot": {**shape, **shares, **class_sums.findings(last)}}

    def _encode_prompts(self, ids: torch.Tensor) -> torch.Tensor:
        """Text features of token rows, without those of a bias."""
        device = next(self.model.parameters()).device
        picture = torch.zeros(1, *picture_shape(self._config), device=device)
        texts = self.encode({"pixel_values": picture, "input_ids": ids.to(device)})["texts"]
        return texts[:, : texts.shape[1] - self._pairwise]

    def collect_heldout(self, features: Features, rows: slice) -> None:
        if self.features is None or not self.features.is_measuring:
            self._held_out.append((features, rows))

    def last_sums(self, world: SampleGroup) -> torch.Tensor | float:
        """Sums of the held-out metrics: pictures, right nearest classes, then recalls at ``RANKS``.

        A class is the mean of its held-out captions. The recalls count how often a right one is among the nearest: of
        all held-out captions for a picture, and of all held-out pictures for a caption. A caption is right for a
        picture if a sample pairs them. A picture of several samples counts once (Faghri et al. 2018, arXiv:1707.05612,
        section 4.1).
        """
        if not self._held_out:
            return 0.0
        whole = {name: torch.cat([features[name] for features, _ in self._held_out]) for name in self._held_out[0][0]}
        local_rows, offset = [], 0
        for features, rows in self._held_out:
            local_rows.append(
                torch.arange(offset, offset + len(features["labels"]), device=whole["labels"].device)[rows]
            )
            offset += len(features["labels"])
        self._held_out = []
        images, texts = whole["images"], whole["texts"]
        classes, label = whole["labels"].long().unique(return_inverse=True)
        pictures, picture, samples = whole["picture_ids"].long().unique(return_inverse=True, return_counts=True)
        order = torch.arange(len(picture), device=picture.device)
        first = torch.zeros_like(pictures).scatter_reduce_(0, picture, order, "amin", include_self=False)
        right_pairs = (picture * len(classes) + label).unique()
        plain = texts.shape[1] - self._pairwise
        means = texts.new_zeros(len(classes), plain).index_add_(0, label, texts[:, :plain])
        means = F.normalize(means, dim=1)
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=images.device)
        for rows in torch.cat(local_rows).split(HELDOUT_CHUNK):
            share, seen, caption_class = 1 / samples[picture[rows]].double(), picture[rows, None], label[rows, None]
            nearest_class = (images[rows, :plain] @ means.T).argmax(1, keepdim=True)
            sums[1] += share.sum()
            sums[2] += torch.isin(seen * len(classes) + nearest_class, right_pairs).sum()
            nearest_captions = label[_nearest_keys(images[rows], texts)]
            nearest_pictures = _nearest_keys(texts[rows], images[first])
            right = (
                (torch.isin(seen * len(classes) + nearest_captions, right_pairs), share),
                (torch.isin(nearest_pictures * len(classes) + caption_class, right_pairs), torch.ones_like(share)),
            )
            for index, rank in enumerate(RANKS):
                for number, (is_right, weight) in enumerate(right):
                    sums[3 + number * len(RANKS) + index] += (is_right[:, :rank].any(1) * weight).sum()
        if self._prompts is not None and self._class_sums is not None:
            local = torch.cat(local_rows)
            logits = images[local, :plain] @ class_vectors(self._encode_prompts, self._prompts.tokens).T
            truth = whole["labels"].long()[local]
            loss = F.cross_entropy(logits, truth, reduction="sum")
            sums[-self._class_sums.num_sums :] += self._class_sums.sums(loss, logits, truth)
        return world.sum_over_samples(sums)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random pictures, and captions padded with their end token. The last caption fills its row."""
        generator = step_generator(seed, step)
        text = self._config.text_config
        length = min(seq_len, text.max_position_embeddings)
        ids = random_captions(samples, length, text.vocab_size, self._end, generator)
        pictures = torch.randn(samples, *picture_shape(self._config), generator=generator)
        numbered = {name: torch.arange(samples) for name in ("labels", "picture_ids")}
        return {"pixel_values": pictures, "input_ids": ids, **numbered}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """Logits of the whole batch by transformers; bidirectional captions are read one at a time."""
        pixels, ids = batch["pixel_values"], batch["input_ids"]
        if family_of(self._config.model_type).caption_mask:
            captions = [row[None, : row.tolist().index(self._end) + 1] for row in ids]
            seen = forward(pixel_values=pixels, input_ids=captions[0])
            texts = torch.cat([forward(pixel_values=pixels[:1], input_ids=caption).text_embeds for caption in captions])
            logits = seen.image_embeds @ texts.T * cast(torch.Tensor, model.logit_scale).exp()
        else:
            logits = forward(pixel_values=pixels, input_ids=ids).logits_per_image
        if hasattr(model, "logit_bias"):
            signs = 2 * torch.eye(len(logits)) - 1
            return Reference(-(logits.float() * signs).sigmoid().log().sum())
        logs = logits.float().log_softmax(1).diagonal() + logits.float().log_softmax(0).diagonal()
        return Reference(-logs.sum() / 2)


def caption_end_token(config: Any) -> int:
    """Id of the token that ends a caption of the model with ``config``."""
    text = config.text_config
    return int(text.vocab_size - 1 if text.eos_token_id is None else text.eos_token_id)


def two_tower_inputs(batch: Mapping[str, torch.Tensor], config: Any) -> dict[str, Any]:
    """Arguments for pictures and captions of the model with ``config``."""
    inputs = {name: batch[name] for name in ("pixel_values", "input_ids")}
    if not family_of(config.model_type).caption_mask:
        return inputs
    return {**inputs, "attention_mask": caption_mask(batch["input_ids"], caption_end_token(config))}


def caption_mask(ids: torch.Tensor, end: int) -> torch.Tensor:
    """1 up to the first ``end`` of each caption, 0 after it, int64, like ``ids``, (rows, seq_len)."""
    ends = (ids == end).long()
    return (ends.cumsum(1) - ends == 0).long()


def random_captions(samples: int, length: int, vocab_size: int, end: int, generator: torch.Generator) -> torch.Tensor:
    """Random tokens of captions of uneven lengths, padded with ``end``, int64, (samples, length). The last caption
    fills its row."""
    ids = torch.randint(0, vocab_size - 1, (samples, length), generator=generator)
    ids = torch.where(ids >= end, ids + 1, ids)
    lengths = torch.randint(2, length + 1, (samples, 1), generator=generator)
    lengths[-1] = length
    ids[torch.arange(length) >= lengths - 1] = end
    return ids


def _nearest_keys(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Indices of the keys nearest to each query, nearest first."""
    return (queries @ keys.T).topk(min(max(RANKS), len(keys))).indices


def _sigmoid_pairing(logits: torch.Tensor, right_column: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropies of rows summed over columns (Zhai et al. 2023); ``logits`` become the gradients."""
    logits.scatter_(1, right_column, -logits.gather(1, right_column))
    losses = F.softplus(logits).sum(1)
    logits.sigmoid_().scatter_(1, right_column, -logits.gather(1, right_column))
    return losses


def _sigmoid_strangers(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropies of rows without a right column, in place: ``logits`` become the gradients."""
    losses = F.softplus(logits).sum(1)
    logits.sigmoid_()
    return losses
