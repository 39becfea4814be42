"""Notices about a configuration that do not stop the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from mgpu_pipe.architectures.config_source import auto_mapping
from mgpu_pipe.architectures.formulas.pipeline_schedules import splits_backward
from mgpu_pipe.checks.devices import device_notices, emulated_type
from mgpu_pipe.checks.model_axes import across_nodes
from mgpu_pipe.checks.start import is_joined
from mgpu_pipe.config.data_sources import find_source, unread_keys
from mgpu_pipe.config.group_keys import PeftConfig, SchedulerConfig, StrategyConfig
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.plugins import ENGINES
from mgpu_pipe.config.resolve import resolve_precision, uses_tf32
from mgpu_pipe.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    PrecisionConfig,
    RunConfig,
    TrainerConfig,
)
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import model_fields, noise_fields
from mgpu_pipe.models.weights.sentence_modules import read_sentence_modules
from mgpu_pipe.objectives.vector_keys import VectorConfig
from mgpu_pipe.system import hardware
from mgpu_pipe.system.conf_folders import conf_dir
from mgpu_pipe.topology import ParallelDims

MESH = "mesh"
DEFAULT = RunConfig()
SIZES = tuple(ParallelDims().as_dict())
ROWS = {".jsonl", ".ndjson"}
"""Suffixes of files of JSON Lines."""


def unused_options(config: RunConfig) -> list[tuple[str, str]]:
    """Keys that are set but have no effect, each with the reason; a sweep over strategies may set them."""
    unused = [
        *_data(config.data),
        *_schedule(config.scheduler),
        *_checkpoint(config.model, config.peft, config.checkpoint),
        *_precision(config.precision, config.trainer),
        *_peft(config.peft),
    ]
    if config.optimizer.ema.evaluate and config.optimizer.ema.decay is None:
        unused.append(("optimizer.ema.evaluate", "optimizer.ema.decay=null keeps no average"))
    if config.run.dir is not None and config.run.root != DEFAULT.run.root:
        unused.append(("run.root", "run.dir names the folder"))
    if config.strategy.engine in ENGINES:  # a plug-in's engine may read any key
        unused += _strategy(config.model, config.strategy, config.precision, config.trainer)
    return unused


def _strategy(
    model: ModelConfig, strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig
) -> Iterator[tuple[str, str]]:
    default, dims, mesh = DEFAULT.strategy, _sizes(trainer, strategy), strategy.engine == MESH
    if strategy.offload_path is not None and strategy.offload != "nvme":
        yield "strategy.offload_path", "strategy.offload=nvme alone writes to it"
    for key in ("deepspeed", "deepspeed_config") if mesh else ():
        if getattr(strategy, key) != getattr(default, key):
            yield f"strategy.{key}", "strategy.engine=mesh does not use DeepSpeed"
    if strategy.fsdp != default.fsdp and not (mesh and dims.dp_shard * dims.cp > 1):
        yield "strategy.fsdp", f"strategy={strategy.name} does not shard by FSDP2 here"
    plain = dims.dp_replicate == dims.world_size > 1 and resolve_precision(precision, trainer) == "fp32"
    if strategy.bucket_mib != default.bucket_mib and mesh and not plain:
        yield "strategy.bucket_mib", "only replicas in fp32 sum gradients in buckets of a size to choose"
    for key in ("schedule", "stages_per_rank") if dims.pp == 1 else ():
        if getattr(strategy.pipeline, key) != getattr(default.pipeline, key):
            yield f"strategy.pipeline.{key}", "strategy.pp=1 is no pipeline"
    if precision.reduce != "fp32" and dims.data_parallel_size * dims.cp == 1:
        yield "precision.reduce", "no data-parallel processes send one another gradients"
    if dims.cp == 1 and strategy.context != default.context:
        yield "strategy.context.method", "strategy.cp=1 keeps sequences whole"
    if dims.cp > 1 and model.attn_implementation != "auto":
        yield "model.attn_implementation", "context parallelism uses its own attention"


def _sizes(trainer: TrainerConfig, strategy: StrategyConfig) -> ParallelDims:
    """The sizes of the axes; if they do not fit the world, ``auto`` counts as used."""
    try:
        return ParallelDims.from_config(trainer, strategy)
    except ConfigError:
        sizes = {axis: getattr(strategy, axis) for axis in SIZES}
        return ParallelDims(**{axis: 2 if size == "auto" else size for axis, size in sizes.items()})


def _data(data: DataConfig) -> Iterator[tuple[str, str]]:
    source = find_source(data.source)
    if source is None:  # a plug-in's source may read any key
        return
    changed = [key.name for key in fields(DEFAULT.data) if getattr(data, key.name) != getattr(DEFAULT.data, key.name)]
    for key in changed:
        if key not in source.reads and key in unread_keys(source):
            yield f"data.{key}", f"data.source={data.source} does not read it"
    if source.samples == "labelled_text" and data.packing == "best_fit":
        yield "data.packing", f"data.source={data.source} puts each sample in a separate row"


def _schedule(scheduler: SchedulerConfig) -> Iterator[tuple[str, str]]:
    if scheduler.decay_steps is not None and scheduler.name != "wsd":
        yield "scheduler.decay_steps", "only scheduler=wsd has a separate decay length"
    if scheduler.name == "constant" and scheduler.min_lr_ratio != DEFAULT.scheduler.min_lr_ratio:
        yield "scheduler.min_lr_ratio", "scheduler=constant stays at the peak"


def _precision(precision: PrecisionConfig, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
    computes = resolve_precision(precision, trainer)
    if precision.fp8_recipe != DEFAULT.precision.fp8_recipe and precision.name != "fp8":
        yield "precision.fp8_recipe", f"the run computes in {computes}; only precision=fp8 reads it"
    if not precision.tf32 or uses_tf32(precision, trainer):
        return
    if computes != "fp32":
        yield "precision.tf32", f"the run computes in {computes}; TF32 works with precision=fp32 only"
    else:
        yield "precision.tf32", "TF32 is a mode of CUDA GPUs of compute capability 8.0 and higher"


def _peft(peft: PeftConfig) -> Iterator[tuple[str, str]]:
    if peft.name == "none":
        for field in fields(peft):
            if field.name != "name" and getattr(peft, field.name) != getattr(DEFAULT.peft, field.name):
                yield f"peft.{field.name}", "peft=none has no adapters; use peft=lora"


def _checkpoint(model: ModelConfig, peft: PeftConfig, checkpoint: CheckpointConfig) -> Iterator[tuple[str, str]]:
    default = DEFAULT.checkpoint
    for key in ("when_busy", "on_save_error"):
        if not checkpoint.saves_on_the_way() and getattr(checkpoint, key) != getattr(default, key):
            yield f"checkpoint.{key}", "without checkpoint.every_n_steps the run saves at its end only"
    if checkpoint.frozen_weights == "leave_out":
        if not model.freeze and peft.name == "none":
            yield "checkpoint.frozen_weights", "model.freeze=[] freezes no weights"
        elif model.path is None and checkpoint.init_from is None:
            yield "checkpoint.frozen_weights", "the weights come from no folder that a checkpoint could name"
    if not checkpoint.keep_best and checkpoint.best_metric != default.best_metric:
        yield "checkpoint.best_metric", "checkpoint.keep_best=0 keeps none for being best"


OLDEST_TORCH = (2, 13)
"""The oldest torch that this project is tested with, as in ``pyproject.toml``."""


@dataclass(frozen=True)
class Notice:
    """A message about a key that does not stop the run."""

    key: str
    text: str


def notices(config: RunConfig) -> list[Notice]:
    """All notices of a run without errors."""
    notices = [Notice(key, f"does nothing here: {why}") for key, why in unused_options(config)]
    packs = resolve_packing(config.model, config.data, config.objective) == "best_fit"
    if config.data.packing == "auto" and not packs and config.data.tokens():
        text = (
            "auto means none: this model is not known to separate documents of one row; each document has a padded row"
        )
        notices.append(Notice("data.packing", text))
    if config.run.starts_from is not None:
        text = (
            f"experiment={config.run.starts_from} is trained first, unless {config.run.root} holds a finished run of it"
        )
        notices.append(Notice("run.starts_from", text))
    gpus = hardware.gpu_count()
    if config.trainer.accelerator == "auto" and gpus and not hardware.torch_has_cuda():
        notices.append(Notice("trainer.accelerator", f"runs on CPU: this torch cannot use the {gpus} GPUs here"))
    version = hardware.torch_version()
    if version and version < OLDEST_TORCH:
        old, oldest = (".".join(map(str, numbers)) for numbers in (version, OLDEST_TORCH))
        failing = "pipelines that split the backward pass, and experts in four bits, fail"
        notices.append(Notice("torch", f"{old} is older than {oldest}: {failing}; install torch>={oldest}"))
    notices += [Notice(key, text) for key, text in device_notices(config.trainer)]
    if emulated := emulated_type(config.precision, config.trainer):
        text = f"this CPU emulates {emulated}: correct, and several times slower than fp32"
        notices.append(Notice("precision.name", text))
    if not config.checkpoint.save_last and not config.checkpoint.saves_on_the_way():
        notices.append(Notice("checkpoint", "this run saves a checkpoint only when a signal stops it"))
        if config.objective.prompts()[0] and config.trainer.sample_every_n_steps is None:
            notices.append(Notice("objective.sample_prompts", "no samples: they come from a saved checkpoint"))
    if is_joined() and config.launch.max_restarts:
        text = "does nothing here: whoever started this world restarts it"
        notices.append(Notice("launch.max_restarts", text))
    if config.trainer.num_nodes > 1 and config.strategy.engine == "mesh":
        dims = ParallelDims.from_config(config.trainer, config.strategy)
        devices = dims.world_size // config.trainer.num_nodes
        notices += [Notice(key, text) for key, text in across_nodes(dims, devices)]
    notices += [
        *_name_notice(config.model),
        *_rows_notice(config.data),
        *_warm_up_notice(config.scheduler, config.trainer),
        *_recompute_notice(config.strategy),
        *_noise_notice(config.model),
        *_vectors_notices(config.model, config.data, config.objective),
    ]
    keep = config.checkpoint
    if keep.keep_best and keep.best_metric.startswith("val/") and config.trainer.val_every_n_steps is None:
        text = f"{keep.best_metric} is measured at the end only; set trainer.val_every_n_steps"
        notices.append(Notice("checkpoint.keep_best", text))
    return notices


def _name_notice(model: ModelConfig) -> list[Notice]:
    """Notice of a ``model.name`` that is another family's, or the option of one: it chooses nothing."""
    name, model_type = model.name, model_fields(model).get("model_type")
    family = _family_named(name)
    if family is None or model_type is None or family == model_type:
        return []
    text = f"only names the model, which stays of the {model_type} family; for {name} use {_choice_of(name)}"
    return [Notice("model.name", text)]


