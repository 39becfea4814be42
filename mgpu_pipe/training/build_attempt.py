"""Builds the parts of an attempt: model, objective, engine with its recorder and checkpointer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.architectures.formulas.flops import known_gpu_peak
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.config.objective import description, metric_of, task_metrics
from mgpu_pipe.config.resolve import uses_tf32
from mgpu_pipe.models.active_parameters import training_flops_per_token
from mgpu_pipe.models.build import run_model
from mgpu_pipe.models.kernels.layers import resolve_kernels, use_liger
from mgpu_pipe.models.kernels.packed_attention import use_flash_attention_3
from mgpu_pipe.models.model_parts import freeze_parameters
from mgpu_pipe.models.model_settings import model_settings, require_model_settings
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.first_weights import MEASURED, RunStart
from mgpu_pipe.objectives.protocols import WeightMeasurer
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.optim.gradients import SpikeGuard
from mgpu_pipe.optim.optimizers import build_schedule, optimizer_factory
from mgpu_pipe.parallel.compile import compiles
from mgpu_pipe.parallel.random_streams import uses_dropout
from mgpu_pipe.runs.metrics_file import STEP_COLUMNS, MetricsWriter, rank_writer, truncate_after
from mgpu_pipe.training import initial_weights
from mgpu_pipe.training.attempt import Attempt, Inference, TaskFigures
from mgpu_pipe.training.initial_weights import StartWeights
from mgpu_pipe.training.progress import Progress
from mgpu_pipe.training.rank_memory import is_out_of_memory, out_of_memory
from mgpu_pipe.training.recorder import StepRecorder
from mgpu_pipe.training.run_clock import RunClock, too_late
from mgpu_pipe.training.save_and_resume import Checkpointer
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.training.trainer import set_tf32, strategy_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mgpu_pipe.training.profiling.step_profiler import StepProfiler


@dataclass(frozen=True)
class BuiltModel:
    """The model of an attempt before it is parallelised.

    Attributes:
        fill: fills the parameters of a model on the meta device; None where the model holds its weights.
        settings: fields of its configuration that a checkpoint records.
        parameters: their number; an engine may leave them empty later.
        trained: number of the parameters that are trained.
    """

    model: PreTrainedModel
    fill: Any
    settings: dict[str, Any]
    parameters: int
    trained: int


def build_model(attempt: Attempt) -> tuple[Attempt, BuiltModel]:
    """Build the model; compilation and kernels are decided. OutOfMemoryError if it does not fit into the device."""
    config, device = attempt.config, attempt.device
    try:
        model, fill = initial_weights.build_model(
            config, device, sharded=initial_weights.reads_slices(config.peft, config.strategy, attempt.dims)
        )
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error, attempt, run_model(config), {}) from error
    if config.model.flash_attention == "fa3":
        use_flash_attention_3()
    if device.type == "cuda":
        set_tf32(model, uses_tf32(config.precision, config.trainer))
    settings = model_settings(model.config)
    if attempt.reader is not None:
        require_model_settings(attempt.reader.state.get("model_config"), settings, attempt.reader.folder)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attempt = attempt.with_model(compile=compiles(config.model, config.strategy, config.precision, device, parameters))
    model_type = str(model.config.model_type)
    kernels = resolve_kernels(attempt.config.model, config.strategy, config.precision, config.trainer, model_type)
    if kernels == "liger":
        use_liger(model)
    return attempt.with_model(kernels=kernels), BuiltModel(model, fill, settings, parameters, trained)


def build_objective(attempt: Attempt, model: PreTrainedModel) -> Objective:
    """Build the objective around ``model``, with its optimizer and schedule."""
    config = attempt.config
    objective = objective_class(config.objective.name).from_config(
        config,
        model,
        optimizer_factory(config.optimizer, model, attempt.precision),
        build_schedule(config.scheduler, attempt.total_steps),
    )
    objective.of_data(attempt.prepared)
    return objective


@dataclass(frozen=True)
class MetricsFiles:
    """The files of metrics that this rank writes.

    Attributes:
        run: ``metrics.csv``, on rank 0.
        rank: this rank's own file, where there are several ranks.
    """

    run: MetricsWriter | None
    rank: MetricsWriter | None

    @classmethod
    def from_attempt(cls, attempt: Attempt, objective: Objective) -> MetricsFiles:
        """Open the files, cut after the step that the attempt starts from."""
        run = _metrics_writer(attempt, objective) if attempt.rank == 0 else None
        return cls(run, rank_writer(attempt.paths, attempt.rank, attempt.world_size, attempt.start_step))

    def sync(self) -> None:
        """Write what is in memory to ``metrics.csv``; a checkpoint never outruns it."""
        if self.run is not None:
            self.run.sync()

    def close(self) -> None:
        """Write and close both files."""
        self.sync()
        for writer in (self.run, self.rank):
            if writer is not None:
                writer.close()


@dataclass(frozen=True)
class Engine:
    """The parts of an attempt that run its steps."""

    strategy: EngineStrategy
    checkpointer: Checkpointer
    recorder: StepRecorder
    clock: RunClock
    tasks: TaskFigures | None
    profiler: StepProfiler | None
    stop_requested: Callable[[], bool]


def build_engine(
    attempt: Attempt,
    built: BuiltModel,
    objective: Objective,
    files: MetricsFiles,
    stop_requested: Callable[[], bool],
    inference: Inference | None,
) -> Engine:
    """Build the strategy, and the recorder that closes its steps."""
    config = attempt.config
    if inference is None and (config.eval.tasks or config.trainer.sample_every_n_steps):
        raise ValueError("give train() inference: the configuration asks for tasks or samples")
    weights, start = _start_weights(attempt, objective)
    if weights.source is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in built.model.named_parameters()}
        weights.source.require(shapes, "model")
    clock = _build_clock(attempt)
    checkpointer = _build_checkpointer(attempt, built, files, clock, weights.source, start)

    def must_stop() -> bool:
        return stop_requested() or checkpointer.must_stop or too_late(checkpointer.longest_s)

    strategy = _build_strategy(attempt, built, checkpointer, clock, must_stop)
    tasks = sample = None
    if inference is not None:
        if config.eval.tasks:
            tasks = inference.tasks(config.eval, config.data, attempt.prepared, objective, strategy)
        sample = inference.sampler(config, attempt.paths, attempt.prepared, built.model, strategy, attempt.start_step)
    logs = attempt.rank == 0
    progress = Progress(attempt.max_steps, config.trainer.progress, run_name=config.run.name) if logs else None
    recorder = StepRecorder(
        config.trainer,
        max_steps=attempt.max_steps,
        start_step=attempt.start_step,
        checkpointer=checkpointer,
        save_last=config.checkpoint.save_last,
        ranked=(*objective.description.rankable_metrics, *(metric.key for metric in task_metrics(config.eval.tasks))),
        tasks=tasks,
        writer=files.run,
        own_writer=files.rank,
        progress=progress,
        model_flops_utilisation=_utilisation(attempt, built.model),
        sample=sample,
        weights=weights,
        source_tokens=attempt.prepared.source_tokens(config.seed, config.data),
        before_first_step=clock.start,
    )
    return Engine(strategy, checkpointer, recorder, clock, tasks, _build_profiler(attempt), must_stop)


def _build_clock(attempt: Attempt) -> RunClock:
    """The clock of the run's time limit and of saves by time; it resumes at the checkpoint's seconds."""
    config, reader = attempt.config, attempt.reader
    trained_s = float(reader.state.get("trained_s", 0.0)) if reader is not None else 0.0
    return RunClock(config.trainer.max_seconds(), config.checkpoint.every_n_minutes, trained_s, logs=attempt.rank == 0)


def _build_strategy(
    attempt: Attempt, built: BuiltModel, checkpointer: Checkpointer, clock: RunClock, must_stop: Callable[[], bool]
) -> EngineStrategy:
    config = attempt.config
    strategy: EngineStrategy = strategy_class(config.strategy.engine).from_config(
        config,
        attempt.dims,
        attempt.device,
        materialise=built.fill,
        dropout_seed=config.seed if uses_dropout(built.model) else None,
        stop_requested=lambda: must_stop() or clock.is_over(),
    )
    strategy.save_due, strategy.before_writing = clock.save_is_due, checkpointer.before_writing
    strategy.average.decay, strategy.average.evaluated = config.optimizer.ema.decay, config.optimizer.ema.evaluate
    strategy.spike_guard = SpikeGuard(config.optimizer.spike_guard, warns=attempt.rank == 0)
    return strategy


def _start_weights(attempt: Attempt, objective: Objective) -> tuple[StartWeights, RunStart]:
    """The weights that the attempt starts from, which the objective may measure, and the run's start."""
    config, reader = attempt.config, attempt.reader
    first = None
    if reader is None and initial_weights.starts_from_run(config.checkpoint):
        first = initial_weights.weights_reader(config.checkpoint)
    measurer = objective if isinstance(objective, WeightMeasurer) else None
    wanted = measurer.measures_weights if measurer is not None else "first"
    measured = initial_weights.MeasuredWeights(config, first, reader, wanted)
    start = RunStart(
        config,
        attempt.paths.root,
        attempt.prepared,
        attempt.plan,
        attempt.data_parallel_rank,
        attempt.max_steps,
        attempt.precision,
        measured.digest,
    )
    needs_first = measurer is not None and measurer.needs_first_weights(start)
    if needs_first:
        first = measured.reader()

    def measure(weights: str) -> None:
        if needs_first and measurer is not None and measurer.measures_weights == weights:
            measurer.first_weights(start)

    return StartWeights(first, reader, measure), start


