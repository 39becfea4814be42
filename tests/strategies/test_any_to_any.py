"""Every strategy reads the canonical checkpoint, goes on from it, and writes it again bit for bit.

What a strategy reads and writes goes through the canonical form, so that any strategy goes on from any other: what one
wrote is, bit for bit, what another one reads. Some pairs are tried directly in test_checkpoints
and test_deepspeed_checkpoint. Oracle of going on: the uninterrupted plain loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.deepspeed.build_extension import FOLDER
from mgpu_pipe.training.save_and_resume import restore_optimizer, restore_weights
from tests.support.encoders import ENCODERS, SEEING
from tests.support.learned import LEARNED
from tests.support.plain_training import plain
from tests.support.processes import run_processes
from tests.support.tables import TRANSFER_CELLS
from tests.support.training import Case, trained

pytestmark = pytest.mark.slow

BEFORE, AFTER, SAMPLES, LAYERS = 2, 4, 12, 4
CAUSAL = {"dense": "llama", "tied": "gpt2", "mixture": "mixtral"}
LORA = PeftConfig(name="lora", r=4, alpha=64.0)
ADAPTED = {
    "lora": ("gpt2", LORA),
    "dora": ("llama", replace(LORA, name="dora")),
    "qlora": ("wide", replace(LORA, name="qlora")),
    "qlora, experts": ("mixtral_128", replace(LORA, name="qlora", targets=["all-linear", "experts"])),
}
SAMPLED = {
    "ddp 3": ("classes",),
    "fsdp 3": ("qwen3_vl",),
    "zero1 3": ("pairs",),
    "zero3 3": ("qlora",),
    "tp 4": ("lora",),
    "pp 2 1f1b": ("llava",),
    "pp 2 zbv": ("qwen2_5_vl",),
    "ep 2": ("qlora, experts",),
}
"""What of the other objectives and of the adapters is tried each time; all of them everywhere when all is."""


@dataclass(frozen=True)
class Way:
    """A topology, and how its cases differ."""

    dims: ParallelDims
    case: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = tuple(CAUSAL)

    @property
    def others(self) -> tuple[str, ...]:
        """What else goes this way: what learns the next token is cut into stages, and nothing into sequences."""
        stages = 2 * self.dims.pp if self.case.get("schedule") in SEVERAL_STAGES else self.dims.pp
        uncut = self.dims.cp == self.dims.ep == 1 and "sequence_parallel" not in str(self.case)
        learned = (*LEARNED, *ENCODERS) if stages == 1 else SEEING
        if stages == LAYERS:  # it adds what it sees behind two layers, of the first stage
            learned = tuple(name for name in SEEING if name != "qwen3_vl")
        adapted = ADAPTED if self.dims.ep == 1 else ("qlora, experts",)
        fits = [name for name in adapted if self.dims.tp < 4 or name != "qlora, experts"]  # its blocks would be split
        return (*(learned if uncut else ()), *fits)


SEVERAL_STAGES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules with two stages on each rank."""
MICRO = {"micro_batches": 2}
WAYS = {
    "single": Way(ParallelDims()),
    "ddp 3": Way(ParallelDims(dp_replicate=3)),
    "fsdp 3": Way(ParallelDims(dp_shard=3)),
    "hsdp 2x2": Way(ParallelDims(dp_replicate=2, dp_shard=2)),
    **{f"zero{stage} 3": Way(ParallelDims(dp_shard=3), {"zero_stage": stage}) for stage in (1, 2, 3)},
    "zero3_cpu 2": Way(ParallelDims(dp_shard=2), {"zero_stage": 3, "offload": "cpu"}),
    "zero3_nvme 2": Way(ParallelDims(dp_shard=2), {"zero_stage": 3, "offload": "nvme"}),
    "tp 4": Way(ParallelDims(tp=4)),
    "tp 2, sequence": Way(ParallelDims(tp=2), {"options": {"sequence_parallel": True}}),
    **{
        f"pp 2 {name}": Way(ParallelDims(pp=2), {"micro_batches": 6 if name == "dualpipev" else 2, "schedule": name})
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
    },
    "cp 2 ring": Way(ParallelDims(cp=2)),
    "cp 2 ulysses": Way(ParallelDims(cp=2), {"options": {"context_method": "ulysses"}}),
    "ep 2": Way(ParallelDims(dp_shard=2, ep=2), models=("mixture",)),
    "tp 2 x pp 2": Way(ParallelDims(tp=2, pp=2), MICRO),
    "tp 2 x dp_shard 2 x ep 4": Way(ParallelDims(tp=2, dp_shard=2, ep=4), models=("mixture",)),
    "pp 2 x tp 2 x dp_shard 2": Way(ParallelDims(pp=2, tp=2, dp_shard=2), MICRO),
}

