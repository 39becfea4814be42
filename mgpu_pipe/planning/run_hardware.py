"""Hardware that a run is planned for, and the seconds that its step is predicted to take there."""

from __future__ import annotations

from dataclasses import replace

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.resolve import device_type, devices_per_node, resolve_precision, uses_tf32
from mgpu_pipe.config.schema import LaunchConfig, PrecisionConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.planning.hardware_profile import HardwareProfile, load_profile, profile_names, profile_of_gpu
from mgpu_pipe.planning.model_work import run_work
from mgpu_pipe.planning.step_time import step_time
from mgpu_pipe.planning.work import Hardware
from mgpu_pipe.system.hardware import gpu_name

CPU = "cpu"


def hardware_here(trainer: TrainerConfig, launch: LaunchConfig) -> str:
    """The profile of this machine's processes or GPUs.

    Raises:
        ConfigError: the run is for GPUs, and this machine has none, or ones without a profile; or a job takes what its
            nodes have, which a machine without GPUs does not show.
    """
    is_of_nodes = trainer.accelerator == "auto" and launch.type != "local"
    if device_type(trainer) == CPU and not is_of_nodes:
        return CPU
    name = gpu_name()
    profile = None if name is None else profile_of_gpu(name)
    if profile is None:
        fix = f"name it: plan.hardware=h100 (one of {', '.join(profile_names())}, or the path of a profile of yours)"
        reason = "the kind of GPU is not known" if name is None else f"there is no profile of {name}"
        raise ConfigError("plan.hardware", "[]", fix, reason)
    return profile


def computing_hardware(
    precision: PrecisionConfig, trainer: TrainerConfig, strategy: StrategyConfig, profile: HardwareProfile
) -> Hardware:
    """Figures for the run's precision and GPUs of a node; ConfigError if the hardware lacks the precision."""
    computes = resolve_precision(precision, trainer)
    computing = profile.hardware_for(computes, uses_tf32(precision, trainer))
    return replace(computing, gpus_per_node=float(devices_per_node(trainer, strategy)))


def predicted_seconds(config: RunConfig) -> tuple[float, str]:
    """Seconds of a step of a run as it is configured, and the hardware's name: ``plan.hardware``, else this machine's.

    Raises:
        ConfigError: the model's shapes are unknown, the hardware has no profile, or the sizes do not fit.
    """
    name = next(iter(config.plan.hardware), None) or hardware_here(config.trainer, config.launch)
    profile = load_profile(name, config.plan.network)
    work = run_work(config, model_fields(config.model))
    if config.strategy.pp != 1:  # gathers weights and reduces gradients once a step
        work = replace(work, zero=min(work.zero, 1.0))
    hardware = computing_hardware(config.precision, config.trainer, config.strategy, profile)
    return float(step_time(work, hardware, profile.all_constants).total), profile.name
