"""``data.micro_batch_size=max``: the largest micro-batch that is predicted to fit, which a launch measures."""

from __future__ import annotations

from dataclasses import replace

from mgpu_pipe.checks.check_sizes import size_errors
from mgpu_pipe.checks.memory_limits import likely_fits
from mgpu_pipe.checks.notices import Notice
from mgpu_pipe.checks.start import joined
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.topology import BatchPlan, ParallelDims

KEY = "data.micro_batch_size"
MAX = "max"


def with_predicted_micro_batch(
    config: RunConfig, resumed: RunConfig | None, elsewhere: bool
) -> tuple[RunConfig, Notice, bool]:
    """Replaces ``max`` in ``config`` by a number; returns a notice of it, and whether a launch measures it.

    Args:
        resumed: configuration of the run that continues, whose number stays where it can; None for a new run.
        elsewhere: nothing is started here; ``plan.hardware`` names the GPUs.

    Raises:
        ConfigError: the run is not of one command and machine, or no micro-batch is allowed.
    """
    sizes = micro_batch_sizes(config, elsewhere)
    if resumed is not None and resumed.data.micro_batch_size in sizes:
        same = with_micro_batch(config, int(resumed.data.micro_batch_size))
        return same, Notice(KEY, f"max stays {resumed.data.micro_batch_size}, which the run began with"), False
    if config.launch.type != "local" or config.trainer.num_nodes > 1 or joined():
        fix = "give a number, such as what max finds on one node"
        raise ConfigError(KEY, MAX, fix, "it is measured by a command that starts all processes of a run itself")
    fits = {size: likely_fits(with_micro_batch(config, size), elsewhere) for size in sizes}
    if fits[sizes[0]] is None:
        chosen, source = max(size for size in sizes if size <= max(sizes[0], _auto(config))), "a first try"
    else:
        chosen, source = max((size for size in sizes if fits[size]), default=sizes[0]), "predicted"
    text = f"max is {chosen}, {source}; a run measures it as it starts"
    return with_micro_batch(config, chosen), Notice(KEY, text), True


def micro_batch_sizes(config: RunConfig, elsewhere: bool = False) -> list[int]:
    """Micro-batch sizes that a process's samples and the pipeline's schedule allow, ascending.

    Raises:
        ConfigError: there are none, by the error of the smallest.
    """
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    share = BatchPlan.resolve(with_micro_batch(config, 1).data, dims.data_parallel_size, dims.pp).samples_per_process
    unchecked = replace(config, trainer=replace(config.trainer, memory_check="off"))
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    errors = {size: size_errors(with_micro_batch(unchecked, size), elsewhere) for size in divisors}
    sizes = [size for size in divisors if not errors[size]]
    if not sizes:
        raise errors[1][0]
    return sizes


def with_micro_batch(config: RunConfig, size: int) -> RunConfig:
    """``config`` with another ``data.micro_batch_size``."""
    return replace(config, data=replace(config.data, micro_batch_size=size))


def _auto(config: RunConfig) -> int:
    dims = ParallelDims.from_config(config.trainer, config.strategy)
    data = replace(config.data, micro_batch_size="auto")
    return BatchPlan.resolve(data, dims.data_parallel_size, dims.pp).micro_batch_size
