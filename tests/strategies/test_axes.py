"""Every axis of the mesh engine, and their compositions, against one process. Oracle: tests/support/plain_training.

``make test`` tries most topologies, each on one of the four families, in turn; ``make test-all`` tries all of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.topology import ParallelDims
from tests.strategies.test_matrix import BF16_FACTOR, bf16_error
from tests.support.needs import need_torch_compile
from tests.support.plain_training import assembled, plain, worst_error
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tables import AXES_CELLS
from tests.support.training import SEED, Case, Outcome, trained

pytestmark = pytest.mark.slow

STEPS = 5
ALL, EXPERTS = ("llama", "gpt2", "qwen3", "mixtral"), ("mixtral",)


@dataclass(frozen=True)
class Topology:
    dims: ParallelDims
    models: tuple[str, ...] = ALL
    micro_batches: int = 1
    samples: int = 8
    layers: int = 0
    schedule: str = "1f1b"
    options: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    """More of the case."""


TWO_STAGES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules under which a rank holds two stages."""
LORA = PeftConfig(name="lora", r=4, alpha=64.0)
SPLIT, ULYSSES = {"sequence_parallel": True}, {"context_method": "ulysses"}
TOPOLOGIES = {
    "tp2": Topology(ParallelDims(tp=2)),
    "tp4": Topology(ParallelDims(tp=4)),
    "tp2, sequence": Topology(ParallelDims(tp=2), options=SPLIT),
    "tp4, sequence": Topology(ParallelDims(tp=4), options=SPLIT, case={"max_norm": 0.3}),
    **{f"pp2 {name}": Topology(ParallelDims(pp=2), micro_batches=4, schedule=name) for name in ("gpipe", "1f1b")},
    **{f"pp2 {name}": Topology(ParallelDims(pp=2), micro_batches=4, layers=8, schedule=name) for name in TWO_STAGES},
    **{
        f"pp4 {name}": Topology(ParallelDims(pp=4), micro_batches=8, layers=8, schedule=name)
        for name in ("gpipe", "1f1b", *TWO_STAGES)
    },
    "cp2 ring": Topology(ParallelDims(cp=2)),
    "cp4 ring": Topology(ParallelDims(cp=4), case={"max_norm": 0.3}),
    "cp2 ulysses": Topology(ParallelDims(cp=2), options=ULYSSES),
    "cp4 ulysses": Topology(ParallelDims(cp=4), options=ULYSSES),
    "ep2": Topology(ParallelDims(dp_shard=2, ep=2), EXPERTS),
    "ep4": Topology(ParallelDims(dp_shard=4, ep=4), EXPERTS, 2, case={"max_norm": 0.3}),
    "dp_shard4, two experts": Topology(ParallelDims(dp_shard=4), ("mixtral_2",)),
    "tp2 x pp2": Topology(ParallelDims(tp=2, pp=2), micro_batches=4),
    "tp2 x pp2, sequence": Topology(ParallelDims(tp=2, pp=2), micro_batches=4, options=SPLIT),
    "tp2 x pp2 zbv, sequence": Topology(
        ParallelDims(tp=2, pp=2), ("llama",), 4, layers=8, schedule="zbv", options=SPLIT
    ),
    "tp2 x dp_shard2": Topology(ParallelDims(tp=2, dp_shard=2), micro_batches=2),
    "tp2 x dp_replicate2": Topology(ParallelDims(tp=2, dp_replicate=2), ("llama", "gpt2"), 2, case={"max_norm": 0.3}),
    "pp2 x dp_shard2": Topology(ParallelDims(pp=2, dp_shard=2), micro_batches=4, case={"max_norm": 0.3}),
    "pp2 zbv x dp_shard2": Topology(ParallelDims(pp=2, dp_shard=2), ("llama", "gpt2"), 4, layers=8, schedule="zbv"),
    "pp2 interleaved_1f1b, three stages a rank": Topology(
        ParallelDims(pp=2), ("llama",), 4, layers=8, schedule="interleaved_1f1b", case={"stages_per_rank": 3}
    ),
    "pp2 x tp2, compiled": Topology(ParallelDims(pp=2, tp=2), ("llama",), 2, options={"compile_model": True}),
    "cp2 x ep2 x dp_shard2, compiled": Topology(
        ParallelDims(cp=2, ep=2, dp_shard=2), EXPERTS, options={"compile_model": True}
    ),
    "cp2 x dp_shard2": Topology(ParallelDims(cp=2, dp_shard=2), micro_batches=2),
    "tp2 x cp2": Topology(ParallelDims(tp=2, cp=2)),
    "pp2 x cp2, checkpointing": Topology(
        ParallelDims(pp=2, cp=2), ("llama", "mixtral"), 2, case={"checkpointing": "full"}
    ),
    "tp2 x cp2, uneven lengths": Topology(ParallelDims(tp=2, cp=2), ("llama", "mixtral"), case={"data": "uneven"}),
    "pp2 x dp_shard2, padding": Topology(ParallelDims(pp=2, dp_shard=2), ("gpt2",), 4, case={"data": "padded"}),
    "tp2 x pp2, selective checkpointing": Topology(
        ParallelDims(tp=2, pp=2), ("llama", "mixtral"), 2, case={"checkpointing": "selective"}
    ),
    "tp4, LoRA": Topology(ParallelDims(tp=4), options=SPLIT, case={"peft": LORA}),
    "tp2 x pp2 x cp2, LoRA": Topology(ParallelDims(tp=2, pp=2, cp=2), micro_batches=2, case={"peft": LORA}),
    "ep2 x dp_shard2, LoRA": Topology(ParallelDims(ep=2, dp_shard=2), EXPERTS, case={"peft": LORA}),
    "ep2 x tp2 x dp_shard2": Topology(ParallelDims(ep=2, tp=2, dp_shard=2), EXPERTS),
    "ep4 x tp2 x dp_shard2, sequence": Topology(ParallelDims(ep=4, tp=2, dp_shard=2), EXPERTS, options=SPLIT),
    "pp2 x ep2 x dp_shard2": Topology(ParallelDims(pp=2, ep=2, dp_shard=2), EXPERTS, 2),
    "pp2 x tp2 x dp_shard2": Topology(ParallelDims(pp=2, tp=2, dp_shard=2), micro_batches=2),
    "pp2 x tp2 x cp2 x dp_shard2": Topology(ParallelDims(pp=2, tp=2, cp=2, dp_shard=2), micro_batches=2),
}


