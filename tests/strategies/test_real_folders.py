"""Published models whole, under every strategy that their family takes. Oracle: the same run in one process.

Whole runs are compared: the folder's weights, tokenizer and chat template as they are, text nobody wrote for this. In
float32, loss and gradient norm of every step and AdamW's means of gradients after the last; in float64 the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.runs.metrics_file import read_metrics
from mgpu_pipe.training import initial_weights
from tests.support import small_runs
from tests.support.exact import in_float64
from tests.support.real_folders import need_minilm, need_smollm2

BOUND, EXACT_BOUND = 1e-5, 1e-12
"""In float32, and in float64 for the weights: AdamW makes an update as large as the learning rate of a gradient within
rounding of zero, and many of adapters are. In float32 such weights say how sums are rounded, under any strategy."""
CAPITALS = {"Cuba": "HAVANA", "Japan": "TOKYO", "Peru": "LIMA", "Italy": "ROME", "Egypt": "CAIRO"}
STEP = ("trainer.max_steps=2", "trainer.log_every_n_steps=1", "scheduler=constant", "scheduler.warmup_steps=0")
SMALL = ("model=hf", "data.global_batch_size=4", "data.micro_batch_size=1", "logger=none", "trainer.progress=off")
STRATEGIES = {
    "ddp": (2, ()),
    "fsdp": (2, ()),
    "hsdp": (4, ("strategy.dp_replicate=2",)),
    "zero1": (2, ()),
    "zero2": (2, ()),
    "zero3": (2, ()),
}
OF_BERT = {**STRATEGIES, "tp": (2, ())}
OF_LLAMA = {**STRATEGIES, "tp": (3, ()), "pp": (2, ()), "cp": (2, ())}
"""Nine heads and three of keys: three processes."""
FLOAT32_ONLY = ("zero1", "zero2", "zero3")
"""DeepSpeed takes no float64."""
MEAN = "/exp_avg"
"""Ends the name of AdamW's mean of a weight's gradients."""
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Results:
    """What a run in float32 and the same run in float64 came to."""

    metrics: dict[str, list[float]]
    heldout: dict[str, float]
    """Metrics of the last evaluation."""
    mean_gradients: Tensors
    """AdamW's, after the last step."""
    exact_weights: Tensors
    """Of what is trained; empty where float64 cannot be tried."""


def masked(corpus: str, folder: Path, *overrides: str) -> RunConfig:
    """MiniLM learns to find hidden tokens; its folder has no head for that, which is drawn."""
    data = ("data=text_files", f"data.paths=[{corpus}/*.txt]", "data.seq_len=48", "data.validation_max_samples=4")
    quiet = ("model.config.hidden_dropout_prob=0", "model.config.attention_probs_dropout_prob=0")
    given = (f"model.path={need_minilm()}", "objective=masked_lm", f"data.cache_dir={folder / 'cache'}")
    return compose([*SMALL, *STEP, *data, *quiet, *given, "trainer.accelerator=cpu", *overrides])[0]


def searching(folder: Path, *overrides: str) -> RunConfig:
    """MiniLM's vectors learn to find functions by their docstrings."""
    data = ("data=stdlib_pairs", "data.validation_max_samples=32", "data.seq_len=24")
    quiet = ("model.config.hidden_dropout_prob=0", "model.config.attention_probs_dropout_prob=0")
    given = (f"model.path={need_minilm()}", "objective=text_embedding", f"data.cache_dir={folder / 'cache'}")
    return compose([*SMALL, *STEP, *data, *quiet, *given, "trainer.accelerator=cpu", *overrides])[0]


def chatting(folder: Path, *overrides: str) -> RunConfig:
    """SmolLM2's adapters learn five capitals in its own template."""
    file = folder / "capitals.jsonl"
    if not file.exists():
        turns = [
            [{"role": "user", "content": f"The capital of {land}?"}, {"role": "assistant", "content": city}]
            for land, city in CAPITALS.items()
        ]
        file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns * 2))
    data = ("data=chat_jsonl", f"data.paths=[{file}]", f"data.cache_dir={folder / 'cache'}", "data.seq_len=64")
    given = (f"model.path={need_smollm2()}", "peft=lora", "data.validation_fraction=0.2")
    return compose([*SMALL, *STEP, *data, *given, "trainer.accelerator=cpu", *overrides])[0]


def trained_in_float64(*args: Any) -> dict[str, Any]:
    """Result of :func:`tests.support.small_runs.trained` in float64."""
    build_model = initial_weights.build_model

    def exact_model(*arguments: Any, **keywords: Any) -> Any:
        model, fill = build_model(*arguments, **keywords)
        return model.double(), fill

    with in_float64(), mock.patch.object(initial_weights, "build_model", exact_model):
        return small_runs.trained(*args)


