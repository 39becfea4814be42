"""Every shipped experiment, whole, as a user starts it: what it reaches on held-out data, and how long it takes.

The recipes for clusters of GPUs are left out.

``make demos``, or ``python -m benchmarks.accuracy.demos NAME ...`` for some of them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support import finish
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.data.text.rules import HELD, TRAINED, rule_documents, rules
from mgpu_pipe.runs.metrics_file import read_metrics

EXPERIMENTS = Path(__file__).parents[2] / "conf" / "experiment"


def demo(name: str) -> None:
    """Run the experiment, and the one that it starts from, in a folder that holds neither."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "run")
        command = [sys.executable, "-m", "mgpu_pipe", f"experiment={name}", f"run.dir={run.root}"]
        subprocess.run([*command, f"run.root={folder}/bases"], check=True)
        record(name, run, [RunPaths(base) for base in sorted(Path(folder).glob("bases/*/*"))])


def record(name: str, run: RunPaths, bases: Sequence[RunPaths]) -> None:
    """Write the run's held-out figures to ``results/<name>-<cpu|gpu>.json``."""
    summary, metrics = json.loads(run.summary.read_text()), read_metrics(run.metrics)
    columns = ["step", *(key for key in metrics if key.startswith("val/"))]
    rows = [row for row in zip(*(metrics[key] for key in columns), strict=True) if not math.isnan(row[1])]
    parameters, processes = summary["model"]["parameters"], summary["world_size"]
    tokens = summary["metrics"]["throughput/tokens_per_s"]  # 0 of pictures
    rate, unit = (tokens, "tokens/s") if tokens else (summary["metrics"]["throughput/samples_per_s"], "samples/s")
    times = summary["times"]
    waits = (waited / step for waited, step in zip(times["data_s"], times["step_s"], strict=True))
    notes = (
        f"{parameters:,} parameters, {processes} processes, {summary['precision']}; {summary['wall_s']:.0f} s in all, "
        f"{rate:,.0f} {unit}. A step waits for data {max(waits):.1%} of its time."
    )
    for base in bases:
        before = json.loads(base.summary.read_text())
        reached = before["metrics"].get("val/exact_match")
        told = "" if reached is None else f", which answers {reached:.2%}"
        notes += f" Before it {before['wall_s']:.0f} s of the run that it starts from{told}."
    if name.endswith("_spoken_digits"):
        notes += f" Word error rate for flite, a synthesiser that was never heard: {heard_of_flite(run)}."
    if name == "lora_chat":
        notes += f" Held out and also trained on: {overlap()}."
    finish(name, f"mgpu-pipe experiment={name}", columns, rows, notes)


def overlap() -> dict[str, int]:
    """Counts held-out questions and answers (they name the operands) and wordings in the training data."""
    texts_of: dict[str, set[str]] = {HELD: set(), TRAINED: set()}
    for source in ("rule_chat", "rule_facts"):
        for document in rule_documents(source):
            is_chat = document.text.startswith("{")
            texts = (
                [message["content"] for message in json.loads(document.text)["messages"]]
                if is_chat
                else [document.text]
            )
            texts_of[str(document.key)].update(texts)
    wordings = [(set(rule.wordings), set(rule.held_wordings)) for rule in rules()]
    return {
        "questions and answers": len(texts_of[HELD] & texts_of[TRAINED]),
        "wordings": sum(len(trained & held_out) for trained, held_out in wordings),
    }


def heard_of_flite(run: RunPaths) -> str:
    """The run's word error rate for the synthesiser that is held out whole."""
    command = [sys.executable, "-m", "mgpu_pipe", "eval", str(run.root), "data.held_out=synthesiser"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return next(line.split()[1] for line in told.splitlines() if line.startswith("word_error_rate"))


if __name__ == "__main__":
    names = sorted(file.stem for file in EXPERIMENTS.glob("*.yaml"))
    for chosen in sys.argv[1:] or names:
        if chosen in sys.argv or compose([f"experiment={chosen}"])[0].trainer.accelerator != "cuda":
            demo(chosen)
