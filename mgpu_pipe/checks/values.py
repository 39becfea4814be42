"""Checks of a configuration's values and contradictions, against the file system and this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from mgpu_pipe.checks.check_sizes import range_errors
from mgpu_pipe.checks.devices import age_errors, device_errors
from mgpu_pipe.checks.slots import early_stopping_errors, slot_errors
from mgpu_pipe.checks.start import base_run_errors
from mgpu_pipe.config import plugins
from mgpu_pipe.config.data_sources import file_sources, find_source, samples_of
from mgpu_pipe.config.group_keys import EvalConfig, SchedulerConfig
from mgpu_pipe.config.hub import hub_name
from mgpu_pipe.config.objective import rankable_metrics
from mgpu_pipe.config.schema import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    RunOptions,
    TrainerConfig,
)
from mgpu_pipe.config.sections import DATA, LAUNCH, OBJECTIVE
from mgpu_pipe.config.suggest import VALUES, choose_from
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.system.local_files import exists, expand_home, is_file

TAG = r"[\w.:+-]{1,32}"
FREE_TEXTS = ("objective.sample_prompts", "objective.sample_texts")
"""Keys whose texts may be empty."""


def value_errors(config: RunConfig) -> list[BadInputError]:
    """Errors of values that are wrong regardless of other sections."""
    return [
        *_empty_texts(config),
        *range_errors(config),
        *_name_errors(config.data, config.objective, config.launch),
        *_metric_errors(config.checkpoint, config.objective, config.eval),
        *_run_errors(config.run),
        *slot_errors(config.optimizer, config.objective, config.logger, config.callbacks),
        *_path_errors(config.model, config.data, config.checkpoint),
        *_model_choice(config.model),
        *_attention_errors(config.model),
        *_missing_paths(config.data),
        *_balance_errors(config.data),
        *(config.launch.errors() if hasattr(config.launch, "errors") else ()),
    ]


def relation_errors(config: RunConfig, joined: bool = False, elsewhere: bool = False) -> list[BadInputError]:
    """Errors of keys that contradict each other or this machine.

    Args:
        joined: this process is a rank of a world that was started from outside, and may see only its own GPU.
        elsewhere: the run may be for another machine with GPUs.
    """
    devices = list[ConfigError]()
    if config.launch.type == "local" or joined:  # a job's nodes check their devices
        devices += device_errors(config.strategy, config.trainer, joined, elsewhere)
        devices += age_errors(config.model, config.precision, config.trainer)
    return [
        *devices,
        *_length_errors(config.trainer),
        *_schedule_errors(config.scheduler, config.trainer),
        *_held_out_errors(config.data, config.trainer, config.checkpoint),
        *_sample_errors(config.objective, config.trainer),
        *config.objective.data_errors(config.data, config.model),
        *config.objective.run_errors(config),
        *base_run_errors(config),
        *early_stopping_errors(config.trainer, config.callbacks),
        *_start_errors(config.checkpoint),
        *_profile_errors(config.trainer),
    ]


def _empty_texts(node: object, prefix: str = "") -> Iterator[ConfigError]:
    """Errors of empty texts below a dataclass; an empty path would mean the working directory or the root folder."""
    for field in fields(node):  # type: ignore[arg-type]
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if is_dataclass(value):
            yield from _empty_texts(value, f"{key}.")
        elif key not in FREE_TEXTS:
            what = "a folder" if key in ("run.root", "run.dir") else "a value"
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and not text.strip():
                    yield ConfigError(key, repr(text) if text else "", f"give {what}, or leave it out")


def _name_errors(data: DataConfig, objective: ObjectiveConfig, launch: LaunchConfig) -> Iterator[ConfigError]:
    """Errors of unknown names of data sources, objectives and launchers."""
    for section, value in ((DATA, data.source), (OBJECTIVE, objective.name), (LAUNCH, launch.type)):
        if value not in section.built_in and value not in (others := plugins.entry_names(section.code)):
            fix = f"{choose_from(value, [*section.built_in, *others])}; or install the package that brings it"
            yield ConfigError(section.chooser, value, fix)


def _metric_errors(
    checkpoint: CheckpointConfig, objective: ObjectiveConfig, evaluation: EvalConfig
) -> Iterator[ConfigError]:
    metric, measured = checkpoint.best_metric, rankable_metrics(objective, evaluation)
    if metric not in measured:
        yield ConfigError("checkpoint.best_metric", metric, choose_from(metric, measured), "no such metric")


def _run_errors(run: RunOptions) -> Iterator[ConfigError]:
    """Errors of a run's name and tags."""
    if run.name in (".", "..") or "/" in run.name or run.name != run.name.strip():
        yield ConfigError("run.name", f'"{run.name}"', "use a plain name: it becomes a folder")
    for tag in run.tags:
        if tag and re.fullmatch(TAG, tag) is None:
            yield ConfigError("run.tags", f'"{tag}"', "use words of letters, digits and .:+-, at most 32 long")


