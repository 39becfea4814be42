"""Contrastive learning of pictures and captions: CLIP and SigLIP, over the global batch however it is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from typing_extensions import Self

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import BatchSpec, Field
from mgpu_pipe.families.pictures import READ_WHOLE
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.base import Batch, Forward, LearningRate, Reference, Together
from mgpu_pipe.objectives.contrastive_keys import DESCRIPTION, DIRECTIONS, RANKS, ContrastiveConfig
from mgpu_pipe.objectives.global_batch import Features, GlobalBatchObjective, at_least_fp32
from mgpu_pipe.objectives.tower_features import PooledFeatures, SeesPictures, keeps_features
from mgpu_pipe.parallel.randomness import step_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AT_ONCE = 1024
"""Held-out samples that are compared with all others together."""


class ContrastiveObjective(SeesPictures, GlobalBatchObjective):
    """Each picture is told from the captions of all others of its step, and each caption from their pictures.

    CLIP's loss is the mean of the two cross-entropies (Radford et al. 2021, arXiv:2103.00020). SigLIP's, of a model
    with a bias, is the sum over all pairs of the binary ones (Zhai et al. 2023, arXiv:2303.15343), whose captions go
    round the processes where none share samples. Both are a mean over samples.

    Args:
        max_scale: of the temperature's inverse.
        keeps: ``data.cache_features``.
    """

    description = DESCRIPTION
    num_sums = 2 + len(DIRECTIONS) * len(RANKS)

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_factory: Any,
        learning_rate: LearningRate,
        max_scale: float = 100.0,
        keeps: bool = False,
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._config, self._most = cast(Any, model.config), math.log(max_scale)
        self._pairwise = hasattr(model, "logit_bias")
        self._end = end_of_captions(self._config)
        self.features = PooledFeatures(model) if keeps else None
        self._held_out: list[tuple[Features, slice]] = []
        # A hook of the model's own: sharded parameters are whole there, and nowhere else.
        model.register_forward_hook(self._scale)

    @classmethod
    def from_config(
        cls, config: RunConfig, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate
    ) -> Self:
        keys = cast(ContrastiveConfig, config.objective)
        return cls(model, optimizer_factory, learning_rate, keys.max_scale, keeps_features(config))

    @property
    def batch_spec(self) -> BatchSpec:
        """``pixel_values``, float32, (rows, channels, height, width); ``input_ids``, int64, (rows, seq_len); and
        ``labels``, int64, (rows,), equal where captions say the same; then :meth:`shown`."""
        return BatchSpec(
            {
                "pixel_values": Field(sequence_dim=None, dtype="float32", shape=picture_shape(self._config)),
                "input_ids": Field(),
                "labels": Field(sequence_dim=None),
                **self.shown(),
            }
        )

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        if self.features is not None:
            self.features.show(batch)
        return seen_and_read(batch, self._config)

    def _scale(self, model: Any, _: object, output: Any) -> Any:
        """Bring temperature and bias into the features, so that their products are the logits."""
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

    def beside(self, batch: Mapping[str, torch.Tensor]) -> Features:
        return {"labels": batch["labels"]}

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        if self._pairwise:
            return _compared(_pairs, "images", "texts", features, rows, gradients)
        by_picture = _compared(_nearest, "images", "texts", features, rows, gradients)
        by_caption = _compared(_nearest, "texts", "images", features, rows, gradients)
        for gradient in (gradients or {}).values():
            gradient.div_(2)
        return (by_picture + by_caption) / 2

    def losses_in_turns(self, mine: Features, world: Together) -> tuple[torch.Tensor, Features] | None:
        """SigLIP's: captions go round the processes, and with them the gradients that each adds to theirs; they end
        where they belong (Zhai et al. 2023, section 3.3)."""
        if not self._pairwise:
            return None
        images, rows = mine["images"], slice(0, len(mine["images"]))
        own = torch.zeros_like(images)
        passing = torch.stack([mine["texts"], torch.zeros_like(mine["texts"])])
        losses = images.new_zeros(len(images))
        for turn in range(world.ring):
            features, gradients = {"images": images, "texts": passing[0]}, {"images": own, "texts": passing[1]}
            losses += _compared(_strangers if turn else _pairs, "images", "texts", features, rows, gradients)
            passing = world.pass_on(passing if turn + 1 < world.ring else passing[1:])
        return losses, {"images": own, "texts": passing[-1]}

    def met(self, features: Features, rows: slice) -> None:
        if self.features is None or not self.features.measures:
            self._held_out.append((features, rows))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.micro_batch_loss(batch).double()
        return F.pad(loss.reshape(1), (0, self.num_sums - 1))

    def last_sums(self, world: Together) -> torch.Tensor | float:
        """How often the right class is the nearest one, the mean of its held-out captions; and how often a caption
        that says the same, or a picture of it, is among the nearest ``RANKS`` of all held-out ones."""
        if not self._held_out:
            return 0.0
        whole = {name: torch.cat([one[name] for one, _ in self._held_out]) for name in self._held_out[0][0]}
        own, begins = [], 0
        for features, rows in self._held_out:
            own.append(torch.arange(begins, begins + len(features["labels"]), device=whole["labels"].device)[rows])
            begins += len(features["labels"])
        self._held_out = []
        images, texts, labels = whole["images"], whole["texts"], whole["labels"].long()
        classes, place = labels.unique(return_inverse=True)
        plain = texts.shape[1] - self._pairwise
        means = texts.new_zeros(len(classes), plain).index_add_(0, place, texts[:, :plain])
        means = F.normalize(means, dim=1)
        sums = torch.zeros(self.num_sums, dtype=torch.float64, device=images.device)
        for rows in torch.cat(own).split(AT_ONCE):
            sums[1] += (classes[(images[rows, :plain] @ means.T).argmax(1)] == labels[rows]).sum()
            for number, (queries, keys) in enumerate(((images, texts), (texts, images))):
                nearest = (queries[rows] @ keys.T).topk(min(max(RANKS), len(labels))).indices
                right = labels[nearest] == labels[rows][:, None]
                for at, rank in enumerate(RANKS):
                    sums[2 + number * len(RANKS) + at] += right[:, :rank].any(1).sum()
        return world.sum_over_samples(sums)

    def random_batch(self, seed: int, step: int, samples: int, seq_len: int, packed: bool) -> Batch:
        """Random pictures and captions, whose end fills up their rows; the last caption is as long as a row."""
        generator = torch.Generator().manual_seed(step_seed(seed, step, -1))
        text = self._config.text_config
        length = min(seq_len, text.max_position_embeddings)
        ids = torch.randint(0, text.vocab_size - 1, (samples, length), generator=generator)
        ids = torch.where(ids >= self._end, ids + 1, ids)
        lengths = torch.randint(2, length + 1, (samples, 1), generator=generator)
        lengths[-1] = length
        ids[torch.arange(length) >= lengths - 1] = self._end
        pictures = torch.randn(samples, *picture_shape(self._config), generator=generator)
        return {"pixel_values": pictures, "input_ids": ids, "labels": torch.arange(samples)}

    def reference_loss(self, forward: Forward, model: PreTrainedModel, batch: Batch) -> Reference:
        """transformers' own logits of the whole batch; captions that are read in both directions one at a time."""
        pixels, ids = batch["pixel_values"], batch["input_ids"]
        if self._config.model_type in READ_WHOLE:
            captions = [row[None, : row.tolist().index(self._end) + 1] for row in ids]
            seen = forward(pixel_values=pixels, input_ids=captions[0])
            texts = torch.cat([forward(pixel_values=pixels[:1], input_ids=one).text_embeds for one in captions])
            logits = seen.image_embeds @ texts.T * cast(torch.Tensor, model.logit_scale).exp()
        else:
            logits = forward(pixel_values=pixels, input_ids=ids).logits_per_image
        if hasattr(model, "logit_bias"):
            signs = 2 * torch.eye(len(logits)) - 1
            return Reference(-(logits.float() * signs).sigmoid().log().sum())
        logs = logits.float().log_softmax(1).diagonal() + logits.float().log_softmax(0).diagonal()
        return Reference(-logs.sum() / 2)


