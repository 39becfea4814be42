"""Every shipped experiment, whole, as a user starts it: what it reaches on held-out data, and how long it takes.

The recipes for clusters of GPUs are left out.

``make demos``, or ``python -m benchmarks.demos NAME ...`` for some of them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.support import finish
from mgpu_pipe.config.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.runs.metrics_file import read_metrics

EXPERIMENTS = Path(__file__).parents[1] / "conf" / "experiment"


def demo(name: str) -> None:
    """Run the experiment and write its held-out figures to ``results/<name>-<cpu|gpu>.json``."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "run")
        command = [sys.executable, "-m", "mgpu_pipe", f"experiment={name}", f"run.dir={run.root}"]
        subprocess.run(command, check=True)
        summary = json.loads(run.summary.read_text())
        metrics = read_metrics(run.metrics)
    columns = ["step", *(key for key in metrics if key.startswith("val/"))]
    rows = [row for row in zip(*(metrics[key] for key in columns), strict=True) if not math.isnan(row[1])]
    parameters, processes = summary["model"]["parameters"], summary["world_size"]
    tokens = summary["metrics"]["throughput/tokens_per_s"]  # 0 of pictures
    rate, unit = (tokens, "tokens/s") if tokens else (summary["metrics"]["throughput/samples_per_s"], "samples/s")
    notes = (
        f"{parameters:,} parameters, {processes} processes, {summary['precision']}; {summary['wall_s']:.0f} s in all, "
        f"{rate:,.0f} {unit}."
    )
    finish(name, f"mgpu-pipe experiment={name}", columns, rows, notes)


if __name__ == "__main__":
    names = sorted(file.stem for file in EXPERIMENTS.glob("*.yaml"))
    for chosen in sys.argv[1:] or names:
        if chosen in sys.argv or compose([f"experiment={chosen}"])[0].trainer.accelerator != "cuda":
            demo(chosen)
