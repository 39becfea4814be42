"""Every family of the table, and every file of ``mgpu_pipe/architectures``, is found by its ``model_type``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mgpu_pipe.architectures
from mgpu_pipe.architectures.config_source import auto_mapping
from mgpu_pipe.architectures.families import FAMILIES
from mgpu_pipe.architectures.family import Family, Stages
from mgpu_pipe.architectures.find import family_of, stages_of

FRAME = {"__init__", "config_source", "families", "family", "find", "library_plans", "pictures", "patch_grids"}
FOLDER = Path(mgpu_pipe.architectures.__file__).parent
FILES = sorted({*FAMILIES, *(path.stem for path in FOLDER.glob("*.py") if path.stem not in FRAME)})


@pytest.mark.parametrize("name", FILES)
def test_each_file_names_a_model_type_and_is_found(name: str) -> None:
    (model_type,) = [one for one in auto_mapping("CONFIG_MAPPING_NAMES") if one.replace("-", "_") == name]
    assert family_of(model_type) is not family_of("no such family")


def test_a_family_without_a_file_is_what_transformers_says_of_it() -> None:
    assert "apertus" not in FILES
    assert family_of("apertus") == Family()
    assert stages_of("apertus") == Stages("embed_tokens", "layers", "norm")
    assert stages_of("gpt_neox") == Stages("embed_in", "layers", "final_layer_norm", after_embedding=("emb_dropout",))
    assert stages_of("mamba") is None


def test_no_torch_is_needed() -> None:
    code = "import sys; from mgpu_pipe.architectures.find import stages_of; stages_of('gemma2'); stages_of('falcon')"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode == 0