def _build_checkpointer(
    attempt: Attempt,
    built: BuiltModel,
    files: MetricsFiles,
    clock: RunClock,
    source: CheckpointReader | None,
    start: RunStart,
) -> Checkpointer:
    """The checkpointer, with the entries of ``state.json`` that are equal at every step of the attempt."""
    config = attempt.config
    best = metric_of(config.objective, config.eval, config.checkpoint.best_metric)
    return Checkpointer(
        config.checkpoint,
        attempt.paths,
        {
            "seed": config.seed,
            "global_batch_size": attempt.plan.global_batch_size,
            "total_steps": attempt.total_steps,
            "world_size": attempt.world_size,
            "topology": attempt.dims.as_dict(),
            "precision": attempt.precision,
            "data_digest": attempt.prepared.digest,
            "validation_digest": attempt.prepared.validation_digest,
            "config_hash": attempt.config_hash,
            "model_config": built.settings,
            **initial_weights.buffers_of_start(config.model, config.checkpoint, built.model, source),
            MEASURED: start.known_weights,
        },
        timeout_s=config.launch.collective_timeout,
        patience_s=config.launch.stop_timeout,
        start_step=attempt.start_step,
        highest=best is not None and best.higher_is_better,
        clock=clock,
        before_manifest=files.sync,
        left_out=initial_weights.left_out_weights(
            config.model.path, config.checkpoint, config.peft, config.data.cache_dir, built.model, source
        ),
    )


