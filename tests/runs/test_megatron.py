"""Whole runs of cut models, as a user starts them. Oracle: the run of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runs.support import overrides, same
from tests.support.command import column, mgpu, run_folder
from tests.support.needs import need_torch_compile
from tests.support.sampling import one_in

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "strategy",
    [
        ("strategy=megatron", "strategy.tp=2", "strategy.pp=2", "trainer.devices=4"),
        pytest.param(
            ("strategy=megatron", "strategy.tp=2", "strategy.pp=2", "trainer.devices=8"), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            (
                "strategy=megatron",
                "strategy.cp=2",
                "strategy.tp=2",
                "strategy.sequence_parallel=true",
                "trainer.devices=4",
            ),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("strategy=pp", "trainer.devices=2", "strategy.pipeline.schedule=zbv"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_cut_run_is_the_run_of_one_process(
    cache: Path, corpus: Path, tmp_path: Path, alone: Path, strategy: tuple[str, ...]
) -> None:
    folder = run_folder(mgpu(cache, tmp_path, *overrides(corpus, *strategy)))
    same(folder, alone)
    summary, single = (json.loads((path / "summary.json").read_text()) for path in (folder, alone))
    assert summary["samples"] == single["samples"]
    assert all(0 < value < single["memory"]["activations_gib"][0] for value in summary["memory"]["activations_gib"])


def test_an_expert_parallel_run_is_the_run_of_one_process_and_counts_tokens(
    cache: Path, corpus: Path, tmp_path: Path
) -> None:
    words = [
        *overrides(corpus)[1:],
        "model=mixtral_tiny",
        "objective.router_aux_loss=0.01",
        "trainer.max_steps=4",
        "trainer.val_every_n_steps=2",
    ]
    ways = ("strategy=single",), ("strategy=ep", "trainer.devices=2")
    whole, cut = (run_folder(mgpu(cache, tmp_path, *words, *way)) for way in ways)
    same(cut, whole)
    config = json.loads((cut / "summary.json").read_text())
    assert config["topology"]["ep"] == 2
    for folder in (whole, cut):
        dropped, counts = (
            column(folder, "experts/dropped_tokens"),
            [column(folder, f"experts/tokens_{expert}") for expert in range(8)],
        )
        # Every token of 24 samples of 64, to two experts in each of four layers.
        for step in range(1, 5):
            assert dropped[step] == 0 and sum(found[step] for found in counts) == 24 * 64 * 2 * 4


@pytest.mark.exhaustive
def test_a_run_moves_from_strategy_to_strategy(cache: Path, corpus: Path, tmp_path: Path, alone: Path) -> None:
    """ZeRO-3 on four processes, then tensor and pipeline parallelism, then FSDP2 on three, then one process."""
    ways = [
        ("strategy=zero3", "trainer.devices=4"),
        ("strategy=megatron", "strategy.tp=2", "strategy.pp=2", "trainer.devices=4"),
        ("strategy=fsdp", "trainer.devices=3"),
        ("strategy=single",),
    ]
    folder = None
    for number, way in enumerate(ways, 1):
        more = (f"trainer.max_steps={5 * number}", "scheduler.total_steps=20", *way)
        resume = () if folder is None else (f"checkpoint.resume={folder}",)
        folder = run_folder(mgpu(cache, tmp_path, *overrides(corpus, *more, *resume)))
        same(folder, alone, first=5 * number - 4) if number == len(ways) else None


def test_check_shows_the_pipeline(cache: Path, tmp_path: Path) -> None:
    said = mgpu(cache, tmp_path, "check", "strategy=pp", "trainer.devices=4", "model=llama_tiny")
    assert "rank 3" in said and "bubble" in said and "norm and head" in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    one_in(
        2,
        [
            (("strategy=tp", "trainer.devices=3"), "strategy.tp=3: "),
            (("strategy=pp", "trainer.devices=8"), "strategy.pp=8: 1f1b cuts 4 layers into 8 stages"),
            (("strategy=cp", "trainer.devices=2", "data.seq_len=66"), "data.seq_len=66: not a multiple of"),
            (
                ("strategy=cp", "strategy.context.method=ulysses", "trainer.devices=16"),
                "strategy.cp=16: ulysses shares",
            ),
            (("strategy=ep", "trainer.devices=2"), "strategy.ep="),
            (
                ("strategy=tp", "trainer.devices=2", "strategy.sequence_parallel=true", "data.seq_len=65"),
                "data.seq_len=65",
            ),
            (("strategy=single", "strategy.sequence_parallel=true"), "strategy.sequence_parallel=true: it splits"),
            (("strategy=pp", "trainer.devices=2", "data.micro_batch_size=32"), "does not take 1 micro-batch"),
            (("strategy=pp", "trainer.devices=2", "strategy.pipeline.schedule=1fb1"), "did you mean 1f1b?"),
            (
                ("strategy=pp", "strategy.pipeline.schedule=zbv", "trainer.devices=2", "model.compile=true"),
                "model.compile=true: zbv computes gradients of inputs and weights apart",
            ),
            (("strategy=zero3", "strategy.tp=2", "trainer.devices=2"), "strategy.tp=2: strategy.engine=deepspeed"),
            (("objective.router_aux_loss=0.1",), "objective.router_aux_loss=0.1: the llama family has no routers"),
            (("strategy=megatron", "strategy.tp=3", "trainer.devices=4"), "4 processes are not divisible by tp=3"),
        ],
    ),
)
def test_what_does_not_fit_is_refused_before_launch(
    cache: Path, tmp_path: Path, wrong: tuple[str, ...], message: str
) -> None:
    if "model.compile=true" in wrong:  # what the machine lacks would be said first
        need_torch_compile()
    said = mgpu(cache, tmp_path, "model=llama_tiny", *wrong, code=2)
    assert message in said
    assert "Traceback" not in said
