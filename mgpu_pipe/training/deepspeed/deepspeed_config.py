"""The DeepSpeed configuration of a run, generated from this project's keys. Neither torch nor DeepSpeed is imported.

Every setting here is one of two kinds. What follows from a key of this project (batch, precision, stage, offload,
clipping, optimizer) is *owned*: a raw setting of the same name under ``strategy.deepspeed_config`` is refused. The
others are defaults, which a raw setting replaces.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.config.convert import leaves
from mgpu_pipe.config.group_keys import DeepSpeedOptions, StrategyConfig
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import ModelConfig, PrecisionConfig, TrainerConfig
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import model_fields
from mgpu_pipe.system.local_files import expand_home
from mgpu_pipe.topology import BatchPlan

ZERO = "zero_optimization"
TOP_LEVEL = (
    ZERO,
    "aio",
    "comet",
    "comms_logger",
    "csv_monitor",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "tensorboard",
    "timers",
    "wall_clock_breakdown",
    "wandb",
)
"""Settings at the top that mean something here, besides those that this project owns or does not support."""
CLASSES = {
    "": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
}
"""Node below ``zero_optimization`` -> the file and class that has its fields (checked against DeepSpeed 0.19)."""


def unknown_setting(name: str) -> str | None:
    """The fix for an unknown raw setting ``name`` (dotted); None where DeepSpeed has it or its fields are not known."""
    top, _, below = name.partition(".")
    if top != ZERO:
        return None if top in TOP_LEVEL else choose_from(top, TOP_LEVEL)
    node, _, rest = below.partition(".")
    for section, word in (("", node), (node, rest)):
        fields = _fields(section) if word and section in CLASSES else frozenset()
        if fields and word not in fields:
            return choose_from(word, fields)
    return None


@functools.lru_cache(maxsize=None)
def _fields(section: str) -> frozenset[str]:
    """Names and aliases of a node's fields; empty where DeepSpeed's source is not as expected."""
    spec = PathFinder.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    file, name = CLASSES[section]
    path = Path(spec.submodule_search_locations[0]) / file
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return frozenset()
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    names: set[str] = set()
    for entry in node.body if node is not None else []:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            names.add(entry.target.id)
            for word in entry.value.keywords if isinstance(entry.value, ast.Call) else []:
                if word.arg == "alias" and isinstance(word.value, ast.Constant):
                    names.add(str(word.value.value))
    return frozenset(names)


RAW = "strategy.deepspeed_config"
ENGINE = "deepspeed"
PRECISIONS = ("fp32", "bf16")
FP32_BYTES = 4
MIB = 1 << 20

OWNED = {
    "train_batch_size": "data.global_batch_size",
    "train_micro_batch_size_per_gpu": "data.micro_batch_size",
    "gradient_accumulation_steps": "data.global_batch_size and data.micro_batch_size",
    "managed_gradient_accumulation": "data.global_batch_size and data.micro_batch_size",
    "gradient_clipping": "trainer.gradient_clip_val",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "zero_allow_untested_optimizer": "optimizer",
    "zero_force_ds_cpu_optimizer": "optimizer",
    "bf16": "precision",
    "bfloat16": "precision",
    "fp16": "precision",
    "amp": "precision",
    "torch_autocast": "precision",
    "data_types": "precision",
    "communication_data_type": "precision.reduce",
    "activation_checkpointing": "strategy.activation_checkpointing",
    "zero_optimization.stage": "strategy.deepspeed.stage",
    "zero_optimization.reduce_bucket_size": "strategy.bucket_mib",
    "zero_optimization.allgather_bucket_size": "strategy.bucket_mib",
    "zero_optimization.offload_optimizer.device": "strategy.offload",
    "zero_optimization.offload_optimizer.nvme_path": "strategy.offload_path",
    "zero_optimization.offload_param.device": "strategy.offload",
    "zero_optimization.offload_param.nvme_path": "strategy.offload_path",
    "zero_optimization.cpu_offload": "strategy.offload",
    "zero_optimization.cpu_offload_param": "strategy.offload",
    "prescale_gradients": "the loss, which is a sum over the step's tokens divided by their number",
    "gradient_predivide_factor": "the loss, which is a sum over the step's tokens divided by their number",
    "gradient_allreduce_op": "the loss, which is a sum over the step's tokens divided by their number",
    "zero_optimization.compute_grad_norm": "the gradient norm, which this project computes in float64",
}
"""Raw setting -> what decides it here."""
UNSUPPORTED = (
    "elasticity",
    "pipeline",
    "tensor_parallel",
    "expert_parallel",
    "sequence_parallel_size",
    "hybrid_engine",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "sparse_gradients",
    "sparse_attention",
    "progressive_layer_drop",
    "eigenvalue",
    "compile",
    "zero_optimization.zenflow",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.parameter_alignment",
    "zero_optimization.sub_group_prefetch",
    "checkpoint",
    "nebula",
    "dataloader_drop_last",
    "autotuning",
    "weight_quantization",
    "use_data_before_expert_parallelism",
    "seq_parallel_communication_data_type",
)
"""Raw settings that change the result, the data, or who holds what, which this project would not know of."""
STAGE_3_ONLY = ("zero_optimization.offload_param", "zero_optimization.sub_group_size")
STAGE_3_PREFIX = "zero_optimization.stage3_"
STAGE_1_2_ONLY = ("zero_optimization.use_multi_rank_bucket_allreduce", "zero_optimization.ignore_unused_parameters")


def deepspeed_config(
    strategy: StrategyConfig, precision: PrecisionConfig, trainer: TrainerConfig, plan: BatchPlan
) -> dict[str, Any]:
    """DeepSpeed's settings for a run in which :func:`deepspeed_errors` finds nothing wrong."""
    return generate(
        plan,
        stage=strategy.deepspeed.stage,
        precision=resolve_precision(precision, trainer),
        reduce=precision.reduce,
        bucket_mib=strategy.bucket_mib,
        offload=strategy.offload,
        offload_path=strategy.offload_path,
        pinned=device_type(trainer) == "cuda",
        raw=strategy.deepspeed_config,
    )


