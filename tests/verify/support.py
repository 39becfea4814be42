"""Small runs for the tests of the comparison."""

from __future__ import annotations

from dataclasses import replace

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from mgpu_pipe.verify.shrink import shrink
from tests.support.processes import run_processes


def composed(*overrides: str) -> RunConfig:
    return compose(list(overrides))[0]


def small_run(*overrides: str, steps: int = 3, **sizes: int) -> RunConfig:
    """The small run of a composed configuration, with axis ``sizes`` that its preset does not have."""
    config = composed(*overrides)
    config.strategy = replace(config.strategy, **sizes)
    return shrink(config, ParallelDims.from_config(config.trainer, config.strategy), steps).config


def verified(config: RunConfig) -> list[Worst]:
    return worst_of(compare(config))


def compared_with_one_process(processes: int, *overrides: str) -> None:
    """The small run of a configuration keeps every bound."""
    worst = run_processes(processes, verified, small_run(*overrides, f"trainer.devices={processes}"))[0]
    assert [one.quantity for one in worst] == ["initial weights", "loss", "gradient norm", "gradient", "weights"]
    assert [one for one in worst if not one.passed] == []
