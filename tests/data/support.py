"""Small real data for the data tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.topology import BatchPlan

if TYPE_CHECKING:
    import torch

WORDS = ["the", "a", "cat", "dog", "runs", "over", "blue", "red", "house", "garden", "and", "then", "slowly", "sees"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(tmp_path: Path, **data: object) -> RunConfig:
    """A run's configuration with its cache in ``tmp_path`` and a vocabulary of 300."""
    run = RunConfig()
    run.model.config = {"vocab_size": 300}
    run.data.cache_dir = str(tmp_path / "cache")
    run.data.tokenize_workers = 1
    run.data.seq_len = 32
    run.data.packing = "best_fit"  # auto follows the model's family, and this model has none
    for name, value in data.items():
        assert hasattr(run.data, name)
        setattr(run.data, name, value)
    return run


def sentences(seed: int, number: int) -> str:
    drawn = random.Random(seed)
    return " ".join(drawn.choice(WORDS) for _ in range(number)) + ".\n"


def text_files(tmp_path: Path, number: int = 20) -> RunConfig:
    """A configuration over ``number`` text files of 1 to 200 words in two folders."""
    for index in range(number):
        folder = tmp_path / "corpus" / f"part{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index:03}.txt").write_text(sentences(index, 1 + 37 * index % 200), encoding="utf-8")
    return config(tmp_path, source="text_files", paths=[str(tmp_path / "corpus" / "**" / "*.txt")])


def cut_batches(
    config: RunConfig, view: Any, micro: int, ranks: int, start: int = 0, end: int = 4
) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of all ranks from sample ``start`` to step ``end``, in the global order."""
    from mgpu_pipe.data.loader import train_step_batches

    config.data.micro_batch_size = micro
    plan, prepared = BatchPlan.resolve(config.data, ranks), prepare(config)
    by_rank = [list(train_step_batches(config, prepared, plan, rank, start, end, view)) for rank in range(ranks)]
    return [batch for step in zip(*by_rank, strict=True) for rank in step for batch in rank.micro_batches]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
