"""The lines by which any cluster manager starts a run: torchrun on each node, or a process a worker. No torch."""

from __future__ import annotations

import shlex
from dataclasses import replace

from mgpu_pipe.config.resolve import devices_per_node
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.runs.continue_line import Asked, hydra_quoted, without

OWN = ("launch", "launch.type")
PORT = 29500


def settled(config: RunConfig) -> RunConfig:
    """``config`` with ``trainer.devices`` as a number.

    Raises:
        ConfigError: it is ``auto``, and this machine does not tell what the nodes have.
    """
    if config.trainer.devices != "auto":
        return config
    if config.strategy.name == "single":
        return replace(config, trainer=replace(config.trainer, devices=1))
    reason = "this machine does not tell what the nodes have"
    raise ConfigError("trainer.devices", "auto", "give the number of processes a node", reason)


def hand_over(config: RunConfig, asked: Asked, *, dry_run: bool) -> None:
    """Print the lines; nothing is submitted, with ``dry_run`` or without.

    Raises:
        ConfigError: the run has no folder that all processes could know.
    """
    if config.run.dir is None:
        fix = "give a folder that all nodes see; a restart goes on in it"
        raise ConfigError("run.dir", None, fix, "every process is started by this very line")
    words = [*without(asked.alone, *OWN, "trainer.devices", "run.dir", "checkpoint.resume")]
    words += [f"trainer.devices={devices_per_node(config)}", f"run.dir={hydra_quoted(config.run.dir)}"]
    run = shlex.join([*words, "checkpoint.resume=auto"])
    nodes, here = config.trainer.num_nodes, devices_per_node(config)
    print("# on every node, where MASTER_ADDR is the first one's name or address:")
    print(
        f"torchrun --nnodes={nodes} --nproc_per_node={here} --rdzv_backend=c10d "
        f'--rdzv_endpoint="$MASTER_ADDR:{PORT}" -m mgpu_pipe {run}'
    )
    print(f"# or, once a worker, where RANK (0 to {nodes * here - 1}), WORLD_SIZE={nodes * here}, LOCAL_RANK,")
    print(f"# LOCAL_WORLD_SIZE={here}, MASTER_ADDR and MASTER_PORT are set (PyTorchJob sets most of them):")
    print(f"python -m mgpu_pipe {run}", flush=True)
