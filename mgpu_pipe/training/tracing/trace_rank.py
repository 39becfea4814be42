"""Traces an optimizer step of one rank: live bytes by phase and the collectives, as JSON.

``python -m mgpu_pipe.training.tracing.trace_rank RANK RANKS [OVERRIDES]`` runs on fake tensors, on a fake GPU if
the configuration is for GPUs. The model, its split, the optimizer and the step are the run's; blocks are not compiled.
Micro-batches beyond those that change memory are left out, see :func:`micro_batches`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.hydra.command_line import compose_one, parse
from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.errors import BadInputError, MgpuError, print_error, print_text
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.topology import BatchPlan, ParallelDims

if TYPE_CHECKING:
    import torch
    from pytorch_lightning import Callback

    from mgpu_pipe.data.step_batch import StepBatch
    from mgpu_pipe.training.strategy import EngineStrategy
    from mgpu_pipe.training.tracing.fake_device import FakeDevice
    from mgpu_pipe.training.tracing.phase_memory import PhaseWatch


FAKE_CUDA = Path(__file__).with_name("fake_cuda.cpp")
"""A device guard for torch, compiled by g++. Tensors on its device have shapes and no values."""


def load_fake_cuda() -> None:
    """Gives torch, not imported yet, a CUDA device that does nothing; BadInputError without g++, or with real CUDA."""
    assert "torch" not in sys.modules, "torch has asked for its devices"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    if (torch / "lib/libtorch_cuda.so").exists():
        raise BadInputError("this torch has its own CUDA; trace on a machine with a GPU, or install torch for CPUs")
    if shutil.which("g++") is None:
        raise BadInputError("g++ is missing, which compiles the fake GPU; install it: apt-get install g++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", str(FAKE_CUDA)]
        subprocess.run([*command, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(library)], check=True)
        for name in (torch / "lib/libc10.so", torch / "lib/libtorch_cpu.so", library):
            ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
    from mgpu_pipe.training.tracing.fake_device import stand_in

    stand_in()


def micro_batches(strategy: StrategyConfig, plan: BatchPlan, pp: int) -> int:
    """The fewest micro-batches of a step from which on more change no memory: sums of gradients meet the most passes
    in flight.
    """
    schedule, count = strategy.pipeline.schedule, plan.num_micro_batches
    if pp == 1:
        return min(count, 2)
    if schedule == "gpipe":
        return count
    return min(count, pp + 1 if schedule == "1f1b" else 2 * pp)


def trace(config: RunConfig, rank: int, ranks: int, on_fakes: bool = True) -> dict[str, Any]:
    """Bytes of a rank by phase and its collectives, in a process that had no world before.

    Args:
        on_fakes: on fake tensors; else on real ones of the CPU.
    """
    import torch

    from mgpu_pipe.system.compat.lightning_private import quiet_libraries
    from mgpu_pipe.training.tracing.fake_device import attention_of_gpus, on_fake_device, process_group, without_others
    from mgpu_pipe.training.tracing.phase_memory import PhaseWatch

    quiet_libraries()
    warnings.simplefilter("ignore")  # on addresses of fake tensors, which are compared with themselves alone
    os.environ["LOCAL_RANK"] = "0"
    kind = device_type(config.trainer)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    config = replace(config, model=replace(config.model, compile=False))
    dims = ParallelDims.resolve(config.strategy, ranks)
    plan = BatchPlan.resolve(config.data, dims.data_parallel_size, dims.pp)
    count = micro_batches(config.strategy, plan, dims.pp)
    batch = _step_batch(config.seed, config.model, config.data.seq_len, plan, count)
    watch = PhaseWatch()
    with ExitStack() as inside:
        inside.enter_context(process_group(ranks, rank))
        inside.enter_context(without_others())
        fake = _fake_device(kind, config.model, config.data, dims) if on_fakes else None
        if fake is not None:
            inside.enter_context(on_fake_device(fake))
            inside.enter_context(attention_of_gpus() if kind == "cuda" else nullcontext())
        inside.enter_context(watch)
        figures = _fit(config, dims, device, batch, watch, fake)
    return {
        "rank": rank,
        "micro_batches": count,
        "of_micro_batches": plan.num_micro_batches,
        **figures,
        "collectives": {
            name: [calls, watch.collectives.sent[name]] for name, calls in sorted(watch.collectives.calls.items())
        },
    }


def _fake_device(kind: str, model: ModelConfig, data: DataConfig, dims: ParallelDims) -> FakeDevice:
    from mgpu_pipe.system.compat.fake_tensors_private import prepare_fakes
    from mgpu_pipe.training.tracing.fake_device import FakeDevice

    prepare_fakes()
    fields, plan = resolved_fields(model), BatchPlan.resolve(data, dims.data_parallel_size, dims.pp)
    assignments = data.seq_len * plan.micro_batch_size * int(fields.get("num_experts_per_tok") or 1)
    known = {
        # every expert gets as many tokens
        "parallel/expert/token_exchange: from_assignments": assignments // (dims.ep * dims.tp),
        "parallel/pipeline/run_pipeline: run_step_batch": 1,  # torch asks all stages whether they know their shapes
    }
    return FakeDevice(kind, known)


def _step_batch(seed: int, model: ModelConfig, tokens: int, plan: BatchPlan, count: int) -> StepBatch:
    import torch

    from mgpu_pipe.data.step_batch import StepBatch
    from mgpu_pipe.objectives.packed_text import random_packed_text

    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(resolved_fields(model)["vocab_size"])
    rows = [random_packed_text(generator, 0, plan.micro_batch_size, tokens, vocabulary, True) for _ in range(count)]
    return StepBatch(0, 0, plan.global_batch_size, rows, plan.global_batch_size * tokens)


def _fit(
    config: RunConfig,
    dims: ParallelDims,
    device: torch.device,
    batch: StepBatch,
    watch: PhaseWatch,
    fake: FakeDevice | None,
) -> dict[str, Any]:
    """Train this step batch, once the optimizer has its state; the bytes by phase."""
    from mgpu_pipe.data.step_batch import ListedStepBatches
    from mgpu_pipe.objectives.causal_lm import CausalLMObjective
    from mgpu_pipe.optim.optimizers import optimizer_factory
    from mgpu_pipe.parallel.random_streams import uses_dropout
    from mgpu_pipe.training.initial_weights import build_model
    from mgpu_pipe.training.trainer import bare_trainer, strategy_class

    model, fill = build_model(config, device, sharded=True)
    strategy = strategy_class(config.strategy.engine).from_config(
        config,
        dims,
        device,
        materialise=fill if fake is None else _fill_by(fake.empty),
        dropout_seed=config.seed if uses_dropout(model) else None,
        stop_requested=lambda: False,
    )
    strategy.broadcast = lambda obj, src=0: obj  # type: ignore[method-assign]  # Lightning's, before the first step
    figures: dict[str, Any] = {}
    callbacks = [_phase_callback(strategy, watch, figures)]
    trainer = bare_trainer(
        accelerator=device.type, devices=1, strategy=strategy, max_steps=1, logger=False, callbacks=callbacks
    )
    factory = optimizer_factory(config.optimizer, model, config.precision.name)
    objective = CausalLMObjective.from_config(config, model, factory, lambda _: 1.0)
    trainer.fit(objective, ListedStepBatches([batch]))
    return {**figures, "parts": strategy.memory_parts()}


def _phase_callback(strategy: EngineStrategy, watch: PhaseWatch, figures: dict[str, Any]) -> Callback:
    """Return a callback that begins the phases of the step and writes their bytes into ``figures``."""
    import pytorch_lightning as pl

    from mgpu_pipe.training.tracing.phase_memory import FORWARD, UPDATE

    class Phases(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            figures["built"] = watch.live
            make_state(strategy.optimizers[0])

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            watch.begin(FORWARD)
            watch.collectives.counts = True

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            watch.collectives.counts = False
            figures.update(kept=watch.live, peaks=dict(watch.peaks), born=dict(watch.born))

    reduce: Callable[..., Any] = strategy.reduce_gradients

    def begin_update(*args: Any) -> Any:
        watch.phase = UPDATE
        return reduce(*args)

    strategy.reduce_gradients = begin_update  # type: ignore[method-assign, assignment]
    return Phases()


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state by an update of no gradients."""
    import torch

    from mgpu_pipe.optim.moving_average import on_local_shards

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with on_local_shards(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _fill_by(empty: Callable[..., torch.Tensor]) -> Callable[[Any, torch.device], None]:
    """Return a function that gives a model parameters of no values, and computes its few buffers."""
    from mgpu_pipe.models.build import materialise_buffers, recipe_of
    from mgpu_pipe.models.local_shards import fill_parameters

    def fill(model: Any, device: torch.device) -> None:
        fill_parameters(model, lambda name, part: empty(part.shape), device)
        materialise_buffers(model, recipe_of(model), device)

    return fill


def main() -> int:
    rank, ranks, *words = sys.argv[1:]
    composition = compose_one(parse(words))
    if device_type(composition.config.trainer) == "cuda":
        load_fake_cuda()
    print_text(json.dumps(trace(composition.config, int(rank), int(ranks))))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MgpuError as error:
        print_error(error)
        sys.exit(error.exit_code)
