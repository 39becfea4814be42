"""What is worth knowing and stops nothing."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu_pipe.checks.devices import device_notices
from mgpu_pipe.checks.model import model_fields
from mgpu_pipe.checks.numerics import emulated_type
from mgpu_pipe.checks.start import joined
from mgpu_pipe.checks.unused_keys import unused_options
from mgpu_pipe.config.hardware import gpu_count, torch_has_cuda
from mgpu_pipe.config.resolve import world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.topology import ParallelDims


@dataclass(frozen=True)
class Notice:
    """Something worth knowing that stops nothing."""

    key: str
    text: str


def notices(config: RunConfig) -> list[Notice]:
    notices = [Notice(key, f"does nothing here: {why}") for key, why in unused_options(config)]
    if config.run.starts_from is not None:
        text = (
            f"experiment={config.run.starts_from} is trained first, unless {config.run.root} holds a finished run of it"
        )
        notices.append(Notice("run.starts_from", text))
    if config.trainer.accelerator == "auto" and gpu_count() and not torch_has_cuda():
        notices.append(Notice("trainer.accelerator", f"runs on CPU: this torch cannot use the {gpu_count()} GPUs here"))
    notices += [Notice(key, text) for key, text in device_notices(config)]
    if emulated := emulated_type(config):
        text = f"this CPU emulates {emulated}: correct, and several times slower than fp32"
        notices.append(Notice("precision.name", text))
    if not config.checkpoint.save_last and not config.checkpoint.saves_on_the_way():
        notices.append(Notice("checkpoint", "nothing is saved unless a signal stops the run"))
        if config.objective.prompts()[0] and config.trainer.sample_every_n_steps is None:
            notices.append(Notice("objective.sample_prompts", "no samples: they come from a saved checkpoint"))
    if joined() and config.launch.max_restarts:
        text = "does nothing here: whoever started this world restarts it"
        notices.append(Notice("launch.max_restarts", text))
    if config.trainer.num_nodes > 1 and config.strategy.engine == "mesh":
        from mgpu_pipe.checks.model_axes import across_nodes

        dims = ParallelDims.resolve(config.strategy, world_size(config))
        devices = dims.world_size // config.trainer.num_nodes
        notices += [Notice(key, text) for key, text in across_nodes(dims, devices)]
    notices += _noise_notice(config)
    keep = config.checkpoint
    if keep.keep_best and keep.best_metric.startswith("val/") and config.trainer.val_every_n_steps is None:
        text = f"{keep.best_metric} is measured at the end only; set trainer.val_every_n_steps"
        notices.append(Notice("checkpoint.keep_best", text))
    return notices


def _noise_notice(config: RunConfig) -> list[Notice]:
    from mgpu_pipe.models.fields import noise_fields

    text = "drops at random: under another strategy or number of processes the result is equal statistically only"
    return [Notice(f"model.config.{name}", text) for name in noise_fields(model_fields(config))[:1]]
