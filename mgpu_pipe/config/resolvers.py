"""The project's own OmegaConf resolvers.

``${mgpu.devices:N}``: processes a node that suit this machine: all GPUs where training would run on GPUs, else
``N``; 1 under ``strategy=single``. An experiment that should use what there is says
``trainer.devices: ${mgpu.devices:2}``. It is resolved once, when the configuration is composed.

``${mgpu.replicas:}``: the replicas of ``strategy=hsdp``: one a node, or what remains where ``strategy.dp_shard`` is a
number.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mgpu_pipe.config.hardware import usable_gpus


def devices(on_cpu: int, *, _root_: DictConfig) -> int:
    """All usable GPUs, or ``on_cpu`` where there are none or the accelerator is the CPU."""
    if OmegaConf.select(_root_, "strategy.name") == "single":
        return 1
    accelerator = OmegaConf.select(_root_, "trainer.accelerator")
    gpus = 0 if accelerator == "cpu" else usable_gpus()
    return gpus or int(on_cpu)


def replicas(*, _root_: DictConfig) -> int | str:
    """``auto`` where ``strategy.dp_shard`` is given, else the number of nodes."""
    if OmegaConf.select(_root_, "strategy.dp_shard") != "auto":
        return "auto"
    return int(OmegaConf.select(_root_, "trainer.num_nodes") or 1)


def register() -> None:
    """Make the resolvers known to OmegaConf; may be called again."""
    OmegaConf.register_new_resolver("mgpu.devices", devices, replace=True)
    OmegaConf.register_new_resolver("mgpu.replicas", replicas, replace=True)
