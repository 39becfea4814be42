"""Keys that were changed and that nothing will read: a notice of ``check`` and before a run. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from mgpu_pipe.config.plugins import (
    AUDIO_SOURCES,
    CONVERSATION_SOURCES,
    DATA_SOURCES,
    ENGINES,
    IMAGE_SOURCES,
    PAIR_SOURCES,
)
from mgpu_pipe.config.resolve import resolve_precision, uses_tf32, world_size
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.topology import ParallelDims

MESH = "mesh"
DEFAULT = RunConfig()
SIZES = tuple(ParallelDims().as_dict())


def unused_options(config: RunConfig) -> list[tuple[str, str]]:
    """Such keys, each with why; a sweep over strategies may well set them."""
    unused = [*_data(config), *_schedule(config), *_checkpoint(config), *_precision(config), *_peft(config)]
    if config.optimizer.ema.evaluate and config.optimizer.ema.decay is None:
        unused.append(("optimizer.ema.evaluate", "optimizer.ema.decay=null keeps no average"))
    if config.run.dir is not None and config.run.root != DEFAULT.run.root:
        unused.append(("run.root", "run.dir says where the run is"))
    if config.strategy.engine in ENGINES:  # a plug-in's may read any
        unused += _strategy(config)
    return unused


def _strategy(config: RunConfig) -> Iterator[tuple[str, str]]:
    strategy, default = config.strategy, DEFAULT.strategy
    dims, mesh = _sizes(config), config.strategy.engine == MESH
    if strategy.offload_path is not None and strategy.offload != "nvme":
        yield "strategy.offload_path", "strategy.offload=nvme alone writes to it"
    for key in ("deepspeed", "deepspeed_config") if mesh else ():
        if getattr(strategy, key) != getattr(default, key):
            yield f"strategy.{key}", "strategy.engine=mesh does not use DeepSpeed"
    if strategy.fsdp != default.fsdp and not (mesh and dims.dp_shard * dims.cp > 1):
        yield "strategy.fsdp", f"strategy={strategy.name} does not shard by FSDP2 here"
    plain = dims.dp_replicate == dims.world_size > 1 and resolve_precision(config) == "fp32"
    if strategy.bucket_mib != default.bucket_mib and mesh and not plain:
        yield "strategy.bucket_mib", "only replicas in fp32 sum gradients in buckets of a size to choose"
    for key in ("schedule", "stages_per_rank") if dims.pp == 1 else ():
        if getattr(strategy.pipeline, key) != getattr(default.pipeline, key):
            yield f"strategy.pipeline.{key}", "strategy.pp=1 is no pipeline"
    if config.precision.reduce != "fp32" and dims.data_parallel_size * dims.cp == 1:
        yield "precision.reduce", "no data-parallel processes send one another gradients"
    if dims.cp == 1 and strategy.context != default.context:
        yield "strategy.context.method", "strategy.cp=1 keeps sequences whole"
    if dims.cp > 1 and config.model.attn_implementation != "auto":
        yield "model.attn_implementation", "context parallelism brings attention of its own"


def _sizes(config: RunConfig) -> ParallelDims:
    """The sizes of the axes; where they do not make the world, an ``auto`` one counts as used."""
    try:
        return ParallelDims.resolve(config.strategy, world_size(config))
    except ConfigError:
        given = {axis: getattr(config.strategy, axis) for axis in SIZES}
        return ParallelDims(**{axis: 2 if size == "auto" else size for axis, size in given.items()})


def _data(config: RunConfig) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.source not in DATA_SOURCES:  # a plug-in's may read any
        return
    for key, sources in (
        ("text_column", ("jsonl", "parquet", "labelled_jsonl", "audio_list")),
        ("second_text_column", ("labelled_jsonl",)),
        ("label_column", ("labelled_jsonl", "image_list", "image_tar")),
        ("classes", ("labelled_jsonl", *IMAGE_SOURCES)),
        ("messages_column", CONVERSATION_SOURCES),
        ("format", ("chat_jsonl",)),
        ("source_column", ("pairs_jsonl",)),
        ("target_column", ("pairs_jsonl",)),
        ("target_len", PAIR_SOURCES),
        ("numbers", ("number_words", "spoken_chat", "spoken_preferences", "mixture")),
        ("synthetic", ("synthetic",)),
    ):
        if getattr(data, key) != getattr(DEFAULT.data, key) and data.source not in sources:
            yield f"data.{key}", f"data.source={data.source} has none"
    for key in ("seq_len", "tokenizer") if data.source in IMAGE_SOURCES else ():
        if getattr(data, key) != getattr(DEFAULT.data, key):
            yield f"data.{key}", f"data.source={data.source} gives pictures"
    if data.source in AUDIO_SOURCES and data.seq_len != DEFAULT.data.seq_len:
        yield "data.seq_len", f"data.source={data.source} gives recordings"
    if data.source == "labelled_jsonl" and data.packing != "none":
        yield "data.packing", "data.source=labelled_jsonl gives each sample a row of its own"


def _schedule(config: RunConfig) -> Iterator[tuple[str, str]]:
    scheduler = config.scheduler
    if scheduler.decay_steps is not None and scheduler.name != "wsd":
        yield "scheduler.decay_steps", "scheduler=wsd alone has a decay of its own length"
    if scheduler.name == "constant" and scheduler.min_lr_ratio != DEFAULT.scheduler.min_lr_ratio:
        yield "scheduler.min_lr_ratio", "scheduler=constant stays at the peak"


def _precision(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.precision.fp8_recipe != DEFAULT.precision.fp8_recipe and config.precision.name != "fp8":
        yield "precision.fp8_recipe", f"the run computes in {resolve_precision(config)}; it is for precision=fp8"
    if not config.precision.tf32 or uses_tf32(config):
        return
    precision = resolve_precision(config)
    if precision != "fp32":
        yield "precision.tf32", f"the run computes in {precision}; TF32 is for precision=fp32"
    else:
        yield "precision.tf32", "TF32 is a mode of CUDA GPUs of compute capability 8.0 and higher"


def _peft(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.peft.name == "none":
        for field in fields(config.peft):
            if field.name != "name" and getattr(config.peft, field.name) != getattr(DEFAULT.peft, field.name):
                yield f"peft.{field.name}", "peft=none has no adapters; use peft=lora"


def _checkpoint(config: RunConfig) -> Iterator[tuple[str, str]]:
    checkpoint, default = config.checkpoint, DEFAULT.checkpoint
    for key in ("when_busy", "on_save_error"):
        if not checkpoint.saves_on_the_way() and getattr(checkpoint, key) != getattr(default, key):
            yield f"checkpoint.{key}", "without checkpoint.every_n_steps nothing is saved beside training"
    if checkpoint.frozen_weights == "leave_out":
        if not config.model.freeze and config.peft.name == "none":
            yield "checkpoint.frozen_weights", "model.freeze=[] freezes no weights"
        elif config.model.path is None and checkpoint.init_from is None:
            yield "checkpoint.frozen_weights", "the weights come from no folder that a checkpoint could name"
    if not checkpoint.keep_best and checkpoint.best_metric != default.best_metric:
        yield "checkpoint.best_metric", "checkpoint.keep_best=0 keeps none for being best"