LIKE_OTHERS = (
    *("hsdp 2x2", "zero2 3", "tp 2, sequence", "cp 2 ulysses", "tp 2 x pp 2", "pp 2 1f1b"),
    *("tp 2 x dp_shard 2 x ep 4", "pp 2 x tp 2 x dp_shard 2"),
    *(f"pp 2 {schedule}" for schedule in ("gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev")),
)
"""Ways that only ``make test-all`` tries."""


def case_of(model: str, steps: int, way: Way) -> Case:
    common: dict[str, Any] = {"samples": SAMPLES, "steps": steps, "layers": LAYERS, **way.case}
    if model not in ADAPTED:
        return Case(model=CAUSAL.get(model, model), **common)
    name, peft = ADAPTED[model]
    # A larger eps than AdamW's own: at that, a first gradient within rounding of zero is a whole update.
    return Case(model=name, peft=peft, optimizer_options={"weight_decay": 0.1, "eps": 1e-3}, **common)


def write(strategy: Any, folder: str) -> None:
    shards = strategy.model_shards(), strategy.optimizer_shards()
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = Path(folder) / f"config-{dist.get_rank()}.yaml"
    config.write_text("seed: 5\n")
    save(Path(folder), BEFORE, *shards, {"step": BEFORE}, config)


def first(folder: str, models: list[str]) -> None:
    """The checkpoint that all others start from, of each of these models, written by one process."""
    for model in models:
        trained(case_of(model, BEFORE, WAYS["single"]), ParallelDims(), on_end=lambda s: write(s, f"{folder}/{model}"))  # noqa: B023


def goes_on(name: str, models: tuple[str, ...], source: str, target: str, extension: str | None) -> list[Any]:
    way, found = WAYS[name], list[Any]()
    if extension is not None:
        os.environ[FOLDER] = extension
    for model in models:

        def restore(strategy: Any, model: str = model) -> None:
            reader = CheckpointReader(Path(source) / model / f"step-{BEFORE:08d}")
            restore_weights(reader, strategy)
            restore_optimizer(reader, strategy)
            write(strategy, f"{target}/{model}")

        try:
            case = replace(case_of(model, AFTER, way), offload_path=target if extension is not None else None)
            outcome = trained(case, way.dims, first_step=BEFORE, on_start=restore)
            found.append((outcome.losses, outcome.norms))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def contents(folder: Path) -> dict[str, torch.Tensor]:
    reader, found = CheckpointReader(folder / f"step-{BEFORE:08d}"), {}
    for kind in ("model", "optimizer"):
        shards = [
            LocalShard(
                TensorSlice.whole(name, reader.shape(name)),
                reader.shape(name),
                torch.empty(reader.shape(name), dtype=reader.dtype(name)),
            )
            for name in reader.names(kind)
        ]
        reader.read(shards, kind)
        found.update({f"{kind}/{shard.tensor_slice.name}": shard.tensor for shard in shards})
    return found


@functools.lru_cache(maxsize=None)
def uninterrupted(model: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return plain(case_of(model, BEFORE + AFTER, WAYS["single"]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints that all others start from are written, each when it is wanted."""
    return tmp_path_factory.mktemp("canonical")


def cases() -> Iterator[Any]:
    """Each way with one of its models, in turn, and what is sampled; with the others where all is tried."""
    for turn, (name, way) in enumerate(WAYS.items()):
        one = way.models[turn % len(way.models)]
        sampled = (one, *SAMPLED.get(name, ()))
        others = tuple(model for model in (*way.models, *way.others) if model not in sampled)
        yield pytest.param(name, sampled, id=name, marks=pytest.mark.exhaustive if name in LIKE_OTHERS else ())
        if others:
            yield pytest.param(name, others, id=f"{name}, others", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("name", "models"), list(cases()))
def test_it_reads_goes_on_and_writes_the_same_again(
    name: str, models: tuple[str, ...], source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    way = WAYS[name]
    extension = request.getfixturevalue("nvme_extension") if way.case.get("offload") == "nvme" else None
    missing = [model for model in models if not (source / model).exists()]
    run_processes(1, first, str(source), missing)
    words = name, models, str(source), str(tmp_path), extension
    by_rank = run_processes(way.dims.world_size, goes_on, *words, timeout_s=600.0)
    for index, model in enumerate(models):
        TRANSFER_CELLS[name, model] = "FAILED"
        results: list[Any] = [rank[index] for rank in by_rank]
        assert not any(isinstance(result, str) for result in results), results
        before, after = contents(source / model), contents(tmp_path / model)
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        expected, worst = uninterrupted(model), 0.0
        for losses, norms in results:
            for values, truth in ((losses, expected["losses"]), (norms, expected["norms"])):
                worst = max(worst, *(abs(a / b - 1) for a, b in zip(values, truth[BEFORE:], strict=True)))
        TRANSFER_CELLS[name, model] = f"{worst:.1e}"
        assert worst < 1e-5, model
