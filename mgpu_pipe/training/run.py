"""One attempt of one run, inside a worker: assembles model, strategy, data and Trainer, and trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.compat.lightning_private import quiet_libraries
from mgpu_pipe.config.eval_tasks import metric_of, task_metrics
from mgpu_pipe.config.freeze import config_hash
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.resolve import device_type, resolve_precision, uses_tf32
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.balance import imbalances
from mgpu_pipe.data.loader import evaluation_step_batches, train_step_batches
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.errors import BadInputError, GradientSpikeError
from mgpu_pipe.kernels.liger import kernels_of, use_liger
from mgpu_pipe.kernels.packed_attention import use_flash_attention_3
from mgpu_pipe.models.build import run_model
from mgpu_pipe.models.flops import training_flops_per_token
from mgpu_pipe.models.freezing import freeze_parameters
from mgpu_pipe.models.settings import model_settings, require_model_settings
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.first_weights import RunStart
from mgpu_pipe.parallel.compile import compiles
from mgpu_pipe.parallel.pipeline_streams import splits_backward
from mgpu_pipe.parallel.randomness import uses_dropout
from mgpu_pipe.parallel.spike_guard import SpikeGuard
from mgpu_pipe.planner.flops import known_gpu_peak
from mgpu_pipe.runs.metrics_file import STEP_COLUMNS, MetricsWriter, truncate_after
from mgpu_pipe.runs.rank_metrics import rank_writer
from mgpu_pipe.strategies.base import EngineStrategy, NonFiniteStep
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.checkpointing import Checkpointer
from mgpu_pipe.training.initial_weights import (
    build_model,
    left_out_weights,
    reads_slices,
    starts_from_folder,
    weights_reader,
)
from mgpu_pipe.training.job_end import too_late
from mgpu_pipe.training.length import run_length
from mgpu_pipe.training.memory import is_out_of_memory, out_of_memory
from mgpu_pipe.training.memory_snapshot import write_snapshot
from mgpu_pipe.training.optimizers import optimizer_factory
from mgpu_pipe.training.plugins import objective_class, strategy_class
from mgpu_pipe.training.progress import Progress
from mgpu_pipe.training.recorder import StepRecorder, peak_memory_gib
from mgpu_pipe.training.result import TrainResult, train_result
from mgpu_pipe.training.run_clock import RunClock
from mgpu_pipe.training.sampling import sampler
from mgpu_pipe.training.schedules import build_schedule
from mgpu_pipe.training.tasks import RunTasks
from mgpu_pipe.training.tf32 import set_tf32
from mgpu_pipe.training.trainer import run_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.profiling.step_profiler import StepProfiler


def train(
    config: RunConfig,
    paths: RunPaths,
    prepared: Prepared,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    resume: Path | None = None,
) -> TrainResult:
    """Train from scratch, or from the step folder ``resume``, inside an initialised process group. Collective.

    Raises:
        NonFiniteError: the loss or the gradient norm is not finite; on every rank, before the update. Or what is to
            be saved is not finite.
        CheckpointError, CheckpointSaveError: a checkpoint cannot be read or written.
        BadInputError: the Trainer refuses a callback or a logger.
    """
    quiet_libraries()
    identity, config = config_hash(config), prepared.complete(config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims.resolve(config.strategy, world_size)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    device = _device(config)
    precision = resolve_precision(config)
    torch.manual_seed(config.seed)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it

    reader = CheckpointReader(resume, config.checkpoint.verify) if resume is not None else None
    start_step = int(reader.state["step"]) if reader is not None else 0
    max_steps = run_length(config, prepared)
    total_steps = _horizon(config, reader, max_steps)

    try:
        model, fill = build_model(config, device, sharded=reads_slices(config, dims))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, rank, config, dims, plan, run_model(config), {}) from error
    if config.model.flash_attention == "fa3":
        use_flash_attention_3()
    if device.type == "cuda":
        set_tf32(model, uses_tf32(config))
    settings = model_settings(model.config)
    if reader is not None:
        require_model_settings(reader.state.get("model_config"), settings, reader.folder)
    num_parameters = sum(p.numel() for p in model.parameters())  # now: an engine may leave them empty
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = replace(config, model=replace(config.model, compile=compiles(config, device, num_parameters)))
    kernels = kernels_of(config, str(model.config.model_type), splits_backward(config.strategy))
    config = replace(config, model=replace(config.model, kernels=kernels))
    if kernels == "liger":
        use_liger(model)
    objective = objective_class(config.objective.name).from_config(
        config,
        model,
        optimizer_factory(config.optimizer, model, precision),
        build_schedule(config.scheduler, total_steps),
    )
    objective.of_data(prepared)
    writer = _metrics_writer(paths, start_step, config, objective) if rank == 0 else None
    own_writer = rank_writer(paths, rank, world_size, start_step)
    start = RunStart(config, paths.root, prepared, plan, dims.data_parallel_rank(rank), max_steps)
    needs_first = objective.needs_first_weights(start)
    from_run = config.checkpoint.init_from is not None and not starts_from_folder(config)
    first = weights_reader(config) if from_run and (reader is None or needs_first) else None
    source = first if reader is None else reader
    if source is not None:
        source.require({name: tuple(weights.shape) for name, weights in model.named_parameters()}, "model")
    task_keys = [metric.key for metric in task_metrics(config.eval.tasks)]
    best = metric_of(config, config.checkpoint.best_metric)
    clock = RunClock(
        config.trainer.max_seconds(),
        config.checkpoint.every_n_minutes,
        float(reader.state.get("trained_s", 0.0)) if reader is not None else 0.0,
        tells=rank == 0,
    )
    checkpointer = Checkpointer(
        config.checkpoint,
        paths,
        {
            "seed": config.seed,
            "global_batch_size": plan.global_batch_size,
            "total_steps": total_steps,
            "world_size": world_size,
            "topology": dims.as_dict(),
            "precision": precision,
            "data_digest": prepared.digest,
            "validation_digest": prepared.validation_digest,
            "config_hash": identity,
            "model_config": settings,
        },
        timeout_s=config.launch.collective_timeout,
        patience_s=config.launch.stop_timeout,
        start_step=start_step,
        highest=best is not None and best.higher_is_better,
        clock=clock,
        before_manifest=writer.sync if writer is not None else lambda: None,
        left_out=left_out_weights(config, model, source),
    )

    def asked_to_stop() -> bool:
        return stop_requested() or checkpointer.must_stop or too_late(checkpointer.longest_s)

    strategy = strategy_class(config.strategy.engine).from_config(
        config,
        dims,
        device,
        materialise=fill,
        dropout_seed=config.seed if uses_dropout(model) else None,
        stop_requested=lambda: asked_to_stop() or clock.is_over(),
    )
    strategy.save_due, strategy.before_writing = clock.save_is_due, checkpointer.before_writing
    strategy.average.decay, strategy.average.evaluated = config.optimizer.ema.decay, config.optimizer.ema.evaluate
    strategy.spike_guard = SpikeGuard(config.optimizer.spike_guard, tells=rank == 0)
    tasks = RunTasks(config, prepared, objective, strategy) if config.eval.tasks else None
    recorder = StepRecorder(
        config.trainer,
        max_steps=max_steps,
        start_step=start_step,
        checkpointer=checkpointer,
        save_last=config.checkpoint.save_last,
        ranked=(*objective.description.ranked, *task_keys),
        tasks=tasks,
        writer=writer,
        own_writer=own_writer,
        progress=Progress(max_steps, config.trainer.progress, run_name=config.run.name) if rank == 0 else None,
        model_flops_utilisation=_utilisation(model, config, prepared, device, precision, world_size),
        sample=sampler(config, paths, prepared, model, strategy, start_step),
        first_reader=first,
        at_first_weights=lambda: objective.first_weights(start) if needs_first else None,
        reader=reader,
        source_tokens=prepared.source_tokens(config),
        begins=clock.start,
    )
    profiler = _profiler(config, paths, dims, device, rank, start_step)
    held_out = evaluation_step_batches(config, prepared, plan, dims.data_parallel_rank(rank), objective.samples)
    try:
        trainer = run_trainer(config, paths, strategy, recorder, max_steps, device, rank, profiler)
        trainer.fit(
            objective,
            train_step_batches(
                config,
                prepared,
                plan,
                dims.data_parallel_rank(rank),
                start_sample=start_step * plan.global_batch_size,
                max_steps=max_steps,
                view=objective.samples,
            ),
            held_out if prepared.validation_samples else None,
        )
    except MisconfigurationException as error:
        refusal = " ".join(str(error).split())
        raise BadInputError(f"callbacks, logger: Lightning refuses this: {refusal}; change or remove it") from error
    except NonFiniteStep as step:
        raise checkpointer.not_finite(step.what, step.step_batch) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        parts: dict[str, int] = {}
        with suppress(Exception):  # in the middle of a step an engine may not be able to tell
            parts = strategy.memory_parts()
        if device.type == "cuda":
            with suppress(OSError):  # a full disk takes none, and the cause is named below
                print(write_snapshot(paths.profile / f"memory-rank-{rank}.json"), file=sys.stderr)
        raise out_of_memory(error, rank, config, dims, plan, model, parts) from error
    finally:
        if writer is not None:
            writer.sync()
            writer.close()
        if own_writer is not None:
            own_writer.close()
        if profiler is not None:
            profiler.close()
    if strategy.spike_guard.stopped_by is not None:
        raise GradientSpikeError(strategy.spike_guard.stopped_by, checkpointer.last_path)
    in_time = recorder.stopped and recorder.step < max_steps and _time_alone(strategy, asked_to_stop(), clock.is_over())
    no_step_done = reader is not None and recorder.step == start_step  # killed after the last save, or stopped at once
    if reader is not None and no_step_done and (reader.folder.parent == paths.checkpoints or start_step >= max_steps):
        recorder.metrics.update(reader.state["metrics"])
        checkpointer.last_path = resume
    sizes = {"parameters": num_parameters, "trained": num_trained}
    result = train_result(
        config, prepared, dims, plan, model, strategy, recorder, checkpointer, precision, sizes, tasks, in_time
    )
    if profiler is not None:
        samples = objective.samples(config, prepared.open(config, "train"))
        uneven = imbalances(samples, prepared.order(config, len(samples)), plan)
        result.summary.update(profiler.finish(config, plan, peak_memory_gib(device), uneven))
    return result


def _profiler(
    config: RunConfig, paths: RunPaths, dims: ParallelDims, device: torch.device, rank: int, start_step: int
) -> StepProfiler | None:
    """What ``trainer.profile`` asks for; nothing of it is imported where it asks for nothing."""
    if config.trainer.profile == "none":
        return None
    from mgpu_pipe.profiling.step_profiler import StepProfiler

    trace = paths.profile / f"rank-{rank}.json.gz" if config.trainer.profile == "steps" else None
    first, last = config.trainer.profile_steps
    return StepProfiler(dims, device, first, last, start_step, trace)


def _time_alone(strategy: EngineStrategy, asked: bool, over: bool) -> bool:
    """Whether ``trainer.max_time`` alone made the ranks stop; each knows its own reasons. A collective call."""
    known = torch.tensor([asked, over], dtype=torch.float64, device=strategy.root_device)
    asked_any, over_any = strategy.sum_over_data(known).tolist()
    return over_any > 0 and not asked_any


def _horizon(config: RunConfig, reader: CheckpointReader | None, max_steps: int) -> int:
    if config.scheduler.total_steps is not None:
        return config.scheduler.total_steps
    return int(reader.state["total_steps"]) if reader is not None else max_steps


def _device(config: RunConfig) -> torch.device:
    if device_type(config) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _metrics_writer(paths: RunPaths, start_step: int, config: RunConfig, objective: Objective) -> MetricsWriter:
    if paths.metrics.exists():
        truncate_after(paths.metrics, start_step)
    measured = [metric.key for metric in (*objective.description.metrics, *task_metrics(config.eval.tasks))]
    return MetricsWriter(paths.metrics, columns=[*STEP_COLUMNS, *measured])


def _utilisation(
    model: PreTrainedModel, config: RunConfig, prepared: Prepared, device: torch.device, precision: str, world_size: int
) -> Callable[[float], float] | None:
    """From tokens/s of the whole run to model FLOPs utilisation, where the device's peak is known.

    Attention is counted inside documents.
    """
    if (
        device.type != "cuda" or model.config.is_encoder_decoder or not config.data.tokens()
    ):  # there a token passes half of the model
        return None
    peak = known_gpu_peak(torch.cuda.get_device_name(device), "fp32" if precision == "fp32" else "bf16")
    if peak is None:
        return None
    model_class = description(config.objective.name).model_class

    def freeze(whole: torch.nn.Module) -> None:
        if config.peft.name != "none":
            whole.requires_grad_(False)
        elif config.model.freeze:
            freeze_parameters(whole, config.model.freeze)

    per_token = training_flops_per_token(model.config, prepared.context(config), model_class, freeze)
    return lambda tokens_per_s: tokens_per_s * per_token / (peak * world_size)
