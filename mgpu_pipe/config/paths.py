"""Where things lie in a run's folder, and where cached data lies."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from mgpu_pipe.errors import BadInputError, ConfigError

COMPARISON = "comparison.html"
"""A report of several runs."""
CACHE_CONTENT = {"fingerprints", "tokenizers", "tokens", "extensions", "configurations"}
"""What the folder of cached data holds."""


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
        """What the launcher prepared (``Prepared`` as JSON), for the workers and for later readers."""
        return self.root / "data.json"

    @property
    def tokenizer(self) -> Path:
        """The run's own copy of its tokenizer's folder."""
        return self.root / "tokenizer"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def samples(self) -> Path:
        """What the model made of the prompts as training went on."""
        return self.root / "samples.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def attempts(self) -> Path:
        """The history of a job's attempts (:mod:`mgpu_pipe.runs.history`)."""
        return self.root / "attempts.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def profile(self) -> Path:
        """Traces of its steps, and what a GPU's memory held when it ran out."""
        return self.root / "profile"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def rank_metrics(self, rank: int) -> Path:
        """Times and memory of one of several ranks, by step."""
        return self.logs / f"rank-{rank}.csv"

    def rank_error(self, rank: int) -> Path:
        """Where a worker leaves its own error for the launcher; removed at each attempt's start."""
        return self.logs / f"rank-{rank}.error.json"


def cache_folder(configured: str | None) -> Path:
    """The folder of tokenised data: the configured one, ``$MGPU_PIPE_CACHE``, or the user's cache folder."""
    chosen = configured or os.environ.get("MGPU_PIPE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mgpu_pipe"


def private_folder(folder: Path) -> None:
    """Make the folder of cached data, for this user alone, or check that nobody else can write into the one there is.

    Raises:
        ConfigError: it belongs to somebody else, or others may write into it.
        OSError: it cannot be made.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(20, "this is a file", str(folder))
    if status.st_uid != os.geteuid():
        reason = "the cache belongs to another user"
        raise ConfigError("data.cache_dir", folder, "give a folder of your own, or set MGPU_PIPE_CACHE to one", reason)
    if status.st_mode & 0o077 and {entry.name for entry in folder.iterdir()} <= CACHE_CONTENT:
        folder.chmod(0o700)
    elif status.st_mode & 0o022:
        reason = "others can write into the cache"
        raise ConfigError("data.cache_dir", folder, "make it yours alone (chmod 700), or give another folder", reason)


def working_directory() -> str:
    """The folder that this program runs in.

    Raises:
        BadInputError: it was deleted.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise BadInputError(f"the working directory is gone ({error.strerror}); cd to a folder that exists") from error
