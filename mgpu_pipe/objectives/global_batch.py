"""Objectives whose samples meet in the loss, as contrastive ones do: every sample is compared with all of the step.

Each micro-batch is encoded without gradients, and the features of all processes are gathered, or go round them. Each
process computes the losses of its own samples; the gradients of the features, summed over the processes, are those of
the global batch's loss. Then each micro-batch is encoded once more and its features' gradients go backward. So
``data.global_batch_size`` fixes the mathematics, however the batch is cut (Gao, Zhang, Han and Callan 2021, "Scaling
Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from mgpu_pipe.objectives.base import LearningRate, Objective, Together

Features = dict[str, torch.Tensor]


class GlobalBatchObjective(Objective):
    """Base of such objectives. A subclass defines :meth:`encode` and :meth:`losses`.

    The data's valid units are samples. A model that drops at random is encoded twice with the same random numbers.
    """

    samples_meet: ClassVar[bool] = True

    def __init__(self, model: torch.nn.Module, optimizer_factory: Any, learning_rate: LearningRate) -> None:
        super().__init__(model, optimizer_factory, learning_rate)
        self._shares: list[tuple[Features, torch.Tensor, torch.Tensor]] = []
        """Of the micro-batches to come: their features' gradients, sum of losses, and state of random numbers."""

    @abstractmethod
    def encode(self, batch: Mapping[str, torch.Tensor]) -> Features:
        """Features of a micro-batch by name, each of shape (samples, ...).

        All that is learnt acts here: a temperature multiplies one of the features.
        """

    @abstractmethod
    def losses(self, features: Features, rows: slice, gradients: Features | None) -> torch.Tensor:
        """The losses of some samples, shape (rows,), from the features of all of them, fp32 at least; uses no
        parameter.

        Args:
            gradients: to these, by name, the gradients of the losses' sum by all features are added; None if they are
                not wanted. No graph is kept, so that never more than a few rows are compared with all at a time.
        """

    def meet(self, batches: Sequence[Mapping[str, torch.Tensor]], counted: int, world: Together) -> None:
        device = next(self.model.parameters()).device
        training = torch.is_grad_enabled()
        states, encoded = [], list[Features]()
        with torch.no_grad():
            for batch in batches:
                states.append(_random_state(device))
                features = self.encode(batch)
                encoded.append(features if training else {**features, **self.beside(batch)})
        if states:
            _set_random_state(device, states[0])
        mine = {
            name: at_least_fp32(torch.cat([like[:0], *[features[name] for features in encoded[:counted]]]))
            for name, like in encoded[0].items()
        }
        with torch.no_grad():
            turned = self.losses_in_turns(mine, world) if training and world.ring > 1 else None
            losses, gradients = turned or self._losses_of_all(mine, world, training)
        self._shares = []
        at = 0
        for number, (features, state) in enumerate(zip(encoded, states, strict=True)):
            size = len(next(iter(features.values()))) if number < counted else 0
            own_gradients = {name: gradient[at : at + size] for name, gradient in gradients.items()}
            self._shares.append((own_gradients, losses[at : at + size].sum(), state))
            at += size

    def _losses_of_all(self, mine: Features, world: Together, training: bool) -> tuple[torch.Tensor, Features]:
        """The losses of this process's samples, and the gradients of their features; all features are gathered."""
        whole, first = world.gather_samples(mine)
        rows = slice(first, first + len(next(iter(mine.values()))))
        mine.clear()  # all features are there now
        if not training:
            losses = self.losses(whole, rows, None)
            self.met(whole, rows)
            return losses, {name: like[:0] for name, like in whole.items()}
        parts = {name: torch.zeros_like(value) for name, value in whole.items()}
        losses = self.losses(whole, rows, parts)
        return losses, {name: world.sum_of_own(parts.pop(name), rows) for name in whole}

    def losses_in_turns(self, mine: Features, world: Together) -> tuple[torch.Tensor, Features] | None:
        """As :meth:`losses` of this process's samples, with the gradients of their features, where the other
        processes' features only pass by; None where a loss needs all of them at once."""
        return None

    def beside(self, batch: Mapping[str, torch.Tensor]) -> Features:
        """What :meth:`met` is to know of an evaluated micro-batch's samples beside their features."""
        return {}

    def met(self, features: Features, rows: slice) -> None:
        """Told the features of all samples of an evaluated step batch, and which of them are this process's."""

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The micro-batch's share of the loss; its gradient is that of the global batch's loss."""
        gradients, share, state = self._shares.pop(0)
        if not torch.is_grad_enabled():
            return share
        _set_random_state(share.device, state)
        features = self.encode(batch)
        product = torch.stack([(at_least_fp32(features[name]) * gradients[name]).sum() for name in gradients]).sum()
        return product + (share - product.detach())


def at_least_fp32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
