"""A rank's memory: parts of an error, and the allocator's snapshot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.planning.memory import memory_by_rank
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.rank_memory import GIB, estimated_parts, out_of_memory, write_snapshot


class Model(torch.nn.Module):
    """One matrix of 32 MiB; partitioned, its parameter is empty."""

    def __init__(self, partitioned: bool) -> None:
        super().__init__()
        self.weight: Any = torch.nn.Parameter(torch.empty(0 if partitioned else 1 << 23, device="meta"))
        if partitioned:
            self.weight.ds_numel = 1 << 23  # type: ignore[attr-defined]

        class Config:
            hidden_size = num_hidden_layers = 1

            def get_text_config(self) -> Config:
                return self

        self.config = Config()


def attempt_of(config: RunConfig, dims: ParallelDims, plan: BatchPlan, rank: int = 0) -> Any:
    """The parts of an attempt that are read where memory runs out."""
    return SimpleNamespace(config=config, dims=dims, plan=plan, rank=rank)


def said(stage: int, partitioned: bool) -> str:
    config, _ = compose([f"strategy=zero{stage}", "model=llama_tiny", "data.seq_len=1"])
    config = replace(config, trainer=replace(config.trainer, devices=4, accelerator="cpu"))
    attempt = attempt_of(config, ParallelDims(dp_shard=4), BatchPlan(4, 4, 1), rank=1)
    return str(out_of_memory(MemoryError("no"), attempt, Model(partitioned), {}))


def test_a_partitioned_model_is_counted() -> None:
    text = said(3, partitioned=True)
    assert "the largest part is optimizer, about 16 MiB (weights 8 MiB, gradients 8 MiB" in text
    assert "strategy=zero3" not in text


def test_zero_1_and_2_shard_less() -> None:
    assert "the largest part is weights, about 32 MiB (gradients 32 MiB, optimizer 16 MiB" in said(1, False)
    assert "strategy=zero3 (saves about 48 MiB)" in said(1, False)
    assert "(gradients 8 MiB, optimizer 16 MiB" in said(2, False)
    assert "strategy=zero3 (saves about 24 MiB)" in said(2, False)


def test_activations_are_those_that_check_predicts() -> None:
    words = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "model=llama_tiny", "data.seq_len=512"]
    config, _ = compose([*words, "data.global_batch_size=32", "data.micro_batch_size=16"])
    attempt = attempt_of(config, ParallelDims.resolve(config.strategy, 2), BatchPlan.resolve(config.data, 2))
    parts = estimated_parts(attempt, Model(False), {})
    predicted = memory_by_rank(config)
    assert predicted is not None and parts["activations"] >= predicted.terms["activations"] > 1 << 20


def test_a_prediction_that_fails_does_not_hide_that_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: RunConfig) -> None:
        raise ConfigError("model.type", "odd", "use another")

    monkeypatch.setattr("mgpu_pipe.planning.memory.memory_by_rank", refuse)
    assert "rank 1 ran out of memory" in said(3, partitioned=True)


def test_a_model_that_is_cut_is_spread_further_by_its_own_axis() -> None:
    config, _ = compose(["strategy=tp", "model=llama_tiny", "data.seq_len=1"])
    config = replace(config, trainer=replace(config.trainer, devices=2, accelerator="cpu"))
    attempt = attempt_of(config, ParallelDims(tp=2), BatchPlan(1, 1, 1))
    text = str(out_of_memory(MemoryError("no"), attempt, Model(False), {}))
    assert "trainer.devices=4 (saves about 32 MiB)" in text
    assert "strategy=fsdp" not in text


def test_what_is_free_and_in_how_large_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(used: int, *free: int) -> dict[str, Any]:
        blocks = [{"size": used, "state": "active_allocated"}, *({"size": size, "state": "inactive"} for size in free)]
        return {"total_size": used + sum(free), "allocated_size": used, "blocks": blocks}

    segments = [segment(4 * GIB, GIB, GIB // 2), segment(2 * GIB)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    file = tmp_path / "profile" / "memory-rank-3.json"
    told = "held 7.50 GiB, used 6.00 GiB, largest free block 1.00 GiB of 1.50 GiB"
    assert write_snapshot(file) == f"GPU memory: {told}; all blocks: {file}"
    assert json.loads(file.read_text()) == segments
