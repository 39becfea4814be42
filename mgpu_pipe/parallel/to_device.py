"""Copies from host memory to a device."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``, without a wait: CUDA waits for copies from memory that is not page-locked."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