def end_of_captions(config: Any) -> int:
    """The token that ends a caption, of a model of that configuration."""
    text = config.text_config
    return int(text.vocab_size - 1 if text.eos_token_id is None else text.eos_token_id)


def seen_and_read(batch: Mapping[str, torch.Tensor], config: Any) -> dict[str, Any]:
    """The arguments of a model of that configuration for pictures and captions."""
    inputs = {name: batch[name] for name in ("pixel_values", "input_ids")}
    if config.model_type not in READ_WHOLE:
        return inputs
    ends = (batch["input_ids"] == end_of_captions(config)).long()
    return {**inputs, "attention_mask": (ends.cumsum(1) - ends == 0).long()}


def _compared(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    of: str,
    to: str,
    features: Features,
    rows: slice,
    gradients: Features | None,
) -> torch.Tensor:
    """The losses of some features, each of which belongs to the other of its number; their gradients are added.

    The products held at a time are those of at most a quarter of the rows, and at most a quarter of the other features.
    """
    queries, keys = features[of], features[to]
    at_once = max(1, min(keys.shape[1], rows.stop - rows.start) // 4)
    losses = [queries.new_zeros(0)]
    for begin in range(rows.start, rows.stop, at_once):
        some = slice(begin, min(begin + at_once, rows.stop))
        logits = queries[some] @ keys.T
        losses.append(loss(logits, torch.arange(some.start, some.stop, device=keys.device)[:, None]))
        if gradients:
            gradients[of][some].addmm_(logits, keys)
            gradients[to].addmm_(logits.T, queries[some])
        del logits  # before the next ones are computed
    return torch.cat(losses)


def _nearest(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each row, whose right column is ``own``; ``logits`` become its gradients."""
    highest = logits.amax(1, keepdim=True)
    right = logits.gather(1, own) - highest
    total = logits.sub_(highest).exp_().sum(1, keepdim=True)
    logits.div_(total).scatter_add_(1, own, torch.full_like(right, -1))
    return (total.log() - right).squeeze(1)


def _pairs(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Whether each column is the right one, asked of each by itself; ``logits`` become the gradients of each row's
    sum (Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training")."""
    logits.scatter_(1, own, -logits.gather(1, own))
    losses = F.softplus(logits).sum(1)
    logits.sigmoid_().scatter_(1, own, -logits.gather(1, own))
    return losses


def _strangers(logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """As :func:`_pairs`, where no column is the right one."""
    losses = F.softplus(logits).sum(1)
    logits.sigmoid_()
    return losses


OBJECTIVE = ContrastiveObjective