def _family_named(name: str) -> str | None:
    """Model type of the shipped model or of the family of this name; None for any other name."""
    preset = _presets().get(name)
    if preset is not None:
        return _type_in(preset)
    return name if name in auto_mapping("CONFIG_MAPPING_NAMES") else None


def _choice_of(name: str) -> str:
    """Overrides that choose the shipped model of this name, the first of this family, or else a new one of it."""
    named = (preset for preset, file in _presets().items() if name in (preset, _type_in(file)))
    preset = next(named, None)
    return f"model=hf model.type={name}" if preset is None else f"model={preset}"


def _presets() -> dict[str, Path]:
    return {file.stem: file for file in sorted((conf_dir() / "model").glob("*.yaml"))}


def _type_in(preset: Path) -> str | None:
    model_type = yaml.safe_load(preset.read_text(encoding="utf-8")).get("type")
    return None if model_type is None else str(model_type)


def _vectors_notices(model: ModelConfig, data: DataConfig, objective: ObjectiveConfig) -> Iterator[Notice]:
    """Notices of a folder of sentence-transformers whose vectors are made in another way than those of the run."""
    if not isinstance(objective, VectorConfig) or model.path is None:
        return
    try:
        modules = read_sentence_modules(local_folder(model.path))
    except BadInputError as error:
        yield Notice("model.path", f"the run does not train the vectors of this folder ({error})")
        return
    if modules is None:
        return
    if modules.pooling != objective.pooling:
        text = f"the vectors of model.path are made by {modules.pooling}; to train them set objective.pooling to it"
        yield Notice("objective.pooling", text)
    for kind, prompt in modules.prompts.items():
        key = f"{kind}_prompt"
        if prompt and getattr(data, key, prompt) is None:
            yield Notice(f"data.{key}", f"model.path has the prompt {prompt!r} for it; set it to train its vectors")