SEEDS = {("qwen3", 8): 6}
"""Initial weights of another seed, by model and layers. AdamW's first update has the size of the learning rate for any
gradient: of qwen3 with eight layers and the usual seed one gradient is 2e-8, within rounding of zero, and that single
weight takes two plain computations beyond the bound."""


def case_of(topology: Topology, model: str) -> Case:
    return Case(
        model=model,
        steps=STEPS,
        samples=topology.samples,
        micro_batches=topology.micro_batches,
        layers=topology.layers,
        schedule=topology.schedule,
        options=topology.options,
        seed=SEEDS.get((model, topology.layers), SEED),
        **topology.case,
    )


RARE = (
    *(f"pp2 {name}" for name in ("gpipe", "interleaved_1f1b", "zbv")),
    *(f"pp4 {name}" for name in ("1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")),
    *("tp2", "tp2, sequence", "tp4", "cp2 ring", "cp4 ulysses", "ep2", "ep4", "tp2 x pp2", "tp2 x dp_replicate2"),
    *("tp2 x cp2", "tp2 x pp2, sequence", "pp2 x dp_shard2", "pp2 x tp2 x dp_shard2", "pp4 gpipe", "tp2 x dp_shard2"),
    *("cp2 x dp_shard2", "pp2 zbv x dp_shard2", "ep2 x tp2 x dp_shard2", "cp2 x ep2 x dp_shard2, compiled"),
    *("pp2 x tp2, compiled", "tp4, LoRA", "ep2 x dp_shard2, LoRA"),
    *("pp2 1f1b", "pp2 interleaved_zero_bubble", "pp2 interleaved_1f1b, three stages a rank", "pp2 x ep2 x dp_shard2"),
    *("tp2 x pp2 zbv, sequence", "pp4 interleaved_1f1b", "cp2 ulysses", "pp2 x tp2 x cp2 x dp_shard2"),
)
"""Topologies that ``make test`` leaves out: others are like them."""


