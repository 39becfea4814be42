"""One process's training steps on a fake GPU, among others that are not there: a row of the audit."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral  # noqa: F401  # before processes are forked, each of which needs it

from benchmarks.gpu.device_watch import Events, watching
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.step_batch import ListedStepBatches, StepBatch
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.objectives.packed_text import random_packed_text
from mgpu_pipe.optim.optimizers import optimizer_factory
from mgpu_pipe.system.compat.lightning_private import quiet_libraries
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.training.tracing.fake_device import process_group
from mgpu_pipe.training.trainer import bare_trainer, strategy_class

ROWS, TOKENS, MICRO_BATCHES = 2, 64, 2
STEPS = 3
"""Of which the second is counted."""


@dataclass(frozen=True)
class Case:
    ranks: int
    overrides: tuple[str, ...]
    model: str = "llama_tiny"
    rank: int = 0


def mesh(**sizes: int) -> tuple[str, ...]:
    return ("strategy=megatron", *(f"strategy.{axis}={size}" for axis, size in sizes.items()))


def zero(stage: int, ranks: int) -> tuple[str, ...]:
    """DeepSpeed is told the sizes of the batch."""
    size = ROWS * MICRO_BATCHES * ranks
    return f"strategy=zero{stage}", f"data.global_batch_size={size}", f"data.micro_batch_size={ROWS}"


SEQUENCE, ULYSSES, FP32 = "strategy.sequence_parallel=true", "strategy.context.method=ulysses", "precision=fp32"
EXPERTS = "mixtral_tiny"
CASES = {
    "single": Case(1, ("strategy=single",)),
    "fsdp1": Case(1, ("strategy=fsdp",)),
    "experts1": Case(1, ("strategy=single",), EXPERTS),
    "ddp8": Case(8, ("strategy=ddp",)),
    "ddp8, fp32": Case(8, ("strategy=ddp", FP32)),
    "fsdp8": Case(8, ("strategy=fsdp",)),
    "hsdp2x4": Case(8, ("strategy=hsdp", "strategy.dp_replicate=2")),
    "tp8": Case(8, mesh(tp=8)),
    "tp4 x dp2": Case(8, mesh(tp=4)),
    "tp4 x dp2, sequence": Case(8, (*mesh(tp=4), SEQUENCE)),
    "pp2 x dp4, first": Case(8, mesh(pp=2)),
    "pp2 x dp4, last": Case(8, mesh(pp=2), rank=7),
    "cp8, ring": Case(8, mesh(cp=8)),
    "cp4 x dp2, ulysses": Case(8, (*mesh(cp=4), ULYSSES)),
    "ep8": Case(8, mesh(ep=8), EXPERTS),
    "ep4 x tp2": Case(8, mesh(ep=4, tp=2), EXPERTS),
    "pp2 x tp2 x dp2, last": Case(8, mesh(pp=2, tp=2), rank=7),
    "tp2 x cp2 x dp2": Case(8, mesh(tp=2, cp=2)),
    "pp2 x tp2 x cp2, last": Case(8, mesh(pp=2, tp=2, cp=2), rank=7),
    "ddp64": Case(64, ("strategy=ddp",)),
    "fsdp64": Case(64, ("strategy=fsdp",)),
    "hsdp8x8": Case(64, ("strategy=hsdp", "strategy.dp_replicate=8")),
    "tp8 x dp8": Case(64, mesh(tp=8)),
    "tp8 x dp8, sequence": Case(64, (*mesh(tp=8), SEQUENCE)),
    "pp2 x dp32, last": Case(64, mesh(pp=2), rank=63),
    "cp8 x dp8, ring": Case(64, mesh(cp=8)),
    "cp4 x dp16, ulysses": Case(64, (*mesh(cp=4), ULYSSES)),
    "ep8 x dp64": Case(64, mesh(ep=8), EXPERTS),
    "pp2 x tp4 x cp2 x dp4, sequence, last": Case(64, (*mesh(pp=2, tp=4, cp=2), SEQUENCE), rank=63),
    "pp2 x ep8 x tp2 x dp16, last": Case(64, mesh(pp=2, ep=8, tp=2), EXPERTS, rank=63),
    **{f"zero{stage}, {ranks}": Case(ranks, zero(stage, ranks)) for stage in (1, 2, 3) for ranks in (1, 8, 64)},
}


class _Second(pl.Callback):
    """Counts from the end of the first step to that of the second."""

    def __init__(self, events: Events) -> None:
        self.events = events

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.events.counts = batch.step == 0


def audit(name: str) -> dict[str, Any]:
    """The row of a case, in a process that had no world before."""
    quiet_libraries()
    warnings.simplefilter("ignore")
    case, events = CASES[name], Events()
    try:
        communicators = _train(case, events)
    except RuntimeError as error:
        if "different devices" not in str(error):
            raise
        return {"case": name, "ranks": case.ranks, "mismatch": str(error)}
    return {
        "case": name,
        "ranks": case.ranks,
        "waits": sum(events.waits.values()),
        "communicators": len(communicators),
        "operators": events.operators,
        "collectives": sum(events.calls.values()),
        "sent": sum(events.sent.values()),
        "waits at": dict(sorted(events.waits.items())),
        "communicators of": communicators,
        "collectives of": {kind: [count, events.sent[kind]] for kind, count in sorted(events.calls.items())},
    }


def _train(case: Case, events: Events) -> list[int]:
    """The sizes of the communicators."""
    config = configuration(case)
    dims = ParallelDims.resolve(config.strategy, case.ranks)
    known = {
        # every expert gets as many tokens
        "parallel/expert/token_exchange: from_assignments": ROWS * TOKENS * 2 // (dims.ep * dims.tp),
        "parallel/pipeline/run_pipeline: run_step_batch": 1,  # torch asks all stages whether they know their shapes
    }
    batches = [step_batch(step, dims) for step in range(STEPS)]
    with process_group(case.ranks, case.rank) as groups, _unchecked(config), watching(events, known):
        fit(config, dims, torch.device("cuda", 0), batches, _Second(events))
        return sorted(groups.values())


def _unchecked(config: RunConfig) -> AbstractContextManager[Any]:
    """ZeRO-3 asks once a run whether all ranks came to the weights in one order; what it reads is 0 here."""
    if config.strategy.engine != "deepspeed":
        return nullcontext()
    return mock.patch("deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks")


def configuration(case: Case) -> RunConfig:
    precision = [] if FP32 in case.overrides else ["precision=bf16"]
    return compose([f"model={case.model}", *precision, *case.overrides, f"data.seq_len={TOKENS}"])[0]


def fit(
    config: RunConfig, dims: ParallelDims, device: torch.device, step_batches: list[StepBatch], callback: pl.Callback
) -> EngineStrategy:
    """Train these step batches as the process of the world that there is."""
    model = run_model(config)
    use_packed_attention(model)
    factory = optimizer_factory(config.optimizer, model, config.precision.name)
    strategy = strategy_class(config.strategy.engine).from_config(
        config,
        dims,
        device,
        materialise=lambda model, device: materialise(model, 0, device),
        dropout_seed=None,
        stop_requested=lambda: False,
    )
    strategy.broadcast = lambda obj, src=0: obj  # type: ignore[method-assign]  # Lightning's, before the first step
    trainer = bare_trainer(
        accelerator=device.type,
        devices=1,
        strategy=strategy,
        max_steps=len(step_batches),
        logger=False,
        callbacks=[callback],
    )
    objective = CausalLMObjective.from_config(config, model, factory, lambda _: 1.0)
    trainer.fit(objective, ListedStepBatches(step_batches))
    return strategy


def step_batch(step: int, dims: ParallelDims) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    rows = [random_packed_text(generator, step, ROWS, TOKENS, 1024, True) for _ in range(MICRO_BATCHES)]
    return StepBatch(step, 0, ROWS * MICRO_BATCHES * dims.data_parallel_size, rows, 1)
