"""What some tests need of the machine beyond Python, make and g++, and the list of tests that went without it.

A test that lacks something is skipped with a reason that says how to get it: ``... apt-get install <packages>``.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from mgpu_pipe.checks.check_sizes import compiler_errors
from mgpu_pipe.checks.devices import compile_errors

NOT_IMPORTED = re.compile(r"could not import '(\w+)")
NOBODY = 65534
"""Number of a user who owns nothing."""
INSTALL = re.compile(r"\b(apt-get|pip) install ([a-z0-9][a-z0-9+.-]*[a-z0-9+])")


def need_nvme() -> None:
    """Skip where DeepSpeed's NVMe access cannot be compiled."""
    _need(list(compiler_errors()))


def need_torch_compile() -> None:
    """Skip where torch.compile has nothing to compile with."""
    _need(compile_errors())


def need_digits() -> None:
    """Skip where scikit-learn, which brings the handwritten digits, is not installed."""
    if find_spec("sklearn") is None:
        pytest.skip("the handwritten digits come with scikit-learn: pip install scikit-learn")


def need_speech(*programs: str) -> None:
    """Skip where soundfile and jiwer, or the programs that speak digits, are not installed."""
    for package in ("soundfile", "jiwer"):
        if find_spec(package) is None:
            pytest.skip(f"recordings need {package}: pip install {package}")
    for program in programs:
        if which(program) is None:
            pytest.skip(f"spoken digits need {program}: apt-get install {program}")


def _need_module(name: str, message: str) -> None:
    if find_spec(name) is None:
        pytest.skip(message)


def need_pyav() -> None:
    """Skip where PyAV, which reads video files, is not installed."""
    _need_module("av", "video files need PyAV: pip install av")


def need_ffmpeg() -> None:
    """Skip where the program ffmpeg, which writes and shows videos, is not installed."""
    if which("ffmpeg") is None:
        pytest.skip("videos of other programs need ffmpeg: apt-get install ffmpeg")


def need_mlflow() -> None:
    """Skip where MLflow, or what its local database needs, is not installed."""
    for module, package in (("mlflow", "mlflow-skinny"), ("sqlalchemy", "sqlalchemy"), ("alembic", "alembic")):
        if find_spec(module) is None:
            pytest.skip(f"MLflow's local store needs {package}: pip install {package}")


def need_wandb() -> None:
    """Skip where W&B's client is not installed."""
    _need_module("wandb", "runs of W&B need its client: pip install wandb")


def need_comet() -> None:
    """Skip where Comet's client is not installed."""
    _need_module("comet_ml", "runs of Comet need its client: pip install comet-ml")


def need_trackio() -> None:
    """Skip where Trackio is not installed."""
    _need_module("trackio", "runs of Trackio need it: pip install trackio")


def need_server() -> None:
    """Skip where what the embedded server is built on is not installed."""
    for package in ("starlette", "uvicorn"):
        _need_module(package, f"the embedded server needs {package}: pip install {package}")


def need_openai() -> None:
    """Skip where OpenAI's client is not installed."""
    _need_module("openai", "the server's oracle is OpenAI's client: pip install openai")


@contextmanager
def nobodys_folder() -> Iterator[Path]:
    """A folder of this process's user. For the block root is nobody, for root may write everywhere."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


def _need(missing: Sequence[Exception]) -> None:
    if missing:
        pytest.skip("; ".join(map(str, missing)))


def show_skipped(terminalreporter: Any) -> None:
    """Print how many tests were skipped, why, and the line that installs all that was missing."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if not reasons:
        return
    terminalreporter.section("skipped")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count:4} x {reason}")
    lines = install_lines(reasons)
    if lines:
        terminalreporter.line(f"to run those that lack a package: {' && '.join(lines)}")


def install_lines(reasons: Sequence[str] | Counter[str]) -> list[str]:
    """One command a package manager, for everything that the reasons name."""
    packages: dict[str, set[str]] = {}
    for reason in reasons:
        for manager, package in INSTALL.findall(reason):
            packages.setdefault(manager, set()).add(package)
    return [f"{manager} install {' '.join(sorted(packages[manager]))}" for manager in sorted(packages)]


def _reason(report: Any) -> str:
    """Of a skipped test's report, whose text is (file, line, reason); of a bare importorskip with what installs it."""
    text = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else str(report.longrepr)
    missing = NOT_IMPORTED.search(text)
    return (
        f"needs {missing[1]}: pip install {missing[1]}" if missing else " ".join(text.removeprefix("Skipped: ").split())
    )
