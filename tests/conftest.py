"""Shared by all tests: one cache of tokenised data, and a small corpus of real text."""

from __future__ import annotations

import compileall
import gc
import logging
import os
import signal
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mgpu_pipe
from mgpu_pipe import errors
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.inference import export_folder
from mgpu_pipe.launch.deepspeed_build import prepare_extensions
from mgpu_pipe.system.hardware import limit_threads
from mgpu_pipe.training.deepspeed.build_extension import FOLDER
from tests.support.needs import need_nvme, need_torch_compile
from tests.support.processes import share_server, start_server
from tests.support.program import check_from_server
from tests.support.shared_conf import share_conf
from tests.support.tables import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown  # noqa: F401  pytest finds hooks here

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: models are tiny, cores shared
os.environ.pop("COLUMNS", None)  # tables print whole where no terminal and no width cuts them
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for GPUs spoils CUDA for forked programs
limit_threads(os.environ)
# Ignored under nohup, and in what a script starts in the background; the programs that tests start would inherit it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
share_conf()


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package and the tests once: some thousand processes import them, and PYTHONDONTWRITEBYTECODE may be
    set. Pytest keeps what it makes of the tests' assertions, whose rewriting takes a third of collection."""
    sys.dont_write_bytecode = False
    if hasattr(config, "workerinput"):
        share_server(config.workerinput["fork_server"])
        return
    for folder in (Path(mgpu_pipe.__file__).parent, Path(__file__).parent):
        compileall.compile_dir(folder, quiet=2, workers=0)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of xdist fork from one server: its imports take a quarter of a minute."""
    node.workerinput["fork_server"] = start_server()


LONGEST = (
    *("slurm/test_disturbed", "objectives/test_contract", "parallel/test_compile", "objectives/test_recordings"),
    *("strategies/test_any_to_any", "slurm/test_batch_jobs", "objectives/test_vision_language"),
    *("runs/test_short_experiments", "inference/test_export_onnx", "planner/test_largest_micro_batch"),
    *("runs/test_going_on", "launch/test_supervisor", "slurm/test_array", "sweep/test_sweeps", "serving/test_serve"),
    *("test_docs", "strategies/test_axes", "objectives/test_sound_classification", "test_readme"),
    *("checkpoint/test_crash_points", "launch/test_link_check", "objectives/test_ctc", "runs/test_saving"),
    *("inference/test_answer_files", "launch/test_runs", "inference/test_encode", "strategies/test_matrix"),
    *("hub/test_names", "strategies/test_deepspeed", "slurm/test_jobs", "slurm/test_submit"),
    *("strategies/test_cuda_audit",),
)
"""The files that take longest, by the minute that they took on two cores, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, then those with a slow test: what several processes share ends with files of a few
    seconds."""
    tests, slow = Path(__file__).parent, {item.path for item in items if item.get_closest_marker("slow")}

    def turn(item: pytest.Item) -> int:
        name = item.path.relative_to(tests).with_suffix("").as_posix()
        return LONGEST.index(name) if name in LONGEST else len(LONGEST) + (item.path not in slow)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """What is imported by now stays; looking through it for garbage took a tenth of the fast tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_concealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test's environment conceals is not concealed in the next one's messages: a program begins with none."""
    monkeypatch.setattr(errors, "_hidden", {})


@pytest.fixture(autouse=True)
def exports_checked_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh interpreter for the check of an export imports torch and transformers: 5 seconds of processor time."""
    monkeypatch.setattr(export_folder, "subprocess", types.SimpleNamespace(run=check_from_server))


@pytest.fixture(autouse=True)
def nothing_silenced() -> Iterator[None]:
    """A test that turns warnings off turns them on again; others look for theirs."""
    yield
    assert logging.root.manager.disable == logging.NOTSET


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of the session keep tokenised data."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text files of uneven length: some of the standard library's sources."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for package in ("json", "email", "http", "logging", "xml/dom"):
        for source in sorted((library / package).glob("*.py")):
            text = source.read_text(encoding="utf-8")
            if text.strip():
                (folder / f"{package.replace('/', '-')}-{source.name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def nvme_extension() -> str:
    """Where DeepSpeed's NVMe access is compiled; it stays in the user's cache, since compiling takes minutes."""
    need_nvme()
    config, _ = compose(["strategy=zero3_nvme"])
    prepare_extensions(config.strategy, config.trainer, config.data.cache_dir)
    return os.environ.pop(FOLDER)


@pytest.fixture(scope="session")
def torch_compile() -> None:
    """torch.compile finds what it compiles with."""
    need_torch_compile()