def shown(composed: Callable[..., RunConfig], folder: Path, name: str, processes: int, *overrides: str) -> Results:
    given = (f"strategy={name}", *overrides)
    measured = small_runs.run(composed, folder / name, processes, *given)
    metrics = read_metrics(folder / name / "metrics.csv")
    means = stored(folder / name, "optimizer", MEAN)
    exact_weights = Tensors()
    if name not in FLOAT32_ONLY:
        exact = folder / f"{name}-float64"
        small_runs.run(composed, exact, processes, *given, trained=trained_in_float64)
        trained = {key.removesuffix(MEAN) for key in means}
        exact_weights = {key: value for key, value in stored(exact, "model").items() if key in trained}
    steps = {key: list(metrics[key]) for key in ("train/loss", "train/grad_norm")}
    heldout = {key: value for key, value in measured.items() if key.startswith("val/")}
    return Results(steps, heldout, means, exact_weights)


def stored(run_folder: Path, kind: str, ending: str = "") -> Tensors:
    """Tensors of a run's last checkpoint, in float64."""
    reader = CheckpointReader(run_folder / "checkpoints" / "step-00000002")
    names = [name for name in reader.names(kind) if name.endswith(ending)]
    found = {name: torch.empty(reader.shape(name), dtype=torch.float64) for name in names}
    whole = {name: TensorSlice.whole(name, tuple(value.shape)) for name, value in found.items()}
    reader.read([LocalShard(whole[name], whole[name].shape, value) for name, value in found.items()], kind)
    return found


def compare_runs(found: Results, expected: Results) -> None:
    for key, values in expected.metrics.items():
        assert len(values) == 2 and found.metrics[key] == pytest.approx(values, rel=BOUND), key
    assert expected.heldout and losses(found.heldout) == pytest.approx(losses(expected.heldout), rel=BOUND)
    assert relative_error(found.mean_gradients, expected.mean_gradients) < BOUND
    if found.exact_weights:
        assert relative_error(found.exact_weights, expected.exact_weights) < EXACT_BOUND


def losses(heldout: Mapping[str, float]) -> dict[str, float]:
    """Metrics with losses in the place of perplexities, whose relative error is a loss's absolute one."""
    return {key: math.log(value) if key.endswith("perplexity") else value for key, value in heldout.items()}


def relative_error(found: Tensors, expected: Tensors) -> float:
    assert found.keys() == expected.keys()
    total = sum(float(value.square().sum()) for value in expected.values())
    return float((sum(float((found[key] - value).square().sum()) for key, value in expected.items()) / total) ** 0.5)


@pytest.fixture(scope="module")
def minilm(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Results]:
    need_minilm()
    folder, composed = tmp_path_factory.mktemp("minilm"), partial(masked, str(corpus))
    return composed, folder, shown(composed, folder, "single", 1)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Results]:
    need_smollm2()
    folder = tmp_path_factory.mktemp("smollm2")
    return chatting, folder, shown(chatting, folder, "single", 1)


def cells(strategies: dict[str, Any], quick: str | None) -> list[Any]:
    """The strategies; only ``quick`` runs in ``make test``."""
    marks = {True: pytest.mark.slow, False: pytest.mark.exhaustive}
    return [pytest.param(name, marks=marks[name == quick]) for name in strategies]


@pytest.mark.parametrize("strategy", cells(OF_BERT, None))
def test_minilm_learns_as_in_one_process(strategy: str, minilm: tuple[Any, Path, Results]) -> None:
    composed, folder, expected = minilm
    processes, more = OF_BERT[strategy]
    compare_runs(shown(composed, folder, strategy, processes, *more), expected)


@pytest.fixture(scope="module")
def minilm_vectors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Results]:
    need_minilm()
    folder = tmp_path_factory.mktemp("minilm_vectors")
    return searching, folder, shown(searching, folder, "single", 1)


@pytest.mark.parametrize("strategy", cells(OF_BERT, None))
def test_minilm_vectors_learn_as_in_one_process(strategy: str, minilm_vectors: tuple[Any, Path, Results]) -> None:
    composed, folder, expected = minilm_vectors
    processes, more = OF_BERT[strategy]
    compare_runs(shown(composed, folder, strategy, processes, *more), expected)


@pytest.mark.parametrize("strategy", cells(OF_LLAMA, None))  # two minutes each
def test_adapters_of_smollm2_learn_as_in_one_process(strategy: str, smollm2: tuple[Any, Path, Results]) -> None:
    composed, folder, expected = smollm2
    processes, more = OF_LLAMA[strategy]
    compare_runs(shown(composed, folder, strategy, processes, *more), expected)
