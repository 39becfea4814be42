"""When blocks are compiled without being asked for it, and that they are compiled whole. Oracle: one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from mgpu_pipe.config.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.parallel import compile as compilation
from mgpu_pipe.verify.bounds import Worst, worst_of
from mgpu_pipe.verify.comparison import compare
from tests.support.processes import run_processes
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
    assert compilation.compiles(config, device, parameters) is expected


def test_without_a_compiler_auto_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "gpu_kernels_compile", lambda: False)
    config, _ = compose([])
    assert compilation.compiles(config, GPU, 200_000_000) is False


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
