"""Vectors of texts: what objectives over them share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F

from mgpu_pipe.objectives.base import Batch, Forward, LearningRate
from mgpu_pipe.objectives.global_batch import Features, GlobalBatchObjective, at_least_fp32
from mgpu_pipe.objectives.text_embedding_keys import VectorConfig

PAIR = 2
"""Texts of a sample without negatives."""
SIDES = ("queries", "documents")


class TextVectorObjective(GlobalBatchObjective):
    """Base of objectives over vectors of texts. A batch has ``input_ids``, (rows, texts, seq_len), and ``lengths``,
    tokens of each text, (rows, texts), 0 for a text that a sample does not have.

    Args:
        keys: ``objective.*``.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate, keys: VectorConfig
    ) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._vector_keys = keys
        self._config = cast(Any, model.config)
        self._config.use_cache = False
        self._held_out: list[tuple[Features, slice]] = []

    @abstractmethod
    def labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        """Features of a micro-batch that are no vectors, (rows, ...)."""

    @abstractmethod
    def losses_of_size(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """:meth:`losses` from vectors of one size: ``queries``, (rows, size), the first texts times ``scale``, and
        ``documents``, (rows, texts - 1, size), the others."""

    def model_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return present_rows(batch)[1]

    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        inputs = self.model_inputs(batch)
        hidden = self.model(**inputs).last_hidden_state
        vectors = pool(hidden, inputs["attention_mask"], self._vector_keys.pooling)
        features = self.labels(batch)
        for size in self._sizes:
            features |= self._sides(batch, vectors[:, :size], _suffix(size))
        return features

    @property
    def _sizes(self) -> list[int | None]:
        """Numbers of first entries whose losses are added; None is all of them."""
        return [None, *self._vector_keys.matryoshka_sizes]

    def _sides(self, batch: Mapping[str, torch.Tensor], vectors: torch.Tensor, suffix: str) -> Features:
        """Queries, (rows, size), and documents, (rows, texts - 1, size), from the vectors of the present texts."""
        if self._vector_keys.normalize:
            vectors = F.normalize(vectors, dim=-1)
        there, _ = present_rows(batch)
        every = vectors.new_zeros(len(there), vectors.shape[1]).index_put((there,), vectors)
        queries, *documents = every.unflatten(0, batch["lengths"].shape).unbind(1)
        return {f"queries{suffix}": queries * self._vector_keys.scale, f"documents{suffix}": torch.stack(documents, 1)}

    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        total = torch.zeros((), device=features["queries"].device)
        for size in self._sizes:
            of_size = None if gradients is None else _of_size(gradients, size)
            total = total + self.losses_of_size({**features, **_of_size(features, size)}, rows, of_size)
        return total

    def collect_heldout(self, features: Features, rows: slice) -> None:
        shortened = {side + _suffix(size) for size in self._vector_keys.matryoshka_sizes for side in SIDES}
        self._held_out.append(({name: features[name] for name in features.keys() - shortened}, rows))

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = self.micro_batch_loss(batch).double()
        return F.pad(loss.reshape(1), (0, self.num_sums - 1))

    def plain_vectors(self, forward: Forward, batch: Batch) -> Iterator[list[list[torch.Tensor]]]:
        """Vectors of each sample's texts, for each size; one text at a time, without padding."""
        keys = self._vector_keys

        def pooled(ids: torch.Tensor, length: int) -> torch.Tensor:
            states = forward(input_ids=ids[None, :length]).last_hidden_state[0].float()
            return {"mean": states.mean(0), "cls": states[0], "last_token": states[-1]}[keys.pooling]

        vectors = [
            [pooled(ids, length) for ids, length in zip(*texts, strict=True) if length]
            for texts in zip(batch["input_ids"], batch["lengths"].tolist(), strict=True)
        ]
        for size in self._sizes:
            rows = [[vector[:size] for vector in row] for row in vectors]
            yield [[vector / vector.norm() for vector in row] for row in rows] if keys.normalize else rows


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Vectors of texts, (texts, width), from the states of their tokens, (texts, seq_len, width).

    Args:
        mask: 1 for a token and 0 for padding, which follows the tokens, (texts, seq_len).
        pooling: as of ``objective.pooling``.
    """
    states = at_least_fp32(hidden)
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last_token":
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
    weights = mask.unsqueeze(-1).to(states)
    return (states * weights).sum(1) / weights.sum(1)


def _suffix(size: int | None) -> str:
    """Ends the names of features of this size; empty for whole vectors."""
    return "" if size is None else f"_{size}"


def _of_size(features: Features, size: int | None) -> Features:
    """Queries and documents of one size, under their plain names."""
    return {name: features[name + _suffix(size)] for name in SIDES}


def present_rows(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Which texts are encoded, (rows * texts,): all that samples have, and the first, so that every process runs the
    model; and the model's inputs, a row for each of them."""
    there = batch["lengths"].flatten() > 0
    there[:1] = True
    ids, lengths = batch["input_ids"].flatten(0, 1)[there], batch["lengths"].flatten()[there].clamp_min(1)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    return there, {"input_ids": ids, "attention_mask": mask.long()}
