"""Objectives that compare every sample with all samples of the step, e.g. contrastive ones.

1. Each micro-batch is encoded, all but the last without a graph. The features of all processes are gathered, or sent
   round a ring.
2. Each process computes the losses of its own samples. The features' gradients, summed over the processes, are those
   of the global batch's loss.
3. The gradients of the last micro-batch's features are backpropagated. Then each other one is encoded again, and its
   gradients are backpropagated.

So ``data.global_batch_size`` fixes the mathematics, however the batch is cut (Gao, Zhang, Han and Callan 2021, "Scaling
Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.objectives.base import LearningRate, Objective
from mgpu_pipe.objectives.sample_group import SampleGroup
from mgpu_pipe.parallel.random_streams import RandomState, streams_of

Features = dict[str, torch.Tensor]


@dataclass
class MicroBatchShare:
    """A micro-batch's part of the third pass.

    Attributes:
        gradients: of its features.
        loss: sum of its losses.
        random_state: before its encoding; after it, if there is a graph.
        graph: its features with their graph, if it need not be encoded again.
    """

    batch: Mapping[str, torch.Tensor]
    gradients: Features
    loss: torch.Tensor
    random_state: RandomState
    graph: Features | None


class GlobalBatchObjective(Objective):
    """Base of objectives over the global batch. A subclass defines :meth:`encode` and :meth:`losses`.

    The data's valid units are samples. Both encodings use the same random numbers, so dropout is equal in both.
    """

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._shares: list[MicroBatchShare] = []
        """Shares of the micro-batches to come, the last of them first."""
        self._keeps_graph = False
        """False in the first step, in which the engine measures the activations of an encoding."""

    @abstractmethod
    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        """Features of a micro-batch by name, each of shape (samples, ...); integers have no gradient.

        All learned parameters act here: a temperature multiplies one of the features.
        """

    @abstractmethod
    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """Losses of some samples, (rows,), from the features of all samples, at least fp32. Uses no parameter.

        Args:
            gradients: buffers by name; receive the gradients of the summed losses by all features. None computes
                none. No graph is kept, so only a few rows are compared with all at a time.
        """

    def gather_features(
        self, batches: Sequence[Mapping[str, torch.Tensor]], num_valid: int, world: SampleGroup
    ) -> None:
        device = next(self.model.parameters()).device
        training = torch.is_grad_enabled()
        self._shares, graph, streams = [], None, streams_of(self.model)
        same_draws = streams.also_without_graph if streams and training else nullcontext
        states, encoded = [], list[Features]()
        for number, batch in enumerate(batches, start=1):
            states.append(RandomState.read(self.model, device))
            has_graph = training and self._keeps_graph and number == len(batches)
            with torch.set_grad_enabled(has_graph), same_draws():
                features = self.encode(batch)
                if torch.is_grad_enabled():
                    graph, states[-1] = features, RandomState.read(self.model, device)
            features = {name: values.detach() for name, values in features.items()}
            encoded.append(features if training else {**features, **self.pair_labels(batch)})
        self._keeps_graph = self._keeps_graph or training
        if not training:
            states[0].restore(self.model, device)
        sizes = [len(next(iter(features.values()))) for features in encoded[:num_valid]]
        mine = {
            name: at_least_fp32(torch.cat([like[:0], *[features.pop(name) for features in encoded[:num_valid]]]))
            for name, like in list(encoded[0].items())
        }
        with torch.no_grad():
            ring_losses = self.losses_by_ring(mine, world) if training and world.ring > 1 else None
            losses, gradients = ring_losses or self._losses_of_all(mine, world, training)
        start = 0
        for number, (batch, state) in enumerate(zip(batches, states, strict=True)):
            end = start + (sizes[number] if number < num_valid else 0)
            part = {name: gradient[start:end] for name, gradient in gradients.items()}
            self._shares.append(MicroBatchShare(batch, part, losses[start:end].sum(), state, None))
            start = end
        if training:
            self._shares[-1].graph = graph
            self._shares.insert(0, self._shares.pop())

    def _losses_of_all(self, mine: Features, world: SampleGroup, training: bool) -> tuple[torch.Tensor, Features]:
        """Losses of this process's samples and gradients of their features. Gathers all features."""
        whole, first = world.gather_samples(mine)
        rows = slice(first, first + len(next(iter(mine.values()))))
        mine.clear()  # they are part of all features
        if not training:
            losses = self.losses(whole, rows, None)
            self.collect_heldout(whole, rows)
            return losses, {name: like[:0] for name, like in whole.items()}
        parts = {name: torch.zeros_like(value) for name, value in whole.items() if value.is_floating_point()}
        losses = self.losses(whole, rows, parts)
        return losses, {name: world.sum_of_own(parts.pop(name), rows) for name in list(parts)}

    def losses_by_ring(self, mine: Features, world: SampleGroup) -> tuple[torch.Tensor, Features] | None:
        """:meth:`losses` of this process's samples and the gradients of their features, by a ring.

        The other processes' features pass by one process at a time. None where a loss needs all of them at once.
        """
        return None

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the losses alone; :meth:`last_sums` has the others."""
        return F.pad(self.micro_batch_loss(batch).double().reshape(1), (0, self.num_sums - 1))

    def last_sums(self, world: SampleGroup) -> torch.Tensor | float:
        """Sums over all evaluated samples together. Default: none. Collective."""
        return 0.0

    def pair_labels(self, batch: Mapping[str, torch.Tensor]) -> Features:
        """Tensors of an evaluated micro-batch that :meth:`collect_heldout` gets in addition to the features."""
        return {}

    def collect_heldout(self, features: Features, rows: slice) -> None:
        """Called with the features of all samples of an evaluated step batch, and the rows of this process."""

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Share of the loss of a micro-batch of the step, each in turn. Its gradient is that of the global batch's
        loss."""
        share = self._shares.pop(0)
        if not torch.is_grad_enabled():
            return share.loss
        share.random_state.restore(self.model, share.loss.device)
        features = share.graph or self.encode(share.batch)
        products = [(at_least_fp32(features[name]) * part).sum() for name, part in share.gradients.items()]
        product = torch.stack(products).sum()
        return product + (share.loss - product.detach())


def at_least_fp32(values: torch.Tensor) -> torch.Tensor:
    """``values`` in float32 or more; integers as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