def _rows_notice(data: DataConfig) -> list[Notice]:
    """Names the first path whose rows of JSON are trained on as they stand."""
    paths = [path for path in data.paths if data.source == "text_files" and ROWS & set(Path(path).suffixes)]
    text = "is read as a text, with its braces and names; data=jsonl reads one column of its rows"
    return [Notice("data.paths", f"{paths[0]} {text}")] if paths else []


def _warm_up_notice(scheduler: SchedulerConfig, trainer: TrainerConfig) -> list[Notice]:
    horizon = scheduler.total_steps or trainer.max_steps
    if horizon is None or scheduler.warmup_steps <= horizon:
        return []
    source = "scheduler.total_steps" if scheduler.total_steps else "trainer.max_steps"
    resumed = "" if scheduler.total_steps else "; a resumed run keeps the schedule that it began with"
    text = f"{scheduler.warmup_steps} is longer than {source}={horizon}: all {horizon} steps are warm-up{resumed}"
    return [Notice("scheduler.warmup_steps", text)]


def _recompute_notice(strategy: StrategyConfig) -> list[Notice]:
    """Notice of recomputation under a split backward pass, where torch repeats it for every group of weights."""
    if strategy.activation_checkpointing != "full" or not splits_backward(strategy):
        return []
    schedule = strategy.pipeline.schedule
    text = f"slow: under {schedule} a block is computed again for its inputs and for each group of its weights"
    return [Notice("strategy.activation_checkpointing", f"{text}; use none, or strategy.pipeline.schedule=1f1b")]


def _noise_notice(model: ModelConfig) -> list[Notice]:
    text = "drops at random: under another strategy or number of processes the result is equal statistically only"
    return [Notice(f"model.config.{name}", text) for name in noise_fields(model_fields(model))[:1]]
