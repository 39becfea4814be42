"""``data=stdlib_text``: documentation and source text of the running Python's standard library."""

from __future__ import annotations

from pathlib import Path

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.sources.text_files import FORMAT
from mgpu_pipe.data.text.documents import Source


def check_library(model: ModelConfig, data: DataConfig) -> None:
    files.check_stdlib()


def open_library(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    return FORMAT.open_files(data, files.stdlib_files(), cache, progress)


SOURCE = DataSource(name="stdlib_text", check=check_library, open=open_library)
