"""How many optimizer steps a run has. Torch-free, so that the launcher refuses what no worker could do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared


def run_length(config: RunConfig, prepared: Prepared) -> int:
    """The run's last optimizer step: ``trainer.max_steps``, or the whole steps in ``trainer.max_epochs``.

    Raises:
        ConfigError: neither is given, or the epochs are not one step.
    """
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    if config.trainer.max_epochs is None:
        raise ConfigError("trainer.max_steps", None, "give trainer.max_steps or trainer.max_epochs")
    steps = config.trainer.max_epochs * prepared.train_samples // config.data.global_batch_size
    if not steps:
        raise ConfigError(
            "trainer.max_epochs",
            config.trainer.max_epochs,
            "lower data.global_batch_size or raise max_epochs",
            f"{prepared.train_samples} training samples an epoch are not one step of {config.data.global_batch_size}",
        )
    return steps
