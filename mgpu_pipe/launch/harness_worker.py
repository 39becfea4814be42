"""Process that measures lm-eval's tasks with others: ``python -m mgpu_pipe.launch.harness_worker <folder>``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.resolve import device_type
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.harness.harness_settings import HarnessSettings
from mgpu_pipe.inference.harness.measure import measure_tasks, stay_offline
from mgpu_pipe.launch.inference_world import SETTINGS
from mgpu_pipe.launch.worker import work_with_others
from mgpu_pipe.system.local_files import replace_file
from mgpu_pipe.system.process_end import exit_now

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from mgpu_pipe.launch.distributed import World

RESULTS = "results.json"


def main(folder: Path) -> None:
    """Measure as one process; rank 0 writes the results into ``folder``."""
    stay_offline()

    def work(config: RunConfig, world: World, store: Store) -> None:
        settings = HarnessSettings.from_json((folder / SETTINGS).read_text(encoding="utf-8"))
        results = measure_in(world, store, settings, config)
        if world.rank == 0:
            replace_file(folder / RESULTS, results_text(results))

    work_with_others(folder, work, is_live=True)


def results_text(results: dict[str, Any]) -> str:
    """The results as JSON; what JSON does not know is written as text."""
    return json.dumps(results, default=str)


def measure_in(world: World, store: Store, settings: HarnessSettings, config: RunConfig) -> dict[str, Any]:
    """Measure as a rank of ``world``. A collective call."""
    import torch
    import torch.distributed as dist

    from mgpu_pipe.inference.find_model import find_model
    from mgpu_pipe.inference.generation import load_tokenizer
    from mgpu_pipe.inference.harness.model import HarnessModel
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.parallel_run import evaluation_config, open_parallel
    from mgpu_pipe.launch.distributed import process_group
    from mgpu_pipe.topology import ParallelDims

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    kind = device_type(config.trainer)
    with process_group(world, store, kind, config.launch.collective_timeout):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        silence_transformers()
        if not ParallelDims.resolve(config.strategy, dist.get_world_size()).cuts_the_model:
            return measure_whole(settings, device, world.rank, world.world_size)
        source = find_model(settings.model)
        parallel = open_parallel(source, evaluation_config(source, config), device)
        if source.tokenizer is None:
            raise BadInputError(f"{source.folder}: no tokenizer next to it; give the run's folder, which keeps one")
        tokenizer, size = load_tokenizer(source.tokenizer), settings.batch_size
        model = HarnessModel(parallel.model, tokenizer, size, parallel.share, parallel.shares, parallel.forward)
        return measure_tasks(settings, model)


def measure_whole(
    settings: HarnessSettings, device: torch.device | str, rank: int = 0, processes: int = 1
) -> dict[str, Any]:
    """Measure with the whole model in this process, which takes its share of the requests."""
    from mgpu_pipe.inference.harness.model import HarnessModel
    from mgpu_pipe.inference.model_arguments import silence_transformers
    from mgpu_pipe.inference.open import load_run

    silence_transformers()
    run = load_run(settings.model, device, settings.frozen_folder, settings.average)
    return measure_tasks(settings, HarnessModel(run.model, run.tokenizer(), settings.batch_size, rank, processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_now(0)
