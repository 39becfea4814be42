"""Where compiled extensions are kept, and that what is compiled is not compiled again. Nothing is compiled here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mgpu_pipe.config import paths
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.launch import deepspeed_build as extensions
from mgpu_pipe.training.deepspeed.build_extension import FOLDER


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    found, _ = compose(["strategy=zero3_nvme", f"data.cache_dir={tmp_path}"])
    return found


def test_machines_of_other_processors_keep_their_own(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = extensions.extension_folder(config.data.cache_dir, "cpu")
    other = tmp_path / "cpuinfo"
    other.write_text("flags\t\t: fpu sse sse2\n")
    monkeypatch.setattr(paths, "CPU_INFORMATION", other)
    assert extensions.extension_folder(config.data.cache_dir, "cpu") != here


def test_what_is_compiled_is_taken_whatever_a_killed_build_left(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = extensions.extension_folder(config.data.cache_dir, "cpu")
    (folder / "async_io").mkdir(parents=True)
    (folder / "async_io" / "lock").touch()
    (folder / extensions.READY).touch()
    monkeypatch.setattr(extensions, "_build", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setenv(FOLDER, "")  # what is set below goes again
    extensions.prepare_extensions(config.strategy, config.trainer, config.data.cache_dir)
    assert os.environ[FOLDER] == str(folder)
