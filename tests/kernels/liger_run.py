"""A run of two steps, by torch and by Liger's kernels in Triton's interpreter; a program like
:mod:`tests.kernels.liger_steps`. Prints, by ``model.kernels``, what the summary says and the calls of kernels, as JSON.

    TRITON_INTERPRET=1 python -m tests.kernels.liger_run <folder>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.data.prepare_data import prepare
from tests.kernels.liger_steps import CALLS, interpret
from tests.support.processes import run_processes

SMALL = (
    *("model=llama_tiny", "model.config.hidden_size=32", "model.config.intermediate_size=48"),
    *("model.config.num_hidden_layers=2", "data=synthetic", "data.seq_len=32", "data.global_batch_size=2"),
    *("strategy=single", "trainer.accelerator=cpu", "trainer.max_steps=2", "checkpoint.save_last=false"),
    *("data.validation_max_samples=2", "trainer.progress=off"),
)


def run(folder: str, kernels: str) -> dict[str, Any]:
    from mgpu_pipe.training.train import train

    interpret()
    config, _ = compose([*SMALL, f"data.cache_dir={folder}/cache", f"model.kernels={kernels}"])
    own = Path(folder) / kernels
    own.mkdir()
    summary = train(config, RunPaths(own), prepare(config)).summary
    return {"kernels": summary["kernels"], "loss": summary["metrics"]["train/loss"], "calls": dict(CALLS)}


def main() -> None:
    print(json.dumps({kernels: run_processes(1, run, sys.argv[1], kernels)[0] for kernels in ("auto", "liger")}))


if __name__ == "__main__":
    main()