def is_sampled(name: str, model: str) -> bool:
    """Whether ``make test`` tries this cell."""
    models = TOPOLOGIES[name].models
    return name not in RARE and models[list(TOPOLOGIES).index(name) % len(models)] == model


def _models(name: str, sampled: bool) -> list[str]:
    return [model for model in TOPOLOGIES[name].models if is_sampled(name, model) == sampled]


def _all_models(name: str, sampled: bool) -> list[Any]:
    topology, found = TOPOLOGIES[name], list[Any]()
    for model in _models(name, sampled):
        try:
            found.append(trained(case_of(topology, model), topology.dims))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@functools.lru_cache(maxsize=1)
def results(name: str, sampled: bool) -> list[list[Any]]:
    """What every rank found of every sampled model, or of the others, from one group of processes."""
    return run_processes(TOPOLOGIES[name].dims.world_size, _all_models, name, sampled, timeout_s=600.0)


@functools.lru_cache(maxsize=None)
def oracle(model: str, layers: int, max_norm: float | None, data: str, adapted: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    peft = LORA if adapted else PeftConfig()
    seed = SEEDS.get((model, layers), SEED)
    return plain(Case(model=model, steps=STEPS, layers=layers, max_norm=max_norm, data=data, peft=peft, seed=seed))


CASES = [
    pytest.param(name, model, marks=[] if is_sampled(name, model) else pytest.mark.exhaustive)
    for name, topology in TOPOLOGIES.items()
    for model in topology.models
]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_the_topology_is_one_process(name: str, model: str) -> None:
    topology = TOPOLOGIES[name]
    if "compile_model" in topology.options:
        need_torch_compile()
    AXES_CELLS[name, model] = "FAILED"
    sampled = is_sampled(name, model)
    outcomes: list[Outcome] = [rank[_models(name, sampled).index(model)] for rank in results(name, sampled)]
    assert not any(isinstance(outcome, str) for outcome in outcomes), outcomes
    case = topology.case
    expected = oracle(model, topology.layers, case.get("max_norm"), case.get("data", "packed"), "peft" in case)
    worst, where = worst_error(outcomes, expected)
    AXES_CELLS[name, model] = f"{worst:.3f}" if worst <= 1 else f"FAILED {worst:.2g}"
    assert worst <= 1, where


SAME_STAGES = ("interleaved_zero_bubble", "interleaved_1f1b")
"""A schedule that splits the backward pass and one that does not, with the same stages on every rank."""


def _split_and_whole(precision: str) -> list[Outcome]:
    sizes = ParallelDims(pp=2, dp_shard=2)
    case = Case(steps=3, micro_batches=4, layers=4, precision=precision, max_norm=0.3)
    return [trained(replace(case, schedule=schedule), sizes) for schedule in SAME_STAGES]


@pytest.mark.parametrize("precision", one_in(2, ["bf16", "fp16"]))
def test_a_split_backward_pass_sums_gradients_in_fp32_as_a_whole_one_does(precision: str) -> None:
    by_rank = run_processes(4, _split_and_whole, precision)
    for split, whole in by_rank:
        assert split.losses == whole.losses and split.norms == whole.norms
    weights = [assembled([outcome.weights for outcome in outcomes]) for outcomes in zip(*by_rank, strict=True)]
    assert all(torch.equal(weights[0][name], whole) for name, whole in weights[1].items())


def _in_bf16(dims: ParallelDims, case: Case) -> Outcome:
    return trained(case, dims)


@pytest.mark.parametrize(
    ("name", "model"),
    one_in(4, [("tp2, sequence", "llama"), ("ep2", "mixtral"), ("pp2 1f1b", "gpt2"), ("cp2 ring", "llama")]),
)
def test_bf16_is_as_close_to_fp32_as_one_bf16_process(name: str, model: str) -> None:
    topology = TOPOLOGIES[name]
    case = replace(case_of(topology, model), precision="bf16")
    expected = oracle(model, topology.layers, None, "packed")
    alone, found = (
        bf16_error(run_processes(dims.world_size, _in_bf16, dims, case), expected)
        for dims in (ParallelDims(), topology.dims)
    )
    assert alone["loss"] > 1e-6, "bf16 is not at work"
    assert all(found[what] <= BF16_FACTOR * alone[what] + 1e-5 for what in found), (found, alone)