def _path_errors(model: ModelConfig, data: DataConfig, checkpoint: CheckpointConfig) -> list[ConfigError]:
    errors = []
    for key, value in (("model.path", model.path), ("checkpoint.init_from", checkpoint.init_from)):
        if key == "model.path" and isinstance(value, str) and hub_name(value):
            continue  # the look-up of its commit has checked it
        if isinstance(value, str) and not exists(expand_home(value)):
            fix = "check the path"
            if key == "model.path":
                fix = "check the path, or give a name on the Hub (<org>/<name>)"
            errors.append(ConfigError(key, value, fix, "no such file or folder"))
        elif isinstance(value, str) and _is_foreign(expand_home(value)):
            fix = f"make a folder of it by mgpu-pipe import --from {value} --out <folder> model=..."
            errors.append(ConfigError(key, value, fix, "is another program's checkpoint"))
    tokenizer = data.tokenizer
    if tokenizer != "auto" and not hub_name(tokenizer) and not exists(expand_home(tokenizer)):
        fix = "give a tokenizer folder, a tokenizer.json or a name on the Hub (<org>/<name>), or auto"
        errors.append(ConfigError("data.tokenizer", tokenizer, fix, "no such file or folder"))
    resume = checkpoint.resume
    if resume not in ("none", "auto") and not exists(expand_home(resume)):
        meant = VALUES["checkpoint.resume"].get(resume.lower())
        fix = choose_from(resume, ["none", "auto"]) + ", or give a run or step folder"
        fix = f"use {meant}" if meant else fix
        errors.append(ConfigError("checkpoint.resume", resume, fix, "no such folder"))
    return errors


def _is_foreign(path: Path) -> bool:
    """Whether this is a torch file or a DeepSpeed folder."""
    return is_file(path) or any(any(path.glob(pattern)) for pattern in ("*_optim_states.pt", "*/*_optim_states.pt"))


def _model_choice(model: ModelConfig) -> list[ConfigError]:
    if model.type is None and model.path is None:
        fix = "give a model folder or a name on the Hub (<org>/<name>), or choose another option (mgpu-pipe ls model)"
        return [ConfigError("model.path", None, fix, "no model is chosen")]
    if model.type is not None and model.path is not None:
        fix = "use model=hf with model.path, or leave model.path out"
        return [ConfigError("model.path", model.path, fix, f"model.type={model.type} is set too")]
    return []


def _attention_errors(model: ModelConfig) -> list[ConfigError]:
    attention = model.attn_implementation
    if attention != "flash_attention_2" or PathFinder.find_spec("flash_attn") is not None:
        return []
    fix = "install flash-attn, or use auto or sdpa"
    return [ConfigError("model.attn_implementation", attention, fix, "the package flash-attn is not installed")]


def _length_errors(trainer: TrainerConfig) -> list[ConfigError]:
    if trainer.max_time is not None and not trainer.max_seconds():
        return [ConfigError("trainer.max_time", trainer.max_time, "write it as DD:HH:MM:SS, e.g. 00:12:00:00")]
    if trainer.max_steps is None and trainer.max_epochs is None:
        return [ConfigError("trainer.max_steps", None, "give trainer.max_steps or trainer.max_epochs")]
    if trainer.max_steps is not None and trainer.max_epochs is not None:
        fix = "add trainer.max_steps=null to train for epochs, or leave trainer.max_epochs out"
        reason = f"trainer.max_steps={trainer.max_steps} is set too"
        return [ConfigError("trainer.max_epochs", trainer.max_epochs, fix, reason)]
    return []


