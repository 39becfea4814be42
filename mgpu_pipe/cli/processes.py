"""Overrides of a verb that computes on several processes: how many, where, and under which strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find_model import ModelSource, config_of
from mgpu_pipe.topology import ParallelDims

PROCESSES = ("trainer.devices=", "trainer.num_nodes=", "trainer.accelerator=", "launch.", "launch=")
STRATEGY = ("strategy=", "strategy.")


def compose_processes(verb: str, overrides: Sequence[str], device: str, *, strategies: bool) -> RunConfig:
    """The configuration of the processes, in fp32; everything else in it is a default.

    Args:
        device: the verb's ``--device``; anything but ``auto`` means a single process.
        strategies: whether a strategy may be given; else each process holds the whole model.

    Raises:
        BadInputError: another override, or one beside ``--device``.
    """
    allowed = (*PROCESSES, *STRATEGY) if strategies else PROCESSES
    strange = [text for text in overrides if not text.lstrip("+").startswith(allowed)]
    if strange:
        keys = "trainer.devices, num_nodes, accelerator and launch.*"
        raise BadInputError(f"{strange[0]}: {verb} takes {'strategy, ' if strategies else ''}{keys} only here")
    if device != "auto" and overrides:
        raise BadInputError(f"--device={device}: goes with one process; use trainer.accelerator instead")
    named = any(text.lstrip("+").startswith("strategy=") for text in overrides)
    config = compose(["precision=fp32", *([] if named else ["strategy=ddp"]), *overrides])[0]
    return config if device == "auto" else replace(config, trainer=replace(config.trainer, devices=1))


def refuse_whole_weights(source: ModelSource, config: RunConfig, weights: str, frozen: Path | None) -> None:
    """Refuse options of weights, and folders, that only a whole model in each process takes.

    Raises:
        BadInputError: ``config`` cuts the model, and the average or another folder's weights are wanted, or the
            folder's model is not of the kind that it cuts.
    """
    if not ParallelDims.from_config(config.trainer, config.strategy).cuts_the_model:
        return
    config_of(source, config)
    for option, is_given in ((f"--weights={weights}", weights == "ema"), (f"--frozen-weights={frozen}", frozen)):
        if is_given:
            reason = f"strategy={config.strategy.name} opens the trained weights alone"
            raise BadInputError(f"{option}: {reason}; use strategy=ddp")
