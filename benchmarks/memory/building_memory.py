"""The memory that a rank takes while a sharded model is built, over its part and one parameter.

A Llama of 58M parameters is split over 2 and 4 CPU processes, with weights that are drawn and with those of a folder.
Counted are the storages that operators allocate from the meta model to the filled one; the closed form is the rank's
part of the weights plus the largest parameter, which is what has to be in memory where a parameter is made whole and
cut. The folder's files are mapped, and not counted; ``resident`` is how much the resident set grew at its highest,
with pages of files in it. ``python -m benchmarks.memory.building_memory [sizes]``.
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.processes import run_group
from benchmarks.support import finish

SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "intermediate_size": 1408,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 128,
}
CASES = (("fsdp", "drawn"), ("fsdp", "folder"), ("zero3", "drawn"), ("zero3", "folder"))


def measure(folder: str) -> list[dict[str, Any]]:
    """Bytes at the peak of building, for each case."""
    from mgpu_pipe.config.schema import ModelConfig
    from mgpu_pipe.models.build import build_meta
    from mgpu_pipe.parallel.device_memory import AllocationWatch

    found = []
    for strategy, weights in CASES:
        source = ModelConfig(type="llama", config=dict(SIZES)) if weights == "drawn" else ModelConfig(path=folder)
        engine = _strategy(strategy, source)
        model = build_meta(source)
        sizes = [parameter.nbytes for parameter in model.parameters()]
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident set begins anew (man 5 proc)
        with AllocationWatch() as watch:
            split = engine(model)  # what it holds has to live while it is measured
        found.append(
            {
                "whole": sum(sizes),
                "largest": max(sizes),
                "part": _part(model),
                "peak": watch.peak,
                "one": watch.largest,
                "resident": _resident("VmHWM") - before,
            }
        )
        del model, engine, split
    return found


def _strategy(name: str, source: Any) -> Any:
    import torch
    import torch.distributed as dist

    from mgpu_pipe.models.build import materialise
    from mgpu_pipe.models.weights.slices import FolderWeights
    from mgpu_pipe.objectives.causal_lm import CausalLMObjective
    from mgpu_pipe.parallel.parallelize import ParallelOptions
    from mgpu_pipe.topology import BatchPlan, ParallelDims
    from mgpu_pipe.training.deepspeed.deepspeed_config import generate
    from mgpu_pipe.training.deepspeed.deepspeed_strategy import DeepSpeedStrategy
    from mgpu_pipe.training.deepspeed.zero_build import prepare_deepspeed
    from mgpu_pipe.training.parallel_model import ParallelModel

    def draw(model: Any, device: torch.device) -> None:
        materialise(model, 1, device)

    fill = FolderWeights(source) if source.path is not None else draw
    cpu, world = torch.device("cpu"), dist.get_world_size()
    dims = ParallelDims(dp_shard=world)
    if name == "fsdp":

        def split(model: Any) -> ParallelModel:
            return ParallelModel(
                CausalLMObjective(model, None, lambda step: 1.0, 0), dims, cpu, ParallelOptions(), fill
            )

        return split
    prepare_deepspeed(cpu)
    settings = generate(BatchPlan(world, world, 1), stage=3)
    return DeepSpeedStrategy(dims, cpu, settings, seed=1, materialise=fill).parallelise


def _part(model: Any) -> int:
    """Bytes of this rank's weights."""
    from mgpu_pipe.models.local_shards import local_tensor

    return sum(getattr(p, "ds_tensor", local_tensor(p)).nbytes for p in model.parameters())


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux shows a process's memory there"
    return int(found[1]) * 1024


def save_model(folder: str) -> None:
    from transformers.utils.logging import disable_progress_bar

    from mgpu_pipe.config.schema import ModelConfig
    from mgpu_pipe.models.build import build_meta, materialise

    disable_progress_bar()
    model = materialise(build_meta(ModelConfig(type="llama", config=dict(SIZES))), 1, "cpu")
    model.save_pretrained(folder)


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or [2, 4]
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folder = str(Path(root) / "model")
        save_model(folder)
        for world in sizes:
            by_rank = run_group(world, measure, folder)
            for number, (strategy, weights) in enumerate(CASES):
                rank = max((found[number] for found in by_rank), key=lambda found: found["peak"])
                rows.append(
                    [
                        world,
                        strategy,
                        weights,
                        rank["part"] / 1e6,
                        rank["largest"] / 1e6,
                        rank["peak"] / 1e6,
                        rank["peak"] / (rank["part"] + rank["largest"]),
                        rank["peak"] / rank["whole"],
                        rank["one"] / rank["largest"],
                        rank["resident"] / 1e6,
                    ]
                )
    out = finish(
        "building_memory",
        "A rank's memory while a sharded model is built, over its part and one parameter",
        [
            "processes",
            "strategy",
            "weights",
            "part MB",
            "largest parameter MB",
            "peak MB",
            "ratio",
            "of the whole model",
            "largest allocation, of the largest parameter",
            "resident MB",
        ],
        rows,
        "Llama of 58M parameters (232 MB) in fp32; the process with the highest peak.",
    )
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
