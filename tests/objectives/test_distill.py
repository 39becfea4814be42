"""Distillation and its teacher. Oracles: autograd on the definitions; a loop by hand over whole logits of transformers'
own models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.order import GlobalOrder
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.inference.open import load_run
from mgpu_pipe.models.build import build_meta, materialise, run_model
from mgpu_pipe.objectives.distill import Teacher
from mgpu_pipe.objectives.distill_keys import DistillConfig
from mgpu_pipe.objectives.losses.chunked_head import ChunkedHead
from mgpu_pipe.objectives.losses.divergence import Teaching, linear_distillation, token_divergences
from mgpu_pipe.objectives.packed_text import forward_kwargs, random_packed_text
from tests.support.processes import run_processes
from tests.support.sampling import one_in

DISTILL = ("objective=distill", "model=llama_tiny", "logger=none", "trainer.progress=off")
FSDP = "objective.teacher_strategy=fsdp"
KINDS = ("forward", "reverse", "jensen_shannon")


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float) -> torch.Tensor:
    p, q = (teacher / temperature).softmax(-1), (student / temperature).softmax(-1)
    middle = (p + q) / 2

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * (one / other).log()).sum(-1)

    found = {"forward": kl(p, q), "reverse": kl(q, p), "jensen_shannon": (kl(p, middle) + kl(q, middle)) / 2}
    return found[kind] * temperature**2


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_and_its_gradient_are_those_of_its_definition(kind: str) -> None:
    student = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, 11, dtype=torch.float64)
    expected = plain_divergence(student, teacher, kind, 2.5)
    (gradient,) = torch.autograd.grad(expected.sum(), student)
    found, given = token_divergences(student.detach(), teacher, kind, 2.5)
    assert torch.allclose(found, expected.detach(), rtol=1e-12) and torch.allclose(given, gradient, rtol=1e-10)
    assert float(token_divergences(teacher, teacher, kind, 2.5)[0].abs().max()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_are_the_whole(kind: str, bias: bool) -> None:
    keys = DistillConfig(divergence=kind, temperature=1.5, teacher_weight=0.7)  # type: ignore[arg-type]
    hidden, weight = torch.randn(2, 7, 6, requires_grad=True), torch.randn(13, 6, requires_grad=True)
    offset = torch.randn(13, requires_grad=True) if bias else None
    taught, head = torch.randn(2, 7, 9), torch.randn(13, 9)
    labels = torch.randint(0, 13, (2, 7))
    labels[0, :3] = IGNORE_INDEX
    teaching = Teaching(keys, taught, head, None)
    loss = linear_distillation(ChunkedHead(hidden, weight, offset, labels, 4), teaching)
    inputs = [value for value in (hidden, weight, offset) if value is not None]
    found = torch.autograd.grad(loss, inputs)
    logits, counts = F.linear(hidden, weight, offset), labels != IGNORE_INDEX
    divergence = plain_divergence(logits, F.linear(taught, head), kind, 1.5)[counts].sum()
    of_labels = F.cross_entropy(logits[counts], labels[counts], reduction="sum")
    expected = 0.3 * of_labels + 0.7 * divergence
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert teaching.sums is not None
    assert teaching.sums.tolist() == pytest.approx([float(of_labels.detach()), float(divergence.detach())], rel=1e-5)
    for one, other in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def small_data(folder: Path, *overrides: str) -> RunConfig:
    shape = ("data.seq_len=32", "data.global_batch_size=4", "data=jsonl", "model.config.vocab_size=384")
    files = (
        f"data.paths=[{folder / 'texts.jsonl'}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.validation_fraction=0.2",
    )
    steps = ("trainer.max_steps=3", "optimizer.lr=3e-4", "scheduler=constant", "trainer.log_every_n_steps=1")
    teacher = f"objective.teacher={folder / 'teacher'}"
    return compose([*DISTILL, *shape, *files, *steps, teacher, *overrides])[0]


def with_teacher(folder: Path, **changes: Any) -> RunConfig:
    """A configuration whose teacher is a wider model with the student's tokenizer, in ``folder``."""
    rows = [{"text": f"The number {number} is behind {number - 1}."} for number in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = small_data(folder)
    fields = {**config.model.config, "hidden_size": 96, "num_hidden_layers": 2, **changes}
    teacher = compose(["model=llama_tiny"])[0].model
    teacher.config = fields
    materialise(build_meta(teacher), 77, "cpu").save_pretrained(folder / "teacher")
    for file in prepare(config).tokenizer_folder.glob("*.json"):  # type: ignore[union-attr]
        if file.name.startswith(("tokenizer", "special")):
            shutil.copy(file, folder / "teacher")
    return config


def trained(folder: str, overrides: list[str]) -> dict[str, Any]:
    from mgpu_pipe.training.train import train

    config = small_data(Path(folder), *overrides)
    paths = RunPaths(Path(folder) / "run")
    return train(config, paths, prepare(config)).summary["metrics"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_run_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = with_teacher(tmp_path)
    (tmp_path / "run").mkdir()
    freeze(config, RunPaths(tmp_path / "run").config)
    given = ["strategy=fsdp", "trainer.devices=2", "objective.temperature=2", "objective.teacher_weight=0.4"]
    found = run_processes(2, trained, str(tmp_path), given)[0]
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    model, prepared, keys = materialise(run_model(config), config.seed, "cpu"), prepare(config), config.optimizer
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() > 1) == decays],
            "weight_decay": keys.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=keys.lr, **keys.options)
    samples = prepared.open(config, "train")
    order, size, losses = GlobalOrder(config.seed, len(samples)), config.data.global_batch_size, []
    for step in range(3):
        indices = order.indices(step * size, size)
        batch = samples.batch(indices, indices)
        counts = batch["labels"] != IGNORE_INDEX
        logits = model(**forward_kwargs(model, batch)).logits[counts]
        with torch.no_grad():
            taught = teacher(**forward_kwargs(teacher, batch)).logits[counts]
        divergence = plain_divergence(logits, taught, "forward", 2.0).sum()
        loss = (
            0.6 * F.cross_entropy(logits, batch["labels"][counts], reduction="sum") + 0.4 * divergence
        ) / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.gradient_clip_val or 1e9)
        optimizer.step()
        losses.append(float(loss.detach()))
    rows = (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    at = rows[0].split(",").index("train/loss")
    assert [float(row.split(",")[at]) for row in rows[1:]] == pytest.approx(losses, rel=1e-5)
    assert 0 < found["val/divergence"] < found["val/loss"] and found["val/perplexity"] > 1


@pytest.mark.slow
def test_a_teacher_of_another_tokenizer_or_with_changed_logits_is_refused(tmp_path: Path) -> None:
    from mgpu_pipe.launch.resume import announce_resume
    from mgpu_pipe.objectives.distill import Teacher

    config = with_teacher(tmp_path)
    prepared, paths = prepare(config), RunPaths(tmp_path / "run")
    announce_resume(config, prepared, paths, None)
    file = tmp_path / "teacher" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BadInputError, match="its tokenizer gives other ids"):
        announce_resume(config, prepared, paths, None)
    source = compose(["model=llama_tiny", "model.type=granite", "+model.config.logits_scaling=4.0"])[0].model
    source.config = {**source.config, "vocab_size": 384}
    materialise(build_meta(source), 3, "cpu").save_pretrained(tmp_path / "teacher")
    with pytest.raises(BadInputError, match="changes its logits after the head"):
        Teacher(config, config.objective)  # type: ignore[arg-type]


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
    whole = teacher.whole_model
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
        assert torch.equal(teacher_of(taught).whole_model(input_ids=ids).logits, expected)
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