def _build_profiler(attempt: Attempt) -> StepProfiler | None:
    """The profiler of ``trainer.profile``; nothing of it is imported without that key."""
    config = attempt.config
    if config.trainer.profile == "none":
        return None
    from mgpu_pipe.training.profiling.step_profiler import StepProfiler

    trace = attempt.paths.profile / f"rank-{attempt.rank}.json.gz" if config.trainer.profile == "steps" else None
    first, last = config.trainer.profile_steps
    return StepProfiler(attempt.dims, attempt.device, first, last, attempt.start_step, trace)


def _metrics_writer(attempt: Attempt, objective: Objective) -> MetricsWriter:
    path = attempt.paths.metrics
    if path.exists():
        truncate_after(path, attempt.start_step)
    measured = (*objective.description.metrics, *task_metrics(attempt.config.eval.tasks))
    return MetricsWriter(path, columns=[*STEP_COLUMNS, *(metric.key for metric in measured)])


def _utilisation(attempt: Attempt, model: PreTrainedModel) -> Callable[[float], float] | None:
    """Model FLOPs utilisation from tokens/s of the run, if the peak is known; attention inside documents counts."""
    config = attempt.config
    # A token of an encoder-decoder passes half of the model.
    if attempt.device.type != "cuda" or model.config.is_encoder_decoder or not config.data.tokens():
        return None
    name = torch.cuda.get_device_name(attempt.device)
    peak = known_gpu_peak(name, "fp32" if attempt.precision == "fp32" else "bf16")
    if peak is None:
        return None
    model_class = description(config.objective.name).model_class

    def freeze(whole: torch.nn.Module) -> None:
        if config.peft.name != "none":
            whole.requires_grad_(False)
        elif config.model.freeze:
            freeze_parameters(whole, config.model.freeze)

    per_token = training_flops_per_token(model.config, attempt.prepared.context(config.data), model_class, freeze)
    return lambda tokens_per_s: tokens_per_s * per_token / (peak * attempt.world_size)
