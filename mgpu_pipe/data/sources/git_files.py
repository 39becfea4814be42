"""``data=git_files``: the text files that a git repository tracks, a document each, as they are in the working tree.

A path is a folder of a repository, or a glob inside one, of which the tracked files are read. Binary and empty files,
links and submodules are left out. A file with a NUL byte in its first 8,000 is binary, as for git.
"""

from __future__ import annotations

import glob
import logging
import os
import subprocess
from pathlib import Path

from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.compressed import codec_of
from mgpu_pipe.data.data_source import DataSource
from mgpu_pipe.data.sources.text_files import FORMAT, check_text_file
from mgpu_pipe.data.text.documents import Source
from mgpu_pipe.data.text.file_source import check_listed
from mgpu_pipe.errors import ConfigError, ConfigErrors, raised_by

HEAD_BYTES = 8000
_SECONDS = 60
"""Seconds that git has to list a repository."""
_log = logging.getLogger(__name__)


def tracked_files(patterns: list[str], key: str) -> tuple[list[Path], int]:
    """Lists the tracked text files that ``patterns`` name, sorted within a pattern, each once.

    Returns:
        the files, and the number of tracked files that are left out as binary or empty.

    Raises:
        ConfigError: a pattern names no folder of a repository and no tracked file, or git is not installed.
    """
    chosen, left_out = dict[Path, None](), set[Path]()
    for pattern in patterns:
        listed = _list_tracked(pattern, key)
        if not listed:
            raise ConfigError(key, pattern, "track them by git add, or use data=text_files", "names no tracked file")
        for path in listed:
            if _is_text(path):
                chosen[path] = None
            else:
                left_out.add(path)
    if not chosen:
        fix = "give a repository with text files"
        raise ConfigError(key, ", ".join(patterns), fix, f"all {len(left_out)} tracked files are binary or empty")
    return list(chosen), len(left_out)


def _list_tracked(pattern: str, key: str) -> list[Path]:
    """Tracked plain files below a folder, or among the matches of a glob."""
    text = os.path.expanduser(pattern)
    if pattern.startswith(DATA):
        raise ConfigError(key, pattern, "clone it, and give its folder", "is no folder here")
    if os.path.isdir(text):
        return _list_folder(Path(text), pattern, key)
    matches = set(files.expand_paths([pattern], key))
    root = Path(text)
    while glob.has_magic(str(root)) or not root.is_dir():
        root = root.parent
    return [path for path in _list_folder(root, pattern, key) if path in matches]


def _list_folder(folder: Path, pattern: str, key: str) -> list[Path]:
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "ls-files", "-z", "--cached"]
    # Variables such as GIT_DIR would name another repository. Its own settings may name programs that fetch objects.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
    try:
        result = subprocess.run(command, capture_output=True, env=environment, timeout=_SECONDS, check=False)
    except FileNotFoundError as error:
        raise ConfigError("data.source", SOURCE.name, "install git", "git is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(key, pattern, "give a smaller folder", f"git lists no files in {_SECONDS} s") from error
    if result.returncode:
        problem = (os.fsdecode(result.stderr).splitlines() or ["git fails"])[0].removeprefix("fatal: ")
        fix = "give a folder of a git repository"
        if "dubious ownership" in problem:
            fix = f"if you trust its owner: git config --global --add safe.directory {os.path.realpath(folder)}"
        raise ConfigError(key, pattern, fix, problem)
    names = [os.fsdecode(name) for name in result.stdout.split(b"\0") if name]
    return sorted(folder / name for name in dict.fromkeys(names) if _is_inside(folder, name))


def _is_inside(folder: Path, name: str) -> bool:
    """Whether a name of the index is a file below ``folder`` and no link leads to it; an index may hold any name."""
    path, root = folder / name, os.path.join(os.path.realpath(folder), "")
    return path.is_file() and os.path.realpath(path) == root + name


def _is_text(path: Path) -> bool:
    """Whether a file is not empty, not compressed and not binary; True for one that cannot be read, as an error."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return True
    return bool(head) and b"\0" not in head and codec_of(path) is None


def check_repositories(model: ModelConfig, data: DataConfig) -> None:
    """Checks that the paths are of repositories, and that their first text files are UTF-8."""

    def check_paths(patterns: list[str], key: str) -> None:
        check_listed(data, tracked_files(patterns, key)[0], check_text_file)

    errors = raised_by(lambda: check_paths(data.paths, "data.paths"))
    if data.validation_paths:
        errors += raised_by(lambda: check_paths(data.validation_paths, "data.validation_paths"))
    if errors:
        raise ConfigErrors(errors)


def open_repositories(data: DataConfig, cache: Path, progress: Progress, key: str) -> Source:
    paths, left_out = tracked_files(data.paths, key)
    if left_out:
        _log.warning("%s: %d tracked files are binary or empty and left out", key, left_out)
    return FORMAT.open_files(data, paths, cache, progress)


SOURCE = DataSource(name="git_files", reads_files=True, check=check_repositories, open=open_repositories)
