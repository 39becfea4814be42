"""The project's own OmegaConf resolvers.

``${mgpu.devices:N}``: processes a node that suit this machine: all GPUs where training would run on GPUs, else
``N``; 1 under ``strategy=single``. An experiment that should use what there is says
``trainer.devices: ${mgpu.devices:2}``. It is resolved once, when the configuration is composed.

``${mgpu.native_precision:}``: ``bf16`` on a CPU that has units for it, else ``auto``. ``auto`` itself takes bf16 on
GPUs only, so that a run on CPU processes is an fp32 run unless it says otherwise.

``${mgpu.replicas:}``: the replicas of ``strategy=hsdp``: one a node, or what remains where ``strategy.dp_shard`` is a
number.

``${mgpu.place:PATH}``: the path, which must not be empty.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mgpu_pipe.config.hardware import cpu_is_fast_at_bf16, usable_gpus
from mgpu_pipe.errors import ConfigError


def devices(on_cpu: int, *, _root_: DictConfig) -> int:
    """All usable GPUs, or ``on_cpu`` where there are none or the accelerator is the CPU."""
    if OmegaConf.select(_root_, "strategy.name") == "single":
        return 1
    return _gpus(_root_) or int(on_cpu)


def native_precision(*, _root_: DictConfig) -> str:
    """``bf16`` where training runs on a CPU that has bf16 units, else ``auto``."""
    return "bf16" if not _gpus(_root_) and cpu_is_fast_at_bf16() else "auto"


def _gpus(root: DictConfig) -> int:
    """GPUs that training would run on."""
    return 0 if OmegaConf.select(root, "trainer.accelerator") == "cpu" else usable_gpus()


def replicas(*, _root_: DictConfig) -> int | str:
    """``auto`` where ``strategy.dp_shard`` is given, else the number of nodes."""
    if OmegaConf.select(_root_, "strategy.dp_shard") != "auto":
        return "auto"
    return int(OmegaConf.select(_root_, "trainer.num_nodes") or 1)


def place(path: str) -> str:
    """``path``, for folders that Hydra makes before a configuration is checked."""
    if not str(path).strip():
        raise ConfigError("run.root", path, "give a folder, or leave it out")
    return path


def register() -> None:
    """Make the resolvers known to OmegaConf; may be called again."""
    OmegaConf.register_new_resolver("mgpu.devices", devices, replace=True)
    OmegaConf.register_new_resolver("mgpu.native_precision", native_precision, replace=True)
    OmegaConf.register_new_resolver("mgpu.replicas", replicas, replace=True)
    OmegaConf.register_new_resolver("mgpu.place", place, replace=True)