def generate(
    plan: BatchPlan,
    *,
    stage: Literal[1, 2, 3],
    precision: str = "fp32",
    reduce: str = "fp32",
    bucket_mib: float = 25.0,
    offload: str = "none",
    offload_path: str | None = None,
    pinned: bool = False,
    raw: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """See :func:`deepspeed_config`.

    Args:
        pinned: keep what is offloaded in page-locked memory (CUDA).
        raw: settings that replace defaults or add to them.
    """
    bucket = max(2, int(bucket_mib * MIB / FP32_BYTES) // 2 * 2)  # DeepSpeed wants an even number of elements
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    if stage == 3:
        # Everything is sharded, however small; DeepSpeed's own default keeps parameters below 100,000 elements whole.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": bucket}
    else:
        # Reduced to the rank that owns a part (2 bytes moved for each where an all-reduce and an all-gather move 3).
        zero |= {"use_multi_rank_bucket_allreduce": False, "ignore_unused_parameters": True}
        if offload == "none":  # the norm is ours
            zero["compute_grad_norm"] = False
    zero |= _offload(stage, offload, offload_path, pinned)
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_micro_batches,
        "gradient_clipping": 0.0,  # clipped here, by the float64 norm
        "communication_data_type": reduce,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "steps_per_print": 1 << 62,
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": False}
    return _merge(settings, raw or {})


def _offload(stage: int, offload: str, path: str | None, pinned: bool) -> dict[str, Any]:
    if offload == "none":
        return {}
    place: dict[str, Any] = {"device": offload, "pin_memory": pinned}
    if offload == "nvme":
        place["nvme_path"] = str(expand_home(str(path)).resolve())
    settings = {"offload_optimizer": place}
    if stage == 3:
        # Weights stay in host memory under nvme as well: the optimizer state is six times as large.
        settings["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return settings


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        section = merged.get(name)
        both = isinstance(section, dict) and isinstance(value, Mapping)
        merged[name] = _merge(section, value) if both and isinstance(section, dict) else value
    return merged


def deepspeed_errors(strategy: StrategyConfig, precision: PrecisionConfig, model: ModelConfig) -> list[BadInputError]:
    """Errors in a configuration of this engine: sizes, stage, raw settings."""
    errors = list[BadInputError]()
    for axis in ("dp_replicate", "tp", "pp", "cp", "ep"):
        size = getattr(strategy, axis)
        if size != 1:
            fix = "use 1, or a preset of the mesh engine" + (" (dp_shard is ZeRO's size)" if "dp" in axis else "")
            errors.append(ConfigError(f"strategy.{axis}", size, fix, "strategy.engine=deepspeed shards data only"))
    pipeline_layers = strategy.pipeline.layers
    for key, value in (("sequence_parallel", strategy.sequence_parallel), ("pipeline.layers", pipeline_layers)):
        if value:
            reason = "strategy.engine=deepspeed shards data only"
            errors.append(ConfigError(f"strategy.{key}", value, "leave it out, or use strategy=megatron", reason))
    if strategy.offload == "nvme" and strategy.deepspeed.stage < 3:
        fix = "use strategy.deepspeed.stage=3, or strategy.offload=cpu"
        reason = f"ZeRO-{strategy.deepspeed.stage} offloads to the CPU only"
        errors.append(ConfigError("strategy.offload", "nvme", fix, reason))
    return [*errors, *_feature_errors(precision, model, strategy.deepspeed), *_raw_errors(strategy)]


def _feature_errors(
    precision: PrecisionConfig, model: ModelConfig, options: DeepSpeedOptions
) -> Iterator[BadInputError]:
    """Errors for settings that only the mesh engine supports."""
    if precision.name not in ("auto", *PRECISIONS):
        fix = "use precision=bf16, or the mesh engine (strategy=fsdp)"
        reason = f"the deepspeed engine has {' and '.join(PRECISIONS)} only"
        yield ConfigError("precision.name", precision.name, fix, reason)
    if model.compile is True and options.stage == 3:
        fix = "use false, or strategy=fsdp, zero1 or zero2"
        yield ConfigError("model.compile", True, fix, "ZeRO-3 gathers weights inside of a block, by hooks")
    kind = str(model_fields(model).get("model_type"))
    if family_of(kind).runs_by_picture and options.stage == 3:
        reason = f"{kind} runs a module once for each picture, and ranks gather as often"
        yield ConfigError("strategy.deepspeed.stage", 3, "use strategy=fsdp, zero1 or zero2", reason)


def _raw_errors(strategy: StrategyConfig) -> Iterator[BadInputError]:
    stage = strategy.deepspeed.stage
    for name, value in leaves(strategy.deepspeed_config).items():
        if value == {}:
            continue
        owner = _matching_setting(name, OWNED)
        if owner is not None:
            decides = OWNED[owner]
            fix = f"leave it out: {decides} decides it" if " " in decides else f"leave it out and set {decides}"
            yield ConfigError(f"{RAW}.{name}", value, fix, "this project sets it")
        elif _matching_setting(name, UNSUPPORTED) is not None:
            reason = "not supported here: checkpoints and parity would not know of it"
            yield ConfigError(f"{RAW}.{name}", value, "leave it out", reason)
        elif stage < 3 and (_matching_setting(name, STAGE_3_ONLY) is not None or name.startswith(STAGE_3_PREFIX)):
            fix = "use strategy.deepspeed.stage=3, or leave it out"
            yield ConfigError(f"{RAW}.{name}", value, fix, f"ZeRO-{stage} does not have it")
        elif stage == 3 and _matching_setting(name, STAGE_1_2_ONLY) is not None:
            yield ConfigError(f"{RAW}.{name}", value, "leave it out", "ZeRO-3 does not have it")
        elif (instead := unknown_setting(name)) is not None:
            yield ConfigError(f"{RAW}.{name}", value, instead, "DeepSpeed has no such setting")


def _matching_setting(name: str, settings: Any) -> str | None:
    """The setting that equals ``name``, contains it, or is part of it; None without one."""
    return next((s for s in settings if name == s or name.startswith(f"{s}.") or s.startswith(f"{name}.")), None)
