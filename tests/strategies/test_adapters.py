"""Every kind of adapter under every strategy against one process. Oracle: tests/support/plain_training, whose
layers tests/models/test_adapters.py holds against peft's.

``make test`` tries a few of the cells, in turn; ``make test-all`` tries all of them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.topology import ParallelDims
from tests.support.exact import BOUND, in_float64, worst_gradient
from tests.support.plain_training import plain, worst_error
from tests.support.processes import run_processes
from tests.support.tables import AXES_CELLS
from tests.support.training import Case, trained

pytestmark = pytest.mark.slow

STRATEGIES = {
    "ddp": ParallelDims(dp_replicate=2),
    "fsdp": ParallelDims(dp_shard=2),
    "zero3": ParallelDims(dp_shard=2),
    "tp": ParallelDims(tp=2),
    "tp4, sequence": ParallelDims(tp=4),
    "pp": ParallelDims(pp=2),
    "cp": ParallelDims(cp=2),
    "ep": ParallelDims(dp_shard=2, ep=2),
    "tp2 x pp2": ParallelDims(tp=2, pp=2),
}
LORA = PeftConfig(name="lora", r=4, alpha=64.0)
KINDS = {
    "LoRA": LORA,
    "DoRA": replace(LORA, name="dora"),
    "QLoRA": replace(LORA, name="qlora"),
    "LoRA, experts": replace(LORA, targets=["all-linear", "experts"]),
    "QLoRA, experts": replace(LORA, name="qlora", targets=["all-linear", "experts"]),
}
MODELS = ("llama", "qwen3", "gpt2", "mixtral")
SMALL = {"weight_decay": 0.1, "eps": 1e-3}
"""AdamW's options: at its own eps, 1e-8, a first gradient within rounding of zero is an update of the learning rate's
size."""


def exists(strategy: str, kind: str, model: str) -> bool:
    if "QLoRA" in kind and strategy == "tp4, sequence":
        return False  # refused: it would split blocks
    return model == "mixtral" or (strategy != "ep" and "experts" not in kind)


CELLS = [cell for cell in product(STRATEGIES, KINDS, MODELS) if exists(*cell)]


def case_of(strategy: str, kind: str, model: str) -> Case:
    pipeline: Any = {"micro_batches": 2} if STRATEGIES[strategy].pp > 1 else {}
    options = {"sequence_parallel": True} if strategy.endswith("sequence") else {}
    zero: Any = {"zero_stage": 3} if strategy == "zero3" else {}
    return replace(plain_case(kind, model), options=options, **pipeline, **zero)


def plain_case(kind: str, model: str) -> Case:
    name = f"{model}_128" if "QLoRA" in kind else model
    return Case(model=name, peft=KINDS[kind], optimizer_options=SMALL)


SAMPLED = (
    ("ddp", "QLoRA", "gpt2"),
    ("fsdp", "DoRA", "gpt2"),
    ("fsdp", "LoRA, experts", "mixtral"),
    ("zero3", "QLoRA", "llama"),
    ("tp", "DoRA", "llama"),
    ("tp", "QLoRA, experts", "mixtral"),
    ("pp", "DoRA", "gpt2"),
    ("ep", "QLoRA, experts", "mixtral"),
)
"""The cells of ``make test``: every kind but plain LoRA, which test_axes tries, and every model."""


def is_sampled(strategy: str, kind: str, model: str) -> bool:
    return (strategy, kind, model) in SAMPLED


def _all_cells(strategy: str, sampled: bool) -> list[Any]:
    found = list[Any]()
    for name, kind, model in CELLS:
        if name == strategy and is_sampled(name, kind, model) == sampled:
            case = case_of(name, kind, model)
            try:
                found.append(((kind, model, "fp32"), trained(case, STRATEGIES[name])))
                if strategy != "zero3":  # DeepSpeed takes no float64
                    with in_float64():
                        found.append(((kind, model, "float64"), trained(case, STRATEGIES[name])))
            except Exception as error:
                found.append(((kind, model, "fp32"), f"{type(error).__name__}: {error}"))
    return found


@functools.lru_cache(maxsize=1)
def results(strategy: str, sampled: bool) -> list[dict[tuple[str, str, str], Any]]:
    """What every rank found of every sampled cell, or of the others, from one group of processes."""
    found = run_processes(STRATEGIES[strategy].world_size, _all_cells, strategy, sampled, timeout_s=600.0)
    return [dict(rank) for rank in found]


@functools.lru_cache(maxsize=None)
def oracle(kind: str, model: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return plain(plain_case(kind, model))


@functools.lru_cache(maxsize=None)
def exact_oracle(kind: str, model: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    with in_float64():
        return plain(plain_case(kind, model), torch.float64)


@pytest.mark.parametrize(
    ("strategy", "kind", "model"),
    [pytest.param(*cell, marks=[] if is_sampled(*cell) else pytest.mark.exhaustive) for cell in CELLS],
)
def test_the_strategy_is_one_process(strategy: str, kind: str, model: str) -> None:
    """In fp32 within DESIGN's bounds; in float64 every gradient of the last step within 1e-12."""
    AXES_CELLS[f"{strategy}, {kind}", model] = "FAILED"
    by_rank = results(strategy, is_sampled(strategy, kind, model))
    outcomes = [rank[kind, model, "fp32"] for rank in by_rank]
    assert not any(isinstance(outcome, str) for outcome in outcomes), outcomes
    worst, where = worst_error(outcomes, oracle(kind, model))
    AXES_CELLS[f"{strategy}, {kind}", model] = f"{worst:.3f}" if worst <= 1 else f"FAILED {worst:.2g}"
    assert worst <= 1, where
    if strategy != "zero3":
        exact, where = worst_gradient([rank[kind, model, "float64"] for rank in by_rank], exact_oracle(kind, model))
        AXES_CELLS[f"{strategy}, {kind}", model] = (
            f"{worst:.3f} {exact:.0e}" if exact <= BOUND else f"FAILED {exact:.2g}"
        )
        assert exact <= BOUND, where
