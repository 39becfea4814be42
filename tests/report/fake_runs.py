"""Run folders as the launcher and the trainer leave them, made from a formula instead of a training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.runs.metrics_file import MetricsWriter

MakeRun = Callable[..., RunPaths]


def make_run(
    root: Path,
    name: str = "quickstart",
    folder: str = "2026-03-02_14-05-33-1f0c77ab",
    steps: int = 600,
    lr: float = 3e-3,
    overrides: tuple[str, ...] = (),
    seed: int = 0,
    created: float = 0.0,
    summary: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> RunPaths:
    """A finished run of ``steps`` steps under ``root``; ``summary`` and ``config`` add to those files.

    Args:
        created: seconds after the others that it was begun.
    """
    paths = RunPaths(root / name / folder)
    paths.logs.mkdir(parents=True)
    draw = random.Random(seed)
    writer = MetricsWriter(paths.metrics)
    held_out = 8.0
    for step in range(1, steps + 1):
        share = step / steps
        loss = 3.45 + 4.9 * math.exp(-step * lr * 9) + 0.25 * (1 - share) + draw.gauss(0, 0.07) - 20 * (lr - 1e-3)
        seconds = 0.42 + abs(draw.gauss(0, 0.012)) + (1.1 if step == 1 else 0)
        row: dict[str, float | int | None] = {
            "step": step,
            "train/loss": loss,
            "train/grad_norm": 0.55 + 3 * math.exp(-step / 25) + abs(draw.gauss(0, 0.06)) + (4 if step == 311 else 0),
            "lr": lr * min(1, step / 50) * (0.55 + 0.45 * math.cos(math.pi * share)),
            "throughput/tokens_per_s": 8192 / seconds,
            "throughput/step_s": seconds,
            "memory/peak_gib": 1.31 + 0.12 * min(1, step / 8),
        }
        if step % (steps // 6) == 0:
            held_out = loss + 0.12 + draw.gauss(0, 0.01)
            row |= {"val/loss": held_out, "val/perplexity": math.exp(held_out)}
        writer.append(row)
    writer.close()
    text = ["experiment=quickstart", "trainer.devices=2", f"optimizer.lr={lr}", *overrides]
    paths.overrides.write_text("\n".join(text) + "\n")
    composed: dict[str, Any] = {
        "seed": 1234,
        "run": {"name": name, "dir": None, "root": "outputs"},
        "model": {"name": "llama_small", "type": "llama", "config": {"hidden_size": 256, "vocab_size": 4096}},
        "data": {"source": "stdlib_text", "seq_len": 256, "global_batch_size": 32, "packing": "best_fit"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": lr, "weight_decay": 0.1},
        "strategy": {"name": "ddp", "engine": "mesh", "dp_replicate": "auto"},
        "trainer": {"max_steps": steps, "devices": 2},
        "logger": {"wandb": {"_target_": "x.WandbLogger", "api_key": "${oc.env:WANDB_API_KEY}"}},
        **(config or {}),
    }
    paths.config.write_text(yaml.safe_dump(composed, sort_keys=False))
    environment = {
        "started": 1772460333.1,
        "created": 1772460333.1 + created,
        "date": "2026-03-02 14:05:33 +0000",
        "command": ["mgpu-pipe", *text],
        "folder": "/home/ada/lm",
        "mgpu_pipe": "0.1.0",
        "python": "3.11.2",
        "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
        "packages": {"torch": "2.13.0", "pytorch-lightning": "2.6.6", "transformers": "5.23.0"},
        "host": "bench-07",
        "cpu": {"model": "AMD EPYC 7B13", "cores": 2, "usable_cores": 2},
        "memory_gib": 23.5,
        "gpus": [],
        "git": {"commit": "9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d5c1f1f22", "dirty": False},
        "workers": 2,
        "threads_per_worker": 1,
    }
    paths.environment.write_text(json.dumps(environment))
    found: dict[str, Any] = {
        "status": "finished",
        "step": steps,
        "world_size": 2,
        "topology": {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1},
        "metrics": {"train/loss": loss, "val/loss": held_out, "val/perplexity": math.exp(held_out)},
        "checkpoint": f"checkpoints/step-{steps:08d}",
        "wall_s": steps * 0.43 + 14,
        "attempts": 1,
        "model": {"name": "llama_small", "type": "llama", "parameters": 7_934_208, "layers": 8},
        "batch": {"global_batch_size": 32, "data_parallel_size": 2, "micro_batch_size": 8, "num_micro_batches": 2},
        "data": {
            "num_documents": 1702,
            "num_tokens": 11_480_233,
            "train_samples": 42_112,
            "validation_samples": 256,
            "train_tokens": 10_780_101,
            "unigram_perplexity": 742.8,
        },
        "memory": {"peak_gib": 1.43, "per_rank": [1.43, 1.41]},
        "samples": [
            {"prompt": "def read_lines(path", "text": "):\n    with open(path) as file:\n        return file.read()"},
            {"prompt": "The module defines", "text": " the following functions and classes:\n\nclass Task(object)"},
        ],
        **(summary or {}),
    }
    paths.summary.write_text(json.dumps(found))
    for step in (steps // 2, steps):
        saved = paths.checkpoints / f"step-{step:08d}"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
        (saved / "model-00000.safetensors").write_bytes(b"\0" * 70_000)
    return paths
