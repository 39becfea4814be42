"""DeepSpeed's engine as this project runs it. The one place that imports DeepSpeed's engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.objectives.base import Objective

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class LossModule(nn.Module):
    """The module that DeepSpeed's engine runs: maps a micro-batch to its loss sum, or to its evaluation sums."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model = objective.model
        self._loss, self._evaluation = objective.micro_batch_loss, lambda batch: objective.evaluation_sums(batch)

    def forward(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(micro_batch) if torch.is_grad_enabled() else self._evaluation(micro_batch)


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for this device, keep its log to warnings, and let it use the process group there is."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        # As DeepSpeed's launcher does. Without it ZeRO-3 starts a program for every bucket that it reduces, to count
        # the processor's memory nodes.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE") or str(dist.get_world_size()))
    else:  # DeepSpeed takes its device from there, and srun may show this process one GPU alone
        os.environ["LOCAL_RANK"] = str(device.index)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # DeepSpeed compiles an all-reduce for inference on the CPU when it meets a process group; training never calls it.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_init_required=False)


def check_settings(settings: dict[str, Any]) -> None:
    """Let DeepSpeed judge the values of the raw settings, whose names were checked before launch.

    Raises:
        ConfigError: it refuses one.
    """
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        key = f"strategy.deepspeed_config.zero_optimization.{name}"
        raise ConfigError(key, first["input"], "correct it", f"DeepSpeed reports: {first['msg']}") from None


def zero_engine(module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> DeepSpeedEngine:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    class ZeroEngine(DeepSpeedEngine):
        """ZeRO under every precision: DeepSpeed has another optimizer for bf16 at stage 1."""

        def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
            return str(ZERO_OPTIMIZATION)

    config = DeepSpeedConfig(settings)
    return ZeroEngine(args=None, model=module, optimizer=optimizer, config=settings, config_class=config)
