"""A run that starts from a folder of the peft package. Oracle: peft's own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.checks.model import check_names
from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, materialise, run_model
from mgpu_pipe.models.slices import FolderWeights
from mgpu_pipe.training.initial_weights import build_model
from tests.models.tiny import tiny_model, write_folder

KEYS = PeftConfig(name="lora", r=4, alpha=12.0, targets=["q_proj", "v_proj"], train_also=["lm_head.*"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    return made_by_peft(tmp_path_factory.mktemp("peft"))


def made_by_peft(root: Path, **options: Any) -> tuple[Path, Path, Any]:
    """A base, an adapter that peft trained nothing into but random numbers, and peft's model."""
    from peft import LoraConfig, get_peft_model

    model: Any = materialise(build_meta(tiny_model("llama", tie_word_embeddings=False)), 5, "cpu")
    write_folder(model, root / "base")
    told = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    config = LoraConfig(**{**told, **options})
    theirs = get_peft_model(model, config)
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    theirs.save_pretrained(str(root / "adapter"))
    return root / "base", root / "adapter", theirs.eval()


def run_of(folders: tuple[Path, Path, Any], **keys: Any) -> RunConfig:
    run = RunConfig(seed=7)
    run.model.type, run.model.path, run.model.config = None, str(folders[0]), {}
    run.data.seq_len = 32
    run.peft = replace(KEYS, init_from=str(folders[1]), **keys)
    return run


WAYS = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "read by each rank"])


@WAYS
def test_it_begins_as_pefts_own_model(folders: tuple[Path, Path, Any], sharded: bool) -> None:
    begins_as_peft(run_of(folders), folders[2], sharded)


@WAYS
def test_an_adapter_with_magnitudes_does_too(tmp_path: Path, sharded: bool) -> None:
    folders = made_by_peft(tmp_path, use_dora=True)
    begins_as_peft(run_of(folders, name="dora"), folders[2], sharded)


def begins_as_peft(run: RunConfig, truth: Any, sharded: bool) -> None:
    if sharded:
        model: Any = run_model(run)
        FolderWeights(run.model, run.seed, run.peft)(model, torch.device("cpu"))
    else:
        model = build_model(run, torch.device("cpu"), False)[0]
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = [one(input_ids=ids).logits for one in (model.eval(), truth)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"r": 8}, "peft.r=8: the adapter of .* has 4; use 4"),
        ({"alpha": 3.0}, "peft.alpha=3.0: the adapter of .* has 12; use 12"),
        ({"name": "dora"}, "peft=dora: the adapter of .* is one of lora; use peft=lora"),
        ({"rslora": True}, "peft.rslora=true: the adapter of .* has False; use False"),
        (
            {"targets": ["q_proj"]},
            r"it holds .*v_proj.*, which the run does not train; use peft.targets=\[q_proj,v_proj\]",
        ),
        ({"targets": ["all-linear"]}, r"it has no .*, and the run trains .*; use peft.targets=\[q_proj,v_proj\]"),
        ({"train_also": []}, "it holds base_model.model.lm_head.weight, .* or name it in peft.train_also"),
        ({"init_from": "/nowhere"}, "give a folder with adapter_config.json and adapter_model.safetensors"),
    ],
)
def test_another_adapter_is_refused(folders: tuple[Path, Path, Any], keys: dict[str, Any], said: str) -> None:
    run = run_of(folders)
    run.peft = replace(run.peft, **keys)
    with pytest.raises(ConfigError, match=said):
        check_names(run)
    with pytest.raises(ConfigError, match=said):
        build_model(run, torch.device("cpu"), False)


def test_other_kinds_of_adapters_and_other_bases_are_refused(folders: tuple[Path, Path, Any], tmp_path: Path) -> None:
    import json
    import shutil

    other = shutil.copytree(folders[1], tmp_path / "adapter")
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**settings, "bias": "all"}))
    run = run_of((folders[0], other, None))
    with pytest.raises(ConfigError, match="its bias is 'all'; merge it with the peft package"):
        build_model(run, torch.device("cpu"), False)
    wider = tiny_model("llama", tie_word_embeddings=False, hidden_size=96)
    write_folder(materialise(build_meta(wider), 5, "cpu"), tmp_path / "wider")
    with pytest.raises(ConfigError, match="give the model that it was trained on"):
        check_names(run_of((tmp_path / "wider", folders[1], None)))
