"""What the tests of several objectives share: small runs on answers, cuts of a batch, gradients of an oracle,
and what a run's folder is good for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import printable
from mgpu_pipe.objectives.sample_group import SingleProcess
from tests.support import small_runs

Batch = dict[str, torch.Tensor]
LARGEST: dict[str, float] = {}
"""Largest differences between a model and its oracle since the last ``clear``: of a ``loss``, relative; of the
``gradient`` of a parameter, over the norm of all gradients; of a ``figure``, absolute.
``benchmarks.accuracy.encoder_parity`` shows them."""
PAIRS = [
    {
        "prompt": f"What is {number} and {number}?",
        "chosen": f"It is {2 * number}, my friend.",
        "rejected": f"{2 * number}" + "!" * (number % 4),
    }
    for number in range(24)
]


def file_of(folder: Path, rows: list[Any]) -> str:
    """The override that names a file of ``rows``."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data.paths=[{folder / 'pairs.jsonl'}]"


def answers_config(objective: str, folder: Path, *overrides: str, rows: list[Any] = PAIRS) -> RunConfig:
    """A small run on the preferences ``rows``, whose data is cached in ``folder``."""
    words = (f"objective={objective}", "data=preferences_jsonl", "model=llama_tiny", "logger=none")
    shape = ("data.seq_len=96", "data.global_batch_size=4", "data.validation_fraction=0.25")
    steps = ("trainer.max_steps=4", "optimizer.lr=3e-4", "scheduler=constant", "trainer.progress=off")
    text = ("model.config.vocab_size=384", "data.chat_template=chatml")
    paths = (file_of(folder, rows), f"data.cache_dir={folder / 'cache'}")
    return compose([*words, *shape, *steps, *text, *paths, *overrides])[0]


def cut(batch: Batch, *sizes: int) -> list[Batch]:
    """Micro-batches of these numbers of rows; of one number, as many as there are."""
    parts = zip(*(value.split(sizes if len(sizes) > 1 else sizes[0]) for value in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def step_loss(objective: Any, batches: list[Batch], denominator: int = 1) -> torch.Tensor:
    """Loss of a step of these micro-batches, a sum over ``denominator``; backpropagated."""
    if hasattr(objective, "gather_features"):
        objective.gather_features(batches, len(batches), SingleProcess())
    loss = torch.stack([objective.micro_batch_loss(batch) / denominator for batch in batches]).sum()
    loss.backward()
    return loss.detach()


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of the gradients by the parameters' names, without those of modules around the model."""
    return {
        name.rpartition("model.")[2]: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def record(quantity: str, difference: float) -> None:
    LARGEST[quantity] = max(difference, LARGEST.get(quantity, 0.0))


def check_loss(found: torch.Tensor | float, expected: torch.Tensor, bound: float) -> None:
    """The loss differs from the oracle's by at most ``bound`` times the latter."""
    wanted = float(expected.detach())
    difference = abs(float(found) - wanted) / abs(wanted)
    record("loss", difference)
    assert difference <= bound, f"loss {float(found)}, the oracle's {wanted}"


def check_figures(found: Sequence[float], expected: Sequence[float], bound: float) -> None:
    """Metrics differ from the oracle's by at most ``bound``."""
    difference = max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True))
    record("figure", difference)
    assert difference <= bound, f"{found}, the oracle's {expected}"


def check_gradients(
    model: torch.nn.Module, wanted: Mapping[str, torch.Tensor | None], each: float, whole: float
) -> None:
    """Each gradient's error is at most ``each`` times its norm and ``whole`` times that of all gradients together."""
    total = float(torch.stack([gradient.norm() for gradient in wanted.values() if gradient is not None]).norm())
    found = gradients_of(model)
    for name, gradient in wanted.items():
        ours = found[name]
        if gradient is None:
            assert ours is None or float(ours.norm()) <= whole * total, name
        else:
            assert ours is not None, name
            difference = float((ours - gradient).norm())
            record("gradient", difference / total)
            assert difference <= each * float(gradient.norm()) + whole * total, name


def check_alone(objective: Any, plain: Any) -> None:
    """Loss and gradients of a batch, however it is cut, are those of its samples alone, whatever the generators' state.

    Args:
        plain: transformers' model, with the weights of the objective's.
    """
    batch = objective.random_batch(3, 2, 5, 0, packed=False)
    assert batch["labels"][-1].eq(-100).all()
    losses = []
    for seed, size in ((1, 5), (2, 2)):
        torch.manual_seed(seed)
        np.random.seed(seed)
        objective.model.zero_grad()
        losses.append(float(step_loss(objective, cut(batch, size))))
    reference = objective.reference_loss(lambda **inputs: plain(**inputs), plain, batch).loss_sum
    reference.backward()
    for loss in losses:
        check_loss(loss, reference, 1e-6)
    check_gradients(objective.model, gradients_of(plain), each=1e-5, whole=1e-6)


def check_classes(objective: Any, batch: Batch) -> None:
    """The sums over a batch are the counts of its samples, of which the last has no class; there are three classes."""
    with torch.no_grad():
        sums = objective.evaluation_sums(batch).tolist()
        logits = objective.model(**objective.model_inputs(batch)).logits[:-1]
    labels = batch["labels"][:-1]
    assert sums[0] == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-5)
    confusion = np.zeros((3, 3))
    np.add.at(confusion, (labels.numpy(), logits.argmax(-1).numpy()), 1)
    assert objective.findings([*sums, float(len(labels))])["confusion"] == confusion.tolist()
    assert sums[1] == np.trace(confusion) and sums[2] == len(labels)


