"""Folders of old versions under every strategy that their family takes.

Oracle: transformers' own reading of the folder and the objective's plain losses in one process, by the comparison of
``verify``: initial weights bit for bit, loss, norm, every gradient and the weights of two steps within its bounds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.config.objective import description
from mgpu_pipe.config.resolve import resolve_precision
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.models.build import materialise_empty
from mgpu_pipe.models.weights.pretrained import load_pretrained
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.optim.optimizers import build_schedule, optimizer_factory
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.initial_weights import build_model, reads_slices
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.training.trainer import strategy_class
from mgpu_pipe.verify import baseline, comparison
from mgpu_pipe.verify.certificate import Worst, worst_of
from tests.models.old_folders import write_old
from tests.support.processes import run_processes
from tests.verify.support import small_run

SHAPE = ("model=hf", "trainer.accelerator=cpu", "data.seq_len=16", "data.packing=none", "logger=none")
SHARDED = ("ddp", "fsdp", "hsdp", "tp", "zero1", "zero2", "zero3")
CAUSAL = (*SHARDED, "pp", "cp")
OBJECTIVES = {
    "bert": ("masked_lm", SHARDED),
    "gpt2": ("causal_lm", CAUSAL),
    "llama": ("causal_lm", CAUSAL),
    "pythia": ("causal_lm", CAUSAL),
    "clip": ("contrastive", SHARDED),
    "t5": ("seq2seq", SHARDED),
    "wav2vec2": ("ctc", SHARDED),
    "whisper": ("speech_seq2seq", SHARDED),
}
QUICK = (("llama", "zero2"), ("wav2vec2", "fsdp"))
CPU = torch.device("cpu")


def verified_from_folder(config: RunConfig) -> list[Worst]:
    """The worst comparison of each quantity; a collective call."""

    def configured(config: RunConfig, dims: ParallelDims) -> tuple[EngineStrategy, Objective]:
        model, fill = build_model(config, CPU, sharded=reads_slices(config.peft, config.strategy, dims))
        made: Any = strategy_class(config.strategy.engine)
        strategy = made.from_config(
            config, dims, CPU, materialise=fill, dropout_seed=None, stop_requested=lambda: False
        )
        schedule = build_schedule(config.scheduler, config.scheduler.total_steps or 1)
        factory = optimizer_factory(config.optimizer, model, resolve_precision(config.precision, config.trainer))
        return strategy, objective_class(config.objective.name).from_config(config, model, factory, schedule)

    def read(model: Any, seed: int, device: Any) -> Any:
        source = config.model
        whole = load_pretrained(source, device, source, description(config.objective.name).model_class, seed)
        materialise_empty(model, device).load_state_dict(whole.state_dict())
        for name, buffer in whole.named_buffers():
            model.get_buffer(name).copy_(buffer)
        return model

    with mock.patch.object(comparison, "_configure", configured), mock.patch.object(baseline, "materialise", read):
        return worst_of(comparison.compare(config)) if dist.is_initialized() else []


def cells() -> list[Any]:
    """Some in ``make test``."""
    return [
        pytest.param(kind, name, marks=() if (kind, name) in QUICK else pytest.mark.exhaustive)
        for kind, (_, strategies) in OBJECTIVES.items()
        for name in strategies
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), cells())
def test_an_old_folder_learns_as_in_one_process(kind: str, strategy: str, tmp_path: Path) -> None:
    folder, processes = write_old(kind, tmp_path), 4 if strategy == "hsdp" else 2
    more = ("strategy.dp_replicate=2",) if strategy == "hsdp" else ()
    given = (f"model.path={folder}", f"objective={OBJECTIVES[kind][0]}", f"strategy={strategy}")
    small = small_run(*SHAPE, *given, *more, f"trainer.devices={processes}", steps=2)
    small.model = replace(small.model, type=None, config={}, path=str(folder))
    worst = run_processes(processes, verified_from_folder, small)[0]
    assert [one.quantity for one in worst] == ["initial weights", "loss", "gradient norm", "gradient", "weights"]
    assert [one for one in worst if not one.passed] == []