def _schedule_errors(scheduler: SchedulerConfig, trainer: TrainerConfig) -> list[ConfigError]:
    total = scheduler.total_steps or trainer.max_steps
    if total is None or total < 1 or scheduler.warmup_steps < 0:  # range_errors reports the latter two
        return []
    if scheduler.warmup_ratio is not None and scheduler.warmup_steps:
        reason = f"scheduler.warmup_steps={scheduler.warmup_steps} is set too"
        return [ConfigError("scheduler.warmup_ratio", scheduler.warmup_ratio, "leave one of the two out", reason)]
    decay, room = scheduler.decay_steps, total - scheduler.warmup(total)
    if scheduler.name != "wsd" or not decay or decay <= room:
        return []
    source = "scheduler.total_steps" if scheduler.total_steps else "trainer.max_steps"
    fix = f"use at most {room}" if room else f"use a scheduler.warmup_steps of at most {max(0, total - decay)}"
    return [ConfigError("scheduler.decay_steps", decay, fix, f"warm-up and decay are longer than {source}={total}")]


def _missing_paths(data: DataConfig) -> list[ConfigError]:
    source = find_source(data.source)
    if data.paths and source is not None and not source.reads_files:
        others = [name for name in file_sources() if name != "text_files"]
        fix = f"use data=text_files (or {', '.join(others)}), or leave it out"
        return [ConfigError("data.paths", ", ".join(data.paths), fix, f"data.source={data.source} reads no files")]
    if source is None or not source.reads_files or data.paths:
        return []
    fix = "give files or globs: data.paths=['/corpus/*']"
    return [ConfigError("data.paths", "[]", fix, f"data.source={data.source} reads files")]


def _balance_errors(data: DataConfig) -> list[ConfigError]:
    source = data.source
    if data.balance == "none" or samples_of(source) in ("", "packed_text", "picture_chats"):
        return []
    reason = f"samples of data.source={source} cost alike, or are not weighed"
    return [ConfigError("data.balance", data.balance, "use none", reason)]


def _start_errors(checkpoint: CheckpointConfig) -> list[ConfigError]:
    if checkpoint.init_from is None or checkpoint.resume in ("none", "auto"):
        return []
    reason = f"checkpoint.resume={checkpoint.resume} brings its weights"
    return [ConfigError("checkpoint.init_from", checkpoint.init_from, "leave one of them out", reason)]


def _sample_errors(objective: ObjectiveConfig, trainer: TrainerConfig) -> list[ConfigError]:
    every = trainer.sample_every_n_steps
    if every is None or objective.prompts()[0]:
        return []
    fix = "set objective.sample_prompts (sample_texts for a classifier), or use null"
    return [ConfigError("trainer.sample_every_n_steps", every, fix, "the objective has no prompt to continue")]


def _held_out_errors(data: DataConfig, trainer: TrainerConfig, checkpoint: CheckpointConfig) -> list[ConfigError]:
    errors = list[ConfigError]()
    held_out = data.validation_fraction > 0 or bool(data.validation_paths)
    if trainer.val_every_n_steps is not None and not held_out:
        fix, reason = "hold something out (data.validation_fraction), or use null", "no data is held out"
        errors.append(ConfigError("trainer.val_every_n_steps", trainer.val_every_n_steps, fix, reason))
    if checkpoint.keep_best and not held_out and checkpoint.best_metric.startswith("val/"):
        fix = "hold something out (data.validation_fraction), or use 0"
        reason = f"checkpoint.best_metric={checkpoint.best_metric} is never measured"
        errors.append(ConfigError("checkpoint.keep_best", checkpoint.keep_best, fix, reason))
    return errors


def _profile_errors(trainer: TrainerConfig) -> list[ConfigError]:
    if trainer.profile == "none":
        return []
    steps = trainer.profile_steps
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        return [ConfigError("trainer.profile_steps", steps, "give the first and the last step, e.g. [3,5]")]
    if trainer.max_steps is not None and steps[1] > trainer.max_steps:
        fix, reason = f"use steps up to {trainer.max_steps}", f"trainer.max_steps={trainer.max_steps}"
        return [ConfigError("trainer.profile_steps", steps, fix, reason)]
    return []
