"""A rank traced on fake tensors, beside the same steps on real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from benchmarks.gpu.cuda_step import CASES
from benchmarks.gpu.one_rank import overrides_of
from benchmarks.new_process import call_in_new_process
from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.errors import EXIT_BAD_INPUT, EXIT_OK
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.training.tracing.trace_rank import trace
from tests.strategies.test_cuda_audit import needs_fake_gpu
from tests.support.command import REPOSITORY

LAYOUTS = (
    *("single", "fsdp8", "hsdp2x4", "tp4 x dp2, sequence", "cp8, ring", "pp2 x dp4, first", "pp2 x dp4, last"),
    "pp2 x tp2 x cp2, last",
)
SAMPLED = ("fsdp8", "pp2 x tp2 x cp2, last")
"""Of pipelines the last stage: it has everything that the first has, and the loss."""


def traced(words: tuple[str, ...], rank: int, ranks: int, on_fakes: bool) -> dict[str, Any]:
    # What other ranks would send is memory that nobody wrote: with scales of four-bit weights, no finite loss.
    with mock.patch("mgpu_pipe.training.step.check_finite"):
        return trace(compose([*words])[0], rank, ranks, on_fakes)


def compare(name: str, *more: str) -> dict[str, Any]:
    """A layout's trace, which equals that on real tensors."""
    case = CASES[name]
    words = (*overrides_of(case, False), "trainer.accelerator=cpu", *more)
    real, fake = (call_in_new_process(traced, words, case.rank, case.ranks, on_fakes) for on_fakes in (False, True))
    assert fake == real
    return fake


@pytest.mark.parametrize("name", SAMPLED)
def test_live_bytes_and_collectives_are_those_of_real_tensors(name: str) -> None:
    found = compare(name)
    assert found["peaks"]["backward"] > found["kept"] > found["built"] > 0
    assert found["parts"]["optimizer"] > found["parts"]["weights"] > 0
    assert found["collectives"]["allgather_base"][1] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in SAMPLED])
def test_live_bytes_of_every_layout_are_those_of_real_tensors(name: str) -> None:
    compare(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "more",
    [("strategy.activation_checkpointing=full",), ("strategy.activation_checkpointing=selective",), ("peft=qlora",)],
)
def test_live_bytes_of_recomputed_and_quantised_blocks_are_those_of_real_tensors(more: tuple[str, ...]) -> None:
    compare("fsdp8", *more)


SMALL = ["model=llama_tiny", "data.seq_len=64", "data.global_batch_size=16", "data.micro_batch_size=2"]
WORLD = ["trainer.devices=4", "strategy=megatron", "strategy.tp=2"]
ON_H100 = ["plan.hardware=h100", "precision=bf16", "--trace"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*WORLD, "plan.gpus=4,8"], "plan.gpus=[4, 8]: --trace runs one layout; give one of them"),
        ([*WORLD, "strategy.dp_shard=4"], "trainer.devices=4: strategy=megatron makes a world"),
        (["strategy=fsdp", "trainer.devices=2", "objective=dpo"], "objective.name=dpo: --trace does not know it"),
        (["strategy=zero2", "trainer.devices=2"], "strategy.engine=deepspeed: --trace does not know it"),
        (["strategy=fsdp", "trainer.devices=2", "strategy.offload=cpu"], "strategy.offload=cpu: --trace"),
        ([*WORLD, "--html", "plan.html"], "--html: the page shows the whole plan; leave --trace out"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SMALL, *words, *ON_H100]) == EXIT_BAD_INPUT
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


@needs_fake_gpu
@pytest.mark.slow
def test_a_typed_layout_is_traced_and_stands_beside_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *WORLD, *ON_H100, "--json"]) == EXIT_OK
    printed = json.loads(capsys.readouterr().out)
    [trace] = printed["traces"]
    assert "strategy.tp=2" in printed["overrides"] and "trainer.accelerator=cuda" in printed["overrides"]
    assert printed["formulas"]["terms"]["weights"] == pytest.approx(trace["parts"]["weights"], rel=1e-3)
    assert printed["formulas"]["tensors"] == pytest.approx(max(trace["peaks"].values()), rel=0.1)


LARGE = ("model=llama3_70b", "data.seq_len=4096", "trainer.devices=8")


@needs_fake_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("strategy=megatron", "strategy.tp=8", "strategy.pp=4", "strategy.dp_shard=2", "trainer.num_nodes=8"), 0.02),
        (("strategy=fsdp", "peft=qlora", "strategy.activation_checkpointing=full"), 0.02),
    ],
    ids=["megatron", "qlora"],
)
def test_the_formulas_are_near_a_trace_of_70b(words: tuple[str, ...], error: float) -> None:
    whole = (*LARGE, *words)
    batch = ("data.global_batch_size=64",)
    ranks = 8 if "peft=qlora" in words else 64
    found = traced_on_a_gpu(0, ranks, *whole, batch=batch)
    plan = memory_by_rank(compose([*whole, *GPU, *batch, "model.compile=false"])[0])
    assert plan is not None
    assert plan.tensor_bytes == pytest.approx(max(found["peaks"].values()), rel=error)


GPU = ("trainer.accelerator=cuda", "precision=bf16", "data.micro_batch_size=1")
BATCH = ("data.global_batch_size=8",)


def traced_on_a_gpu(rank: int, ranks: int, *words: str, batch: tuple[str, ...] = BATCH) -> dict[str, Any]:
    tracer = ("-m", "mgpu_pipe.training.tracing.trace_rank")
    command = [sys.executable, *tracer, str(rank), str(ranks), *words, *GPU, *batch]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.exhaustive
@needs_fake_gpu
def test_rows_of_unlike_documents_pass_a_pipeline_on_gpus() -> None:
    words = ("model=llama_tiny", "strategy=megatron", "strategy.pp=2", "trainer.devices=2", "data.seq_len=1024")
    found = traced_on_a_gpu(0, 2, *words)
    assert found["micro_batches"] == 3 and found["of_micro_batches"] == 8
    assert found["collectives"]["send"][0] > 0
