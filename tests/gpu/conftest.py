"""Where the tests of this folder run: on a GPU where there is one, else every one of them dry: small, on the CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs.support import MEASURED
from tests.support.command import column, metrics, mgpu, mgpu_anew, run_folder
from tests.support.needs import INSTALL
from tests.support.tables import TOLD

# Of programs that tests start: several compile beside one another, and their models are tiny.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

STEPS = 2
SHORT = (
    f"trainer.max_steps={STEPS}",
    f"trainer.val_every_n_steps={STEPS}",
    "data.global_batch_size=4",
    "data.validation_max_samples=4",
)
"""Of a dry run."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """A test that is skipped for want of a GPU fails: it needs a dry form. One that lacks a package says which."""
    report = yield
    if report.skipped and not torch.cuda.is_available() and not INSTALL.search(str(report.longrepr)):
        report.outcome, report.longrepr = "failed", f"a test of tests/gpu needs a dry form: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Programs:
    """Runs of the program in a test: on the GPU, to be compared; or dry, short and on the CPU."""

    cache: Path
    folder: Path
    dry: bool
    done: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def on_cpu(self, *overrides: str) -> Path:
        """The run's folder; the same run is run once."""
        if overrides not in self.done:
            out = mgpu_anew(self.cache, self.folder, *overrides, "trainer.accelerator=cpu")
            self.done[overrides] = run_folder(out)
        return self.done[overrides]

    def on_gpu(self, *overrides: str) -> Path:
        """The run's folder. Dry, it is on the CPU, a few steps long, and its figures are told."""
        if not self.dry:
            return run_folder(mgpu_anew(self.cache, self.folder, *overrides, "trainer.accelerator=gpu"))
        folder = run_folder(mgpu(self.cache, self.folder, *overrides, "trainer.accelerator=cpu", *SHORT))
        found = {name: column(folder, name) for name in MEASURED}
        assert [int(row["step"]) for row in metrics(folder)] == list(range(1, STEPS + 1))
        assert all(found.values()) and all(math.isfinite(value) for by in found.values() for value in by.values())
        test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].removesuffix(" (call)")
        TOLD.append(f"dry: {test}: " + ", ".join(f"{name} {by[STEPS]:.6g}" for name, by in found.items()))
        return folder

    def hold(self, chosen: list[str], alone: list[str], compare: Callable[[Path, Path], None]) -> None:
        """Compare a run on the GPU with one of a CPU process; dry, there is the first one alone."""
        mine = self.on_gpu(*chosen)
        if not self.dry:
            compare(mine, self.on_cpu(*alone))

    def fails(self, *overrides: str) -> str:
        """What a run says whose workers fail."""
        words = (*overrides, f"trainer.accelerator={'cpu' if self.dry else 'gpu'}")
        if self.dry:
            return mgpu(self.cache, self.folder, *words, *SHORT, code=1)
        return mgpu_anew(self.cache, self.folder, *words, code=1)

    def refused(self, *overrides: str) -> str:
        """What is said to a run that only a GPU could do."""
        return mgpu(self.cache, self.folder, *overrides, "trainer.accelerator=cpu", code=2)


@pytest.fixture
def no_waits(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the host must not wait for the GPU."""

    @contextmanager
    def forbidden() -> Iterator[None]:
        if device.type == "cpu":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidden


@pytest.fixture
def programs(cache: Path, tmp_path: Path, device: torch.device) -> Programs:
    return Programs(cache, tmp_path, device.type == "cpu")


def sampled(names: Any, *chosen: str) -> list[Any]:
    """Parameters of a test; dry, those that are not ``chosen`` are tried by make test-all."""
    marks = () if torch.cuda.is_available() else (pytest.mark.exhaustive,)
    return [pytest.param(name, marks=() if name in chosen else marks) for name in names]
