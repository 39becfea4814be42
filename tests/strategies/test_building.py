"""No rank ever holds more than its shard and one parameter while a sharded model is built. Oracle: counted bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.local_shards import local_tensor
from mgpu_pipe.models.weights.pretrained import load_pretrained
from mgpu_pipe.models.weights.slices import FolderWeights
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.device_memory import AllocationWatch
from mgpu_pipe.parallel.parallelize import Fill, ParallelOptions
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import generate
from mgpu_pipe.training.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from mgpu_pipe.training.deepspeed.zero_build import equal_part, prepare_deepspeed
from mgpu_pipe.training.parallel_model import ParallelModel
from tests.models.tiny import write_folder
from tests.support.processes import run_processes
from tests.support.tiny import MODELS as TINY
from tests.support.tiny import model_class

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 352,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": ModelConfig(type="llama", config=dict(SIZES)),
    "mixtral": ModelConfig(type="mixtral", config={**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
}


CPU = torch.device("cpu")


def filling(source: ModelConfig) -> Fill:
    return FolderWeights(source) if source.path is not None else lambda model, device: materialise(model, 5, device)


def partitioned(source: ModelConfig) -> dict[str, int]:
    """The same under ZeRO-3."""
    model = build_meta(source)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    strategy = zero_three(source)
    with AllocationWatch() as watch:
        strategy.parallelise(model)
    shard = sum(parameter.ds_tensor.nbytes for parameter in model.parameters())  # type: ignore[attr-defined]
    return {"whole": whole, "largest": largest, "shard": shard, "peak": watch.peak, "one": watch.largest}


def zero_three(source: ModelConfig, precision: str = "fp32") -> DeepSpeedStrategy:
    world = dist.get_world_size()
    settings = generate(BatchPlan(world, world, 1), stage=3, precision=precision)
    prepare_deepspeed(CPU)
    return DeepSpeedStrategy(
        ParallelDims(dp_shard=world), CPU, settings, precision=precision, seed=5, materialise=filling(source)
    )


def read_parts(folders: list[str], precision: str) -> list[dict[str, tuple[int, torch.Tensor, torch.Tensor]]]:
    """Of every parameter the first element of this rank's part, the part, and the fp32 values that it stands for."""
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
    for folder in folders:
        model = build_meta(ModelConfig(path=folder))
        strategy = zero_three(ModelConfig(path=folder), precision)
        strategy.parallelise(model)
        assert not any(buffer.is_meta for buffer in model.buffers())
        parts = {}
        for name, parameter in model.named_parameters():
            start, stop = equal_part(parameter.ds_numel, rank, ranks)  # type: ignore[attr-defined]
            part = parameter.ds_tensor.detach().narrow(0, 0, stop - start).clone()  # type: ignore[attr-defined]
            parts[name] = (start, part, strategy._initial[name][1] if strategy._initial else part)
        found.append(parts)
    return found


def built(source: ModelConfig) -> dict[str, int]:
    model = build_meta(source)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())

    objective = CausalLMObjective(model, None, lambda step: 1.0, 7)
    dims = ParallelDims(dp_shard=dist.get_world_size())
    with AllocationWatch() as watch:
        ParallelModel(objective, dims, CPU, ParallelOptions(), filling(source))
    shard = sum(local_tensor(p).numel() * p.element_size() for p in model.parameters())
    return {"whole": whole, "largest": largest, "shard": shard, "peak": watch.peak, "one": watch.largest}


def check(found: list[dict[str, int]]) -> None:
    for rank in found:
        assert rank["one"] <= rank["largest"], rank
        # Its shard, the parameter at hand and what it is drawn or put together from; buffers are the 2 %.
        assert rank["peak"] <= 1.02 * (rank["shard"] + 2 * rank["largest"]), rank
        assert rank["peak"] < rank["whole"] / 2, rank
    assert sum(rank["shard"] for rank in found) == found[0]["whole"]  # every size here divides


def test_random_weights_are_drawn_shard_by_shard() -> None:
    for source in MODELS.values():
        check(run_processes(4, built, source))


def test_a_folder_is_read_shard_by_shard(tmp_path: Path) -> None:
    for name, source in MODELS.items():
        write_folder(materialise(build_meta(source), 1, "cpu"), tmp_path / name)
        check(run_processes(4, built, ModelConfig(path=str(tmp_path / name))))


def test_zero_three_draws_part_by_part() -> None:
    for source in MODELS.values():
        check(run_processes(4, partitioned, source))


def test_zero_three_reads_a_folder_part_by_part(tmp_path: Path) -> None:
    for name, source in MODELS.items():
        write_folder(materialise(build_meta(source), 1, "cpu"), tmp_path / name)
        check(run_processes(4, partitioned, ModelConfig(path=str(tmp_path / name))))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_zero_three_reads_the_weights_of_a_folder(tmp_path: Path, precision: str) -> None:
    """Oracle: transformers' own ``from_pretrained``. Three ranks: few parameters divide."""
    for name, source in TINY.items():
        write_folder(materialise(build_meta(source, model_class(source)), 3, "cpu"), tmp_path / name)
    by_rank = run_processes(3, read_parts, [str(tmp_path / name) for name in TINY], precision)
    for number, name in enumerate(TINY):
        whole = dict(load_pretrained(ModelConfig(path=str(tmp_path / name)), "cpu").named_parameters())
        for parts in by_rank:
            assert parts[number].keys() == whole.keys()
        for parameter, expected in whole.items():
            flat = expected.detach().reshape(-1)
            for start, part, values in (parts[number][parameter] for parts in by_rank):
                assert torch.equal(values, flat[start : start + values.numel()]), parameter
                assert torch.equal(part, values.to(part.dtype)), parameter
            assert sum(parts[number][parameter][1].numel() for parts in by_rank) == flat.numel()
