"""An objective: the focal loss of the next token (Lin, Goyal, Girshick, He and Dollar 2017), with token accuracy.

mgpu-pipe objective.name=focal_loss objective.gamma=1.5 trainer.max_steps=50
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from focal_loss_keys import DESCRIPTION, FocalLossConfig

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.objectives.base import Batch, Forward, Objective, Reference


class FocalLoss(Objective):
    """``-weight * (1 - p)**gamma * log(p)``, ``p`` the probability of the token that follows."""

    description = DESCRIPTION
    num_sums: ClassVar[int] = 2

    @classmethod
    def from_config(cls, config: Any, *built: Any) -> FocalLoss:
        objective = cls(*built)
        objective.keys = cast(FocalLossConfig, config.objective)
        return objective

    def _losses(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every token, 0 where there is no label; and whether the likeliest token is the right one."""
        logits, labels = self.model(**self.model_inputs(batch)).logits.float(), batch["labels"]
        entropy = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
        easy = 1 - torch.exp(-entropy)
        return self.keys.weight * easy**self.keys.gamma * entropy, logits.argmax(-1) == labels

    def micro_batch_loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._losses(batch)[0].sum()

    def evaluation_sums(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        losses, right = self._losses(batch)
        return torch.stack([losses.double().sum(), right.double().sum()])

    def reference_loss(self, forward: Forward, model: Any, batch: Batch) -> Reference:
        logits = forward(**self.model_inputs(batch)).logits
        total = logits.new_zeros(())
        for row, labels in zip(logits.log_softmax(-1), batch["labels"], strict=True):
            for position in torch.nonzero(labels != IGNORE_INDEX).flatten().tolist():
                log_p = row[position, labels[position]]
                total = total - self.keys.weight * (1 - log_p.exp()) ** self.keys.gamma * log_p
        return Reference(total)
