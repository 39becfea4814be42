"""No rank ever holds more than its shard and one parameter while a sharded model is built. Oracle: counted bytes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.parts import local_tensor
from mgpu_pipe.models.slices import fill_from_folder
from mgpu_pipe.parallel.memory import AllocationWatch
from mgpu_pipe.strategies.mesh import MeshStrategy
from mgpu_pipe.topology import ParallelDims
from tests.models.tiny import write_folder
from tests.support.processes import run_processes

SIZES = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 352,
         "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": ModelConfig(type="llama", config=dict(SIZES)),
    "mixtral": ModelConfig(type="mixtral", config={**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2}),
}


def built(source: ModelConfig) -> dict[str, int]:
    model = build_meta(source)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())

    def fill(model: torch.nn.Module, device: torch.device) -> None:
        if source.path is None:
            materialise(model, 5, device)  # type: ignore[arg-type]
        else:
            fill_from_folder(model, source, device)  # type: ignore[arg-type]

    strategy = MeshStrategy(ParallelDims(dp_shard=dist.get_world_size()), torch.device("cpu"), materialise=fill)
    with AllocationWatch() as watch:
        strategy.parallelise(model)
    shard = sum(local_tensor(p).numel() * p.element_size() for p in model.parameters())
    return {"whole": whole, "largest": largest, "shard": shard, "peak": watch.peak, "one": watch.largest}


def check(found: list[dict[str, int]]) -> None:
    for rank in found:
        assert rank["one"] <= rank["largest"]
        # Its shard, the parameter at hand and what it is drawn or put together from; buffers are the 2 %.
        assert rank["peak"] <= 1.02 * (rank["shard"] + 2 * rank["largest"]), rank
        assert rank["peak"] < rank["whole"] / 2, rank
    assert sum(rank["shard"] for rank in found) == found[0]["whole"]


def test_random_weights_are_drawn_shard_by_shard() -> None:
    for source in MODELS.values():
        check(run_processes(4, built, source))


def test_a_folder_is_read_shard_by_shard(tmp_path: Path) -> None:
    for name, source in MODELS.items():
        write_folder(materialise(build_meta(source), 1, "cpu"), tmp_path / name)
        check(run_processes(4, built, ModelConfig(path=str(tmp_path / name))))
