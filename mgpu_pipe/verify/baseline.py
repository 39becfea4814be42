"""The plain computation of one process that strategies are compared with; it shares no code with them.

Stock forward passes with whole logits, ``F.cross_entropy``, one backward pass, a float64 norm, the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mgpu_pipe.checkpoint.adapters import model_shards, optimizer_shards
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.attention import forward_kwargs
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.training.optimizers import optimizer_factory
from mgpu_pipe.training.schedules import build_schedule
from mgpu_pipe.verify.batches import Batch

CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 2.0**16
"""torch.amp.GradScaler begins with it."""


@dataclass
class PlainStep:
    """What one step gave: the loss, the norm before clipping, and the gradients after it, by parameter name."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]


class BaselineRun:
    """A model on one process, from the keyed initial weights.

    Args:
        precision: ``bf16`` and ``fp16`` compute as one such process does: parameters cast for the forward and
            backward passes, fp32 master weights, gradients summed over micro-batches in fp32; under fp16 the loss is
            scaled. ``bf16_true`` has everything in bf16.
    """

    def __init__(self, config: RunConfig, precision: str = "fp32") -> None:
        model = build_meta(config.model)
        fix_rotary_length(model, config.data.seq_len)
        self.model = materialise(model, config.seed, "cpu")
        if precision == "bf16_true":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        self._scale = LOSS_SCALE if precision == "fp16" else 1.0
        self.optimizer = optimizer_factory(config.optimizer, precision)(model)
        self._router_aux_loss = config.objective.router_aux_loss
        self._top_k = int(getattr(self.model.config, "num_experts_per_tok", 0) or 0)
        self._compute_dtype = COMPUTE.get(precision)
        self._max_norm = config.trainer.gradient_clip_val
        self._schedule = build_schedule(config.scheduler, config.scheduler.total_steps or 1)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, number: int, batches: Sequence[Batch]) -> PlainStep:
        """One optimizer step.

        Args:
            number: zero-based, for the schedule.
            batches: the step's samples, in one or several forward passes.
        """
        self.optimizer.zero_grad(set_to_none=True)
        labels = [batch["labels"].flatten() for batch in batches]
        count = sum(int((label != IGNORE_INDEX).sum()) for label in labels)
        samples = sum(batch["labels"].shape[0] for batch in batches)
        losses = []
        for batch, label in zip(batches, labels, strict=True):
            logits, routed = self._forward(batch)
            loss = (
                F.cross_entropy(logits.flatten(0, 1).float(), label, ignore_index=IGNORE_INDEX, reduction="sum") / count
            )
            balance = self._router_aux_loss * self._balance_losses(routed, batch["labels"]) / samples
            ((loss + balance) * self._scale).backward()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            for gradient in gradients.values():
                gradient.div_(self._scale)
            norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
            if self._max_norm is not None and norm > self._max_norm:
                for gradient in gradients.values():
                    gradient.mul_(self._max_norm / (norm + CLIP_EPSILON))
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._schedule(number)
        self.optimizer.step()
        return PlainStep(sum(losses), norm, gradients)

    def weights(self) -> list[LocalShard]:
        return model_shards(self.model)

    def optimizer_state(self) -> list[LocalShard]:
        return optimizer_shards(self.model, self.optimizer)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The logits, and each router's logits of all tokens where they are wanted."""
        kwargs = forward_kwargs(self.model, batch)
        if self._router_aux_loss:
            kwargs["output_router_logits"] = True
        if self._compute_dtype is None:
            found = self.model(**kwargs)
        else:
            cast = {name: p.to(self._compute_dtype) for name, p in self.model.named_parameters()}
            found = torch.func.functional_call(self.model, cast, kwargs=kwargs)
        return found.logits, found.router_logits if self._router_aux_loss else ()

    def _balance_losses(self, routed: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """The sum over the rows of their routers' mean balance loss, by its definition (objectives.router_loss)."""
        total = torch.zeros(())
        for router in routed:
            experts = router.shape[-1]
            for row, label in zip(router.view(*labels.shape, experts), labels, strict=True):
                counted = row[label != IGNORE_INDEX].float()
                if len(counted):
                    probabilities = counted.softmax(-1)
                    chosen = F.one_hot(probabilities.topk(self._top_k).indices, experts).sum(1).float()
                    total = total + experts * (chosen.mean(0) * probabilities.mean(0)).sum() / len(routed)
        return total
