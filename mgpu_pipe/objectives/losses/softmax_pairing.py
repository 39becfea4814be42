"""Cross-entropy of finding the right column of each row, without a graph."""

from __future__ import annotations

import torch


def softmax_pairing(logits: torch.Tensor, right_column: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row, (rows,), in place: ``logits``, (rows, columns), become its gradients.

    Args:
        right_column: (rows, 1).
    """
    highest = logits.amax(1, keepdim=True)
    right = logits.gather(1, right_column) - highest
    total = logits.sub_(highest).exp_().sum(1, keepdim=True)
    logits.div_(total).scatter_add_(1, right_column, torch.full_like(right, -1))
    return (total.log() - right).squeeze(1)
