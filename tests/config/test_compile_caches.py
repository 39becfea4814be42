"""Compiled code is kept where nobody else can put any; whoever can is refused in one line."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu_pipe.config.paths import FOLDERS, compile_caches
from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.launch.world import run_environment
from tests.support.needs import need_torch_compile

NOBODY = 65534


def test_the_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    found = compile_caches(str(tmp_path / "cache"), {})
    assert found.keys() == FOLDERS.keys()
    for folder in map(Path, found.values()):
        assert folder.is_dir() and folder.is_relative_to(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_the_user_names_stays(tmp_path: Path) -> None:
    found = compile_caches(str(tmp_path / "cache"), {"TRITON_CACHE_DIR": str(tmp_path / "mine")})
    assert found.keys() == FOLDERS.keys() - {"TRITON_CACHE_DIR"}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_others_can_write_into_is_refused(name: str, mode: int, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(ConfigError, match=f"{name}=.*another user of this machine can put code there; give a folder"):
        compile_caches(str(tmp_path / "cache"), {name: str(tmp_path / "open")})
    with pytest.raises(ConfigError, match=f"{name}=.*another user can make this folder"):
        compile_caches(str(tmp_path / "cache"), {name: str(tmp_path / "open" / "missing")})


def test_compiled_code_that_others_could_write_is_not_taken(tmp_path: Path) -> None:
    made = compile_caches(str(tmp_path / "cache"), {})
    for mode in (0o770, 0o777):
        (tmp_path / "cache").chmod(mode)
        with pytest.raises(
            ConfigError, match=r"data.cache_dir=.*others can write into the cache, and may have put code"
        ):
            compile_caches(str(tmp_path / "cache"), {})
    (tmp_path / "cache").chmod(0o700)
    assert compile_caches(str(tmp_path / "cache"), {}) == made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="another user of this machine can put code there"):
        compile_caches(str(tmp_path / "cache"), {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "theirs")})
    with pytest.raises(ConfigError, match=r"data.cache_dir=.*the cache belongs to another user"):
        compile_caches(str(tmp_path / "theirs"), {})


def test_a_runs_processes_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    config = RunConfig(data=DataConfig(cache_dir=str(tmp_path / "cache")))
    assert (
        run_environment(config.trainer, config.data.cache_dir).items()
        >= compile_caches(str(tmp_path / "cache"), {}).items()
    )


COMPILES = """
import torch
from mgpu_pipe.system.compat.torch_private import compile_function
assert compile_function(lambda x: (x * 2).sin())(torch.zeros(64)).sum() == 0
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nothing_that_is_compiled_lies_in_the_shared_folder_for_temporary_files(tmp_path: Path) -> None:
    """Inductor keeps precompiled headers, which are code, there by itself: whoever made the folder can change them."""
    need_torch_compile()
    theirs = tmp_path / "tmp" / f"torchinductor_{getpass.getuser()}"
    theirs.mkdir(parents=True)
    surroundings = {**os.environ, "TMPDIR": str(theirs.parent), **compile_caches(str(tmp_path / "cache"), {})}
    subprocess.run([sys.executable, "-c", COMPILES], env=surroundings, check=True)
    assert not list(theirs.iterdir())
    assert any((tmp_path / "cache" / "compiled").rglob("*.so"))
