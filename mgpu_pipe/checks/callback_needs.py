"""Lightning's own callbacks that cannot work in a run of this program, known before it starts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.config.source_class import inherited_names
from mgpu_pipe.errors import ConfigError

CALLBACKS = "pytorch_lightning.callbacks"
PARTS = "it wants the whole model before the ranks have built their parts of it"
TUNER = "Lightning's tuner changes what this program derives"
REFUSED = {
    "Checkpoint": (
        "checkpoints are written by this program",
        "remove it, and use checkpoint.every_n_steps and checkpoint.keep_best",
    ),
    "ProgressBar": ("progress is shown by this program", "remove it, and use trainer.progress=bar"),
    "GradientAccumulationScheduler": (
        "the number of micro-batches is derived",
        "remove it, and use data.micro_batch_size",
    ),
    "LearningRateFinder": (TUNER, "remove it, and sweep the rate: -m optimizer.lr=1e-4,3e-4,1e-3"),
    "BatchSizeFinder": (TUNER, "remove it, and use data.micro_batch_size"),
    "WeightAveraging": (PARTS, "remove it"),
    "StochasticWeightAveraging": (PARTS, "remove it"),
    "ModelPruning": (PARTS, "remove it"),
    "BackboneFinetuning": ("the model has no part of the name backbone", "remove it, and use model.freeze=[...]"),
    "ThroughputMonitor": ("it needs a function", "remove it: metrics.csv has tokens/s and samples/s"),
}
"""Why each cannot be had, and what to do; also the classes that inherit from it."""
NEED_LOGGER = ("LearningRateMonitor", "DeviceStatsMonitor")


def callback_errors(leaf: Mapping[str, Any], key: str, has_logger: bool) -> Iterator[ConfigError]:
    """What is wrong with the callback of ``leaf``; nothing for other classes.

    Args:
        has_logger: whether the run has one of Lightning's loggers.
    """
    target = str(leaf["_target_"])
    names = inherited_names(target, CALLBACKS)
    for reason, fix in (told for name, told in REFUSED.items() if name in names):
        yield ConfigError(f"{key}._target_", target, fix, reason)
        return
    if not has_logger and names.intersection(NEED_LOGGER):
        yield ConfigError(f"{key}._target_", target, "add logger=tensorboard, or remove it", "it writes to a logger")
