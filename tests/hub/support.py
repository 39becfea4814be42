"""A machine with caches of its own, and the Hub that it asks: a server of the tests' own."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from tests.support.command import environment
from tests.support.hub import Hub
from tests.support.program import run_program

TINY = ("data.seq_len=32", "data.global_batch_size=4", "precision=fp32", "optimizer.lr=1e-3", "logger=none")
RUN = (
    *TINY,
    "trainer.max_steps=4",
    "scheduler.total_steps=4",
    "checkpoint.every_n_steps=2",
    "objective.sample_prompts=[]",
)


@dataclass
class Place:
    """A machine: a working folder, a cache of this program's, one of huggingface_hub's, and the Hub that it asks."""

    hub: Hub
    root: Path
    cache: Path

    def run(self, *words: str, code: int = 0, offline: bool = False, token: str | None = None, **more: str) -> str:
        """Run to the end; stdout and stderr."""
        asked = {**environment(self.cache), **self.hub.environment(self.root / "hf", token, offline), **more}
        done = run_program(words, self.root, asked, 300)
        said = done.stdout + done.stderr
        assert done.returncode == code, f"exit code {done.returncode}\n{said[-3000:]}"
        return said

    def refused(self, *words: str, **more: str | bool) -> str:
        """The one line that a command ends with."""
        said = self.run(*words, code=2, **more)  # type: ignore[arg-type]
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "Traceback" not in said, said
        return lines[0]


def folder_of(said: str) -> Path:
    return next(Path(line.removeprefix("run: ")) for line in said.splitlines() if line.startswith("run: "))


def rows(folder: Path) -> list[dict[str, str]]:
    """The run's metrics by step, but for times and memory; of evaluations the last, for each attempt ends with one."""
    kept = ("step", "train/loss", "train/grad_norm", "lr")
    with (folder / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    return [*({name: row[name] for name in kept} for row in found), {"val/loss": found[-1].get("val/loss", "")}]
