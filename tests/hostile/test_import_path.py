"""A working folder full of modules named as Python's own and as the libraries: none is executed, users' classes are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.import_path import other_python_module, python_module
from tests.support.command import environment

OWN = "mine"
CALLBACK = """
import os, pytorch_lightning
class Mark(pytorch_lightning.Callback):
    def on_train_end(self, trainer, module):
        open(os.environ["MINE"], "a").write("used")
"""
TINY = (
    *("model=llama_tiny", "data=synthetic", "logger=none", "trainer.accelerator=cpu", "trainer.max_steps=2"),
    *("data.seq_len=32", "data.global_batch_size=4", "run.root=runs", f"+callbacks.mark._target_={OWN}.Mark"),
)
BEFORE_ITS_FIRST_LINE = "import sys, runpy; print(*(name.partition('.')[0] for name in sys.modules))"
"""What ``python -m`` and torchrun's ``-m`` import of the working folder before any line of the program runs."""
INSTALLED = (
    "from importlib.metadata import packages_distributions as found; print(*(n for n in found() if n.isidentifier()))"
)
"""Asked of a fresh interpreter: setuptools, once imported, adds packages that it alone sees."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder, in which every module but the user's own leaves its name in ``executed``."""
    work = tmp_path / "work"
    work.mkdir()
    installed = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, check=True)
    early = subprocess.run([sys.executable, "-c", BEFORE_ITS_FIRST_LINE], capture_output=True, text=True, check=True)
    for name in {*sys.stdlib_module_names, *installed.stdout.split()} - {
        *early.stdout.split(),
        "mgpu_pipe",
        "tests",
        "__main__",
    }:
        (work / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n")
    (work / f"{OWN}.py").write_text(CALLBACK)
    return work


def run(folder: Path, cache: Path, *command: str) -> str:
    """Run ``command`` in the folder; nothing of the folder may have been executed but the user's class."""
    surroundings = {**environment(cache), "MINE": str(folder.parent / "used")}
    surroundings["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=300)
    executed = folder.parent / "executed"
    assert not executed.exists(), f"{executed.read_text()}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def times_used(folder: Path) -> int:
    used = folder.parent / "used"
    return used.read_text().count("used") if used.exists() else 0


@pytest.mark.slow
def test_a_class_that_the_check_has_to_import_comes_from_the_working_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "made.py").write_text("from mine import Mark as Base\nMark = type('Mark', (Base,), {})\n")
    for name in {*sys.stdlib_module_names} - {*sys.modules}:
        (folder / f"{name}.py").unlink(missing_ok=True)  # from here on what is installed nowhere is taken from there
    words = [word.replace("mine.Mark", "made.Mark") for word in TINY]
    run(folder, tmp_path / "cache", sys.executable, "-m", "mgpu_pipe", "check", *words)


@pytest.mark.slow
def test_the_check_of_a_run_imports_nothing_of_the_working_folder(folder: Path, tmp_path: Path) -> None:
    betas = "optimizer.options.amsgrad=true"  # tried in a process of its own
    run(folder, tmp_path / "cache", sys.executable, "-m", "mgpu_pipe", "check", betas, *TINY)


def test_processes_that_tokenise_import_nothing_of_the_working_folder(folder: Path, tmp_path: Path) -> None:
    work = "from mgpu_pipe.data.ordered_work import work_in_order; from operator import methodcaller;"
    work += "print(list(work_in_order(['a', 'b'], 2, methodcaller, ('upper',), ahead=1, what='x')))"
    assert "['A', 'B']" in run(folder, tmp_path / "cache", sys.executable, "-c", f"import sys; sys.path.pop(0); {work}")


def test_a_job_by_another_interpreter_looks_in_the_working_folder_last(folder: Path, tmp_path: Path) -> None:
    words = other_python_module(sys.executable, "mgpu_pipe.launch.slurm.slurm_job")
    with pytest.raises(AssertionError, match="does not see the run's folder"):
        run(folder, tmp_path / "cache", *words, str(tmp_path / "nothing"))


@pytest.mark.slow
def test_workers_take_users_classes_and_nothing_else_from_the_working_folder(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "cache", sys.executable, "-m", "mgpu_pipe", "strategy=ddp", "trainer.devices=2", *TINY)
    assert times_used(folder) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_world_of_torchruns_and_a_sweep_do_likewise(folder: Path, tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    run(
        folder,
        tmp_path / "cache",
        torchrun,
        "--nproc_per_node=2",
        "-m",
        "mgpu_pipe",
        "strategy=ddp",
        "trainer.devices=2",
        *TINY,
    )
    assert times_used(folder) == 2
    run(folder, tmp_path / "cache", sys.executable, "-m", "mgpu_pipe", "-m", "seed=1,2", "sweep.parallel=2", *TINY)
    assert times_used(folder) == 4


def test_own_modules_run_from_this_very_package(tmp_path: Path) -> None:
    command = [*python_module("mgpu_pipe", "version")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
