"""Command lines that start a run under any cluster manager: torchrun per node, or one process per worker."""

from __future__ import annotations

import shlex
from dataclasses import replace

from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, print_line
from mgpu_pipe.runs.resume_command import CommandLine, hydra_quoted, without

REPLACED_KEYS = ("launch", "launch.type")
PORT = 29500


def fit_to_nodes(config: RunConfig) -> RunConfig:
    """``config`` with ``trainer.devices`` as a number; ConfigError for ``auto``, since the nodes are unknown here."""
    if config.trainer.devices != "auto":
        return config
    if config.strategy.name == "single":
        return replace(config, trainer=replace(config.trainer, devices=1))
    reason = "this machine does not know the GPUs of the nodes"
    raise ConfigError("trainer.devices", "auto", "give the number of processes a node", reason)


def hand_over(config: RunConfig, command_line: CommandLine, *, dry_run: bool) -> None:
    """Print the command lines and submit nothing; ConfigError if not all processes know the run's folder."""
    if config.run.dir is None:
        fix = "give a folder that all nodes see; a restart resumes in it"
        raise ConfigError("run.dir", None, fix, "every process is started by this very line")
    words = [*without(command_line.alone, *REPLACED_KEYS, "trainer.devices", "run.dir", "checkpoint.resume")]
    nodes, here = config.trainer.num_nodes, devices_per_node(config.trainer, config.strategy)
    words += [f"trainer.devices={here}", f"run.dir={hydra_quoted(config.run.dir)}"]
    run = shlex.join([*words, "checkpoint.resume=auto"])
    print_line("# on every node, where MASTER_ADDR is the first one's name or address:")
    print_line(
        f"torchrun --nnodes={nodes} --nproc_per_node={here} --rdzv_backend=c10d "
        f'--rdzv_endpoint="$MASTER_ADDR:{PORT}" -m mgpu_pipe {run}'
    )
    print_line(f"# or, once a worker, where RANK (0 to {nodes * here - 1}), WORLD_SIZE={nodes * here}, LOCAL_RANK,")
    print_line(f"# LOCAL_WORLD_SIZE={here}, MASTER_ADDR and MASTER_PORT are set (PyTorchJob sets most of them):")
    print_line(f"python -m mgpu_pipe {run}", flush=True)
