"""``mgpu-pipe runs`` over a thousand runs, beside starting the program at all.

The runs are one real run's folder, its files linked, each with a moment and a name of its own.
``python -m benchmarks.commands.runs_listing``.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import tempfile
from pathlib import Path

from benchmarks.commands.startup import seconds
from benchmarks.support import finish

RUNS, ROUNDS = 1000, 7
TRAIN = ["model=llama_tiny", "data=synthetic", "trainer.max_steps=4", "checkpoint.every_n_steps=2", "run.tags=[small]"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        cwd = Path(name)
        os.environ["MGPU_PIPE_CACHE"] = str(cwd / "cache")
        seconds(["-m", "mgpu_pipe", *TRAIN, "run.dir=first"], cwd)
        environment = json.loads((cwd / "first" / "environment.json").read_text())
        for number in range(RUNS):
            folder = cwd / "outputs" / f"name-{number % 10}" / f"run-{number}"
            shutil.copytree(cwd / "first", folder, copy_function=os.link)
            (folder / "environment.json").unlink()
            told = {**environment, "created": environment["created"] + number}
            (folder / "environment.json").write_text(json.dumps(told))
        files = sum(len(names) for _, _, names in os.walk(cwd / "outputs")) // RUNS
        commands = {"runs": ["runs"], "runs --json": ["runs", "--json"], "version (the program alone)": ["version"]}
        times: dict[str, list[tuple[float, float]]] = {what: [] for what in commands}
        for _ in range(ROUNDS):
            for what, words in commands.items():
                before = cpu_seconds()
                wall = seconds(["-m", "mgpu_pipe", *words], cwd)
                times[what].append((wall, cpu_seconds() - before))
    rows = [[what, *map(statistics.median, zip(*both, strict=True)), min(both)[0]] for what, both in times.items()]
    notes = (
        f"Medians of {ROUNDS} cold processes, turn about; {RUNS} runs of {files} files each, their sizes summed. On a "
        "busy machine the processor's time says what the wall clock does not."
    )
    columns = ["command", "seconds", "CPU seconds", "least seconds"]
    finish("runs_listing", f"mgpu-pipe runs, {RUNS} runs", columns, rows, notes)


def cpu_seconds() -> float:
    """Of all children that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
