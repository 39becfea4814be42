"""The teacher of a distillation: what it holds of its weights, and that it may be a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.objectives.distill import Teacher
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.packed_text import random_packed_text
from tests.objectives.test_distill import DISTILL, FSDP, small_data, trained, with_teacher
from tests.support.processes import run_processes
from tests.support.sampling import one_in


def teacher_of(config: RunConfig) -> Teacher:
    assert isinstance(config.objective, DistillConfig)
    return Teacher(config, config.objective)


def some_rows() -> dict[str, torch.Tensor]:
    return random_packed_text(torch.Generator().manual_seed(3), 0, 2, 32, 384)


def held(folder: str, strategy: list[str]) -> dict[str, Any]:
    """What a process holds of the teacher, and how far it is off one process."""
    teacher, batch = teacher_of(small_data(Path(folder), *strategy)), some_rows()
    if teacher._hidden is None:
        return {"parameters": 0}
    model = teacher._hidden.model
    with teacher.teach(batch) as teaching:
        logits = torch.nn.functional.linear(teaching.hidden, teaching.weight)
        gathered = sum(not isinstance(weights, DTensor) for weights in model.parameters())
    whole = teacher.unsharded
    from mgpu_pipe.objectives.packed_text import forward_kwargs

    with torch.no_grad():
        expected = whole(**forward_kwargs(whole, batch)).logits
    parts = [w.to_local() if isinstance(w, DTensor) else w for w in model.parameters()]
    return {
        "error": float((logits - expected).norm() / expected.norm()),
        "share": sum(part.numel() for part in parts) / sum(weights.numel() for weights in whole.parameters()),
        "gathered": gathered,
        "of": len(parts),
        "trained": sum(part.requires_grad for part in parts),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "shares"),
    one_in(
        2, [(["strategy=ddp", FSDP], [0.5, 0.5]), (["strategy=ddp"], [1.0, 1.0]), (["strategy=pp", FSDP], [None, 1.0])]
    ),
)
def test_it_lies_where_it_is_said(strategy: list[str], shares: list[float | None], tmp_path: Path) -> None:
    with_teacher(tmp_path)
    ranks = run_processes(2, held, str(tmp_path), [*strategy, "trainer.devices=2"])
    assert [rank.get("share") for rank in ranks] == shares
    for rank in ranks[shares.index(shares[-1]) :]:
        assert rank["error"] < 1e-6 and rank["trained"] == 0
        # Of blocks nothing stays gathered, of the rest what the loss needs: embedding's and head's, last norm's.
        assert rank["gathered"] <= 3 if shares[-1] == 0.5 else rank["gathered"] == rank["of"]


@pytest.mark.slow
def test_ranks_with_fewer_held_out_samples_gather_as_often(tmp_path: Path) -> None:
    with_teacher(tmp_path)
    sizes = ["data.validation_max_samples=3", "data.micro_batch_size=1", "trainer.max_steps=1"]
    found = []
    for name in ("ddp", "zero1"):
        overrides = [*sizes, f"strategy={name}", FSDP, "trainer.devices=2"]
        found.append(run_processes(2, validated, str(tmp_path), str(tmp_path / name), overrides)[0])
    expected = run_processes(1, validated, str(tmp_path), str(tmp_path / "one"), [*sizes, "strategy=single"])[0]
    for metrics in found:
        assert metrics == pytest.approx(expected, rel=1e-5)


def validated(folder: str, run: str, overrides: list[str]) -> dict[str, float]:
    from mgpu_pipe.training.train import train

    config, paths = small_data(Path(folder), *overrides), RunPaths(Path(run))
    paths.root.mkdir(exist_ok=True)
    if torch.distributed.get_rank() == 0:
        freeze(config, paths.config)
    torch.distributed.barrier()
    metrics = train(config, paths, prepare(config)).summary["metrics"]
    return {key: metrics[key] for key in ("val/loss", "val/divergence", "val/perplexity")}


@pytest.mark.slow
def test_a_run_teaches_as_its_export_does(tmp_path: Path) -> None:
    config = with_teacher(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    freeze(config, RunPaths(run).config)
    run_processes(1, trained, str(tmp_path), ["strategy=single", "trainer.max_steps=1"])
    taught = small_data(tmp_path, f"objective.teacher={run}")
    preflight(taught)
    ids = some_rows()["input_ids"]
    with torch.no_grad():
        expected = load_run(run).model(input_ids=ids).logits
        assert torch.equal(teacher_of(taught).unsharded(input_ids=ids).logits, expected)
    with pytest.raises(ConfigErrors, match="its vocabulary has 384 tokens, the student's 400"):
        preflight(small_data(tmp_path, f"objective.teacher={run}", "model.config.vocab_size=400"))


@pytest.mark.slow
def test_a_run_of_adapters_is_no_teacher(tmp_path: Path) -> None:
    config = with_teacher(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    freeze(config, RunPaths(run).config)
    run_processes(1, trained, str(tmp_path), ["strategy=single", "trainer.max_steps=1", "peft=lora"])
    with pytest.raises(BadInputError, match="the run trained adapters; give what mgpu-pipe export"):
        teacher_of(small_data(tmp_path, f"objective.teacher={run}"))


def test_the_run_that_is_started_from_has_to_be_named() -> None:
    config, _ = compose([*DISTILL, "objective.teacher=starts_from"])
    with pytest.raises(ConfigErrors, match=r"name the teacher's experiment by run\.starts_from, or give a folder"):
        preflight(config)
    preflight(replace(config, run=replace(config.run, starts_from="quickstart")))
