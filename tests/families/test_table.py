"""Every family of the table is known to transformers, and only the table names families."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mgpu_pipe
from mgpu_pipe.architectures.config_source import auto_mapping
from mgpu_pipe.architectures.family import Family, Stages
from mgpu_pipe.architectures.find import FAMILIES, family_of, stages_of

PACKAGE = Path(mgpu_pipe.__file__).parent
LIBRARY = "fields of transformers' classes, measured per class"
FORMAT = "names that GGUF gives to architectures and tokenizers"
NAMESAKE = "another thing of that name"
NAMES_FAMILIES = {
    "data/audio/filter_bank.py": "the recipe of one extractor",
    "data/text/caption_tokens.py": "the text tower of SigLIP reads its padding",
    "data/model_field.py": "the default text tower of transformers",
    "data/sources/git_files.py": NAMESAKE,
    "data/text/chat_templates.py": "names of shipped templates",
    "data/text/packed_dataset.py": NAMESAKE,
    "data/text/prepared_rows.py": NAMESAKE,
    "inference/check_gguf.py": FORMAT,
    "inference/gguf/layouts.py": FORMAT,
    "inference/gguf/model_metadata.py": FORMAT,
    "inference/gguf/gguf_tokenizer.py": FORMAT,
    "inference/gguf/tokenizer_kinds.py": FORMAT,
    "checks/check_model.py": "examples in errors",
    "models/field_ranges.py": LIBRARY,
    "models/field_sizes.py": LIBRARY,
    "models/fields.py": "a type that transformers' tables lack",
    "models/kernels/layers.py": "kernels of Liger, by the classes that it patches",
    "models/weights/folder.py": "a rule of transformers for a type; a name of a quantisation",
    "models/weights/model_files.py": "names of transformers 4 for fields, in families with unusual ones",
    "models/weights/sentence_modules.py": "file names of sentence-transformers",
    "objectives/picture_keys.py": "a type whose towers are of any kind; a name of the objective",
    "objectives/text_keys.py": "a field that one class reads",
    "runs/environment.py": NAMESAKE,
    "training/profiling/measure_hardware.py": "the model that measures a machine",
}
"""Files outside of the table with constants that are model types, and the reason."""


def test_each_family_is_a_model_type_of_transformers() -> None:
    assert set(FAMILIES) <= set(auto_mapping("CONFIG_MAPPING_NAMES"))


def test_a_family_without_an_entry_is_what_transformers_says_of_it() -> None:
    assert "apertus" not in FAMILIES
    assert family_of("apertus") == Family()
    assert stages_of("apertus") == Stages("embed_tokens", "layers", "norm")
    assert stages_of("gpt_neox") == Stages("embed_in", "layers", "final_layer_norm", after_embedding=("emb_dropout",))
    assert stages_of("mamba") is None


def test_only_the_table_names_families() -> None:
    types, naming = set(auto_mapping("CONFIG_MAPPING_NAMES")), set()
    for file in PACKAGE.rglob("*.py"):
        if file.is_relative_to(PACKAGE / "architectures"):
            continue
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if any(isinstance(node, ast.Constant) and node.value in types for node in nodes):
            naming.add(file.relative_to(PACKAGE).as_posix())
    assert naming == set(NAMES_FAMILIES)


def test_no_torch_is_needed() -> None:
    code = "import sys; from mgpu_pipe.architectures.find import stages_of; stages_of('gemma2'); stages_of('falcon')"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode == 0