def check_cuts(objective: Any, batch: Batch, weight: torch.nn.Parameter, *more: Batch) -> None:
    """The loss is that of the plain formula and one weight's gradient the same, however the six rows are cut.

    Args:
        more: micro-batches of processes without data, which change nothing.
    """
    model = objective.model
    reference = objective.reference_loss(lambda **inputs: model(**inputs), model, batch).loss_sum.detach()
    units, gradients = objective.batch_spec.valid_targets(batch), []
    for sizes in ((6,), (2, 2, 2), (1, 5)):
        model.zero_grad()
        loss = step_loss(objective, [*cut(batch, *sizes), *more], units)
        torch.testing.assert_close(loss, reference / units, rtol=1e-5, atol=0, check_dtype=False)
        assert weight.grad is not None
        gradients.append(weight.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-6)


def vector_errors(model: torch.nn.Module, whole: Any) -> dict[str, float]:
    """Relative error of each parameter's gradient. Attention does not depend on the keys' bias, whose gradient is
    rounding alone: its error is relative to the largest gradient.

    Args:
        model: the objective's model, or sentence-transformers' around one.
        whole: sentence-transformers' model around one with the same weights; its pooler has no gradient.
    """
    named = gradients_of(whole)
    norms = torch.stack([gradient.norm() for gradient in named.values() if gradient is not None])
    largest, total = float(norms.max()), float(norms.norm())
    errors = {}
    for name, gradient in gradients_of(model).items():
        if not name.startswith("pooler."):
            wanted = named[name]
            assert gradient is not None and wanted is not None
            size = largest if name.endswith("key.bias") else float(wanted.norm())
            difference = float((gradient - wanted).norm())
            record("gradient", difference / total)
            errors[name] = difference / size
    assert len(errors) == len(named) - 2
    return errors


def check_evaluated(folder: Path, capsys: pytest.CaptureFixture[str], *lines: str) -> None:
    """``mgpu-pipe eval`` of a run prints these texts."""
    from mgpu_pipe.cli.main import main

    assert main(["eval", str(folder), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed


def exported_model(folder: Path, kind: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """The model of transformers' class ``kind`` from the export of a run, ``out`` next to it; it has all weights."""
    from mgpu_pipe.cli.main import main

    out = folder.parent / "out"
    assert main(["export", str(folder), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert not kind.__name__.startswith("Auto") or kind.__name__ in printed
    model, info = kind.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def check_logits(folder: Path, exported: Any, **inputs: torch.Tensor) -> None:
    """The models of a run and of its export give the same logits."""
    from mgpu_pipe.inference.open import load_run

    with torch.no_grad():
        ours, plain = (model(**inputs).logits for model in (load_run(folder).model, exported))
    assert torch.allclose(ours, plain.to(ours.dtype), rtol=0, atol=1e-6)


def check_trained_on(composed: Any, folder: Path, metrics: Mapping[str, float], processes: int, *words: str) -> None:
    """A run on the export ``out`` in ``folder`` begins with the held-out loss of ``metrics``: it keeps all of it."""
    given = ("model=hf", f"model.path={folder / 'out'}", "optimizer.lr=0", *words)
    tuned = small_runs.run(composed, folder / "tuned", processes, *given)
    assert tuned["val/loss"] == pytest.approx(metrics["val/loss"], rel=1e-5)


def learnt_metrics(composed: Any, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of four steps, the same where a run goes on under other strategies, and of 30 larger steps."""
    whole, metrics, _ = small_runs.run_on(composed, folder)
    assert metrics["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    words = ("strategy=single", "trainer.max_steps=30", "optimizer.lr=1e-3")
    return whole, small_runs.run(composed, folder / "longer", 1, *words)


GREEDY = ("--device", "cpu", "--temperature", "0", "--max-new-tokens", "8")


def generated(folder: Path, capsys: pytest.CaptureFixture[str], prompt: str, *pictures: Path) -> str:
    """The answer of ``mgpu-pipe generate`` to a prompt about pictures."""
    from mgpu_pipe.cli.main import main

    shown = [word for picture in pictures for word in ("--image", str(picture))]
    capsys.readouterr()
    assert main(["generate", str(folder), *GREEDY, "--prompt", prompt, *shown]) == 0
    return capsys.readouterr().out.strip()


def check_written(model: Any, tokenizer: Any, answer: str, input_ids: torch.Tensor, **inputs: torch.Tensor) -> None:
    """transformers' generation writes ``answer``."""
    wrote = model.generate(input_ids=input_ids, **inputs, max_new_tokens=8, do_sample=False)[0][input_ids.shape[1] :]
    assert printable(tokenizer.decode(wrote, skip_special_tokens=True)).strip() == answer
