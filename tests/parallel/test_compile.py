"""When blocks are compiled without being asked for it, and that they are compiled whole. Oracle: one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.kernels import packed_attention
from mgpu_pipe.objectives.packed_text import forward_kwargs
from mgpu_pipe.parallel import compile as compilation
from mgpu_pipe.parallel.checkpointing import Mode, apply_activation_checkpointing
from mgpu_pipe.parallel.expert.experts import ExpertLoad
from mgpu_pipe.system.compat.torch_private import operator
from mgpu_pipe.verify.certificate import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.support.experts import batch_of, loss_sum, whole_model
from tests.support.processes import run_processes
from tests.support.tiny import MODELS, SEQ_LEN, VOCABULARY
from tests.verify.support import small_run

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("overrides", "device", "parameters", "expected"),
    [
        ((), GPU, 200_000_000, True),
        ((), GPU, 99_000_000, False),
        ((), CPU, 200_000_000, False),
        (("model.compile=false",), GPU, 200_000_000, False),
        (("model.compile=true",), CPU, 1000, True),
        (("precision=fp8",), GPU, 1000, True),
        (("strategy=zero3",), GPU, 200_000_000, False),
        (("strategy=zero2",), GPU, 200_000_000, True),
        (("strategy=pp", "strategy.pipeline.schedule=zbv"), GPU, 200_000_000, False),
        (("strategy=pp",), GPU, 200_000_000, True),
    ],
)
def test_auto_compiles_large_models_on_gpus(
    overrides: tuple[str, ...], device: torch.device, parameters: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "gpu_kernels_compile", lambda: True)
    config, _ = compose(list(overrides))
    assert compilation.compiles(config.model, config.strategy, config.precision, device, parameters) is expected


def test_without_a_compiler_auto_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "gpu_kernels_compile", lambda: False)
    config, _ = compose([])
    assert compilation.compiles(config.model, config.strategy, config.precision, GPU, 200_000_000) is False


def traced(config: RunConfig) -> tuple[list[Worst], list[str], int, dict[str, int]]:
    """Errors over one process, reasons of graph breaks, graphs, and calls of operators. The compiler takes the graphs,
    both ways, and leaves their operators as they are."""
    from torch._dynamo.utils import counters
    from torch.profiler import ProfilerActivity, profile

    counters.clear()
    plain: Any = torch.compile
    torch.compile = partial(plain, backend="aot_eager_decomp_partition")
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            worst = worst_of(compare(config))
    finally:
        torch.compile = plain
    calls = {one.key: one.count for one in profiled.key_averages()}
    return worst, list(counters["graph_break"]), counters["stats"]["unique_graphs"], calls


def of_equal_documents(length: int, row: int) -> torch.Tensor:
    """Positions of two rows of ``row`` tokens."""
    return torch.arange(length).repeat(2, row // length)


@pytest.mark.slow
@pytest.mark.parametrize("flash", [False, True], ids=["mask", "flash"])
def test_documents_of_any_length_need_no_further_compilation(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many, long and short. On the CPU the flash kernel itself is left out: its sizes are what is compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(0)
    model: Any = build_meta(MODELS["llama"]).to_empty(device="cpu")
    model.init_weights()
    assert packed_attention.use_packed_attention(model)
    counting = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(packed_attention, "_flash_computes", lambda *_: flash)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    torch.compiler.reset()
    compilation.compile_blocks(model)
    longest = []

    def flash_forward(query: torch.Tensor, *others: Any, **_: Any) -> tuple[torch.Tensor, ...]:
        longest.append(others[4])
        assert int(others[2].diff().max()) <= others[4] < 2048 + 512
        return query.clone(), query.new_empty(query.shape[1], len(query)), *(query.new_empty(0) for _ in range(3))

    library = torch.library.Library("aten", "IMPL")
    try:
        if flash:
            library.impl(operator("_flash_attention_forward").default, flash_forward, "CPU")
        for length in (16, 2048, 64, 512, 256, 1024, 128) if flash else (16, 512, 64, 256, 128):
            positions = of_equal_documents(length, 2048 if flash else 512)
            inputs = torch.randint(VOCABULARY, positions.shape)
            given = {"input_ids": inputs, "position_ids": positions}
            with torch.set_grad_enabled(not flash):
                logits = model(**forward_kwargs(model, given)).logits
                if not flash:
                    logits.sum().backward()
    finally:
        library._destroy()
        torch.compiler.reset()
    assert counting.frame_count == 1
    assert len(set(longest)) == (3 if flash else 0)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["full", "selective", pytest.param("none", marks=pytest.mark.exhaustive)])
def test_compiled_experts_count_their_tokens_once(checkpointing: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model = whole_model("mixtral")
    load = ExpertLoad(model)
    apply_activation_checkpointing(model, checkpointing)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition", fullgraph=True))
    compilation.compile_blocks(model)
    loss_sum(model, batch_of(4)).backward()
    assignments = load.take().assignments
    torch.compiler.reset()
    assert [sum(layer) for layer in assignments] == [4 * SEQ_LEN * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("strategy.sequence_parallel=true",), pytest.param((), marks=pytest.mark.exhaustive)])
def test_a_block_is_one_graph_and_gathers_no_more_than_an_eager_one(axes: tuple[str, ...]) -> None:
    """The inputs of attention and of the feed-forward network, in the backward pass, once for all their layers."""
    given = ("model=llama_tiny", "strategy=tp", "trainer.devices=2", "data.micro_batch_size=4", *axes)
    gathered = []
    for compiled in ("true", "false"):
        for worst, breaks, graphs, calls in run_processes(2, traced, small_run(f"model.compile={compiled}", *given)):
            assert [one for one in worst if not one.passed] == []
            assert (breaks, graphs) == ([], compiled == "true")
            assert ("mgpu_pipe::gather_again" in calls) == (compiled == "true" and bool(axes))
            gathered.append(calls["gloo:all_gather"])
    assert len(set(gathered)) == 1


ALIKE = pytest.mark.exhaustive
"""For a cell of a kind of which another is tried."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "overrides", "attention"),
    [
        (2, "model=llama_tiny strategy=cp strategy.activation_checkpointing=selective", "ring"),
        pytest.param(2, "model=llama_tiny strategy=cp", "ring", marks=ALIKE),
        pytest.param(2, "model=llama_tiny strategy=cp strategy.context.method=ulysses", "ulysses", marks=ALIKE),
        pytest.param(1, "model=mixtral_tiny", None, marks=ALIKE),
        pytest.param(2, "model=mixtral_tiny strategy=tp strategy.sequence_parallel=true", None, marks=ALIKE),
        pytest.param(4, "strategy=megatron strategy.tp=2 model.attn_implementation=eager", None, marks=ALIKE),
    ],
)
def test_a_block_is_one_graph_along_every_axis(processes: int, overrides: str, attention: str | None) -> None:
    """Attention over other ranks is computed once, also where the cheap rest of a block is computed again."""
    config = small_run("model.compile=true", f"trainer.devices={processes}", *overrides.split())
    for worst, breaks, graphs, calls in run_processes(processes, traced, config):
        assert [one for one in worst if not one.passed] == []
        assert (breaks, graphs) == ([], 1)
        if attention is not None:
            once = calls[f"mgpu_pipe::{attention}_backward"]
            assert once <= calls[f"mgpu_pipe::{attention}_forward"] < 2 * once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "axes"),
    [
        (2, "strategy=ep strategy.activation_checkpointing=full"),
        pytest.param(2, "strategy=ep", marks=ALIKE),
        pytest.param(
            4,
            "strategy=cp strategy.cp=2 strategy.dp_shard=2 strategy.ep=2 strategy.activation_checkpointing=full",
            marks=ALIKE,
        ),
    ],
)
def test_only_the_exchange_of_experts_divides_a_block(processes: int, axes: str) -> None:
    """How many rows come to a rank is known when it runs only, and FSDP gathers the experts in between. What is
    recomputed then knows its sequences."""
    given = ("model.compile=true", "model=mixtral_tiny", f"trainer.devices={processes}")
    for worst, breaks, _, _ in run_processes(processes, traced, small_run(*given, *axes.split())):
        assert [one for one in worst if not one.passed] == []
        assert len(breaks) == 1
