"""Where things lie in a run's folder, and where cached data lies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunPaths:
    """The layout of one run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def overrides(self) -> Path:
        return self.root / "overrides.txt"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def data(self) -> Path:
        """What the launcher prepared (``PreparedData`` as JSON), for the workers and for later readers."""
        return self.root / "data.json"

    @property
    def tokenizer(self) -> Path:
        """The run's own copy of its tokenizer's folder."""
        return self.root / "tokenizer"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def rank_error(self, rank: int) -> Path:
        """Where a worker leaves its own error for the launcher; removed at each attempt's start."""
        return self.logs / f"rank-{rank}.error.json"


def cache_folder(configured: str | None) -> Path:
    """The folder of tokenised data: the configured one, ``$MGPU_PIPE_CACHE``, or the user's cache folder."""
    chosen = configured or os.environ.get("MGPU_PIPE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mgpu_pipe"
