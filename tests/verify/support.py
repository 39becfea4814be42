"""Small runs for the tests of the comparison."""

from __future__ import annotations

from dataclasses import replace

from mgpu_pipe.config.compose import compose
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.verify.shrink import shrink


def composed(*overrides: str) -> RunConfig:
    return compose(list(overrides))[0]


def small_run(*overrides: str, steps: int = 3, **sizes: int) -> RunConfig:
    """The small run of a composed configuration, with axis ``sizes`` that its preset does not have."""
    config = composed(*overrides)
    config.strategy = replace(config.strategy, **sizes)
    return shrink(config, ParallelDims.resolve(config.strategy, world_size(config)), steps).config
