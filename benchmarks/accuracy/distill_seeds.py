"""What a teacher is worth: the student of ``experiment=distill_small`` with it and without, for three seeds.

The same tokens, steps and first weights; the teacher is the model of ``experiment=quickstart``, trained once.
``python -m benchmarks.accuracy.distill_seeds``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.support import finish
from mgpu_pipe.config.paths import RunPaths

SEEDS = (1, 2, 3)
COLUMNS = ("seed", "held-out loss", "without the teacher", "difference", "held-out divergence")


def student(root: Path, seed: int, *overrides: str) -> dict[str, float]:
    run = RunPaths(root / f"seed-{seed}-{len(overrides)}")
    words = ["experiment=distill_small", f"run.root={root}", f"run.dir={run.root}", f"seed={seed}", "checkpoint=none"]
    quiet = ["logger=none", "objective.sample_prompts=[]", "trainer.progress=off"]
    subprocess.run([sys.executable, "-m", "mgpu_pipe", *words, *quiet, *overrides], check=True)
    metrics: dict[str, float] = json.loads(run.summary.read_text(encoding="utf-8"))["metrics"]
    return metrics


def report(rows: list[list[float]]) -> Path:
    title = "Held-out loss of the student of experiment=distill_small"
    notes = "Nats a token, of the labels alone. Without: objective.teacher_weight=0, the same tokens and steps."
    return finish("distill_seeds", title, COLUMNS, rows, notes)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            taught = student(Path(folder), seed)
            alone = student(Path(folder), seed, "objective.teacher_weight=0")["val/loss"]
            found = taught["val/loss"]
            rows.append([seed, found, alone, found - alone, taught["val/divergence"]])
    print(f"written: {report(rows)}", file=sys.stderr)


if __name__ == "__main__":
    main()
