"""A run that starts from a folder of the peft package. Oracle: peft's own model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mgpu_pipe.checks.check_model import check_built
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.inference.model_folder import write_adapter
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.peft_folder import FIELDS
from mgpu_pipe.models.build import build_meta, materialise, run_model
from mgpu_pipe.models.weights.slices import FolderWeights
from mgpu_pipe.training.initial_weights import build_model
from tests.models.tiny import tiny_model, write_folder

KEYS = PeftConfig(name="lora", r=4, alpha=12.0, targets=["q_proj", "v_proj"], train_also=["lm_head.*"])
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    return made_by_peft(tmp_path_factory.mktemp("peft"))


def made_by_peft(
    root: Path, fields: Mapping[str, Any] = UNTIED, kind: str = "llama", **options: Any
) -> tuple[Path, Path, Any]:
    """A base, an adapter that peft trained nothing into but random numbers, and peft's model."""
    from peft import LoraConfig, get_peft_model

    model: Any = materialise(build_meta(tiny_model(kind, **fields)), 5, "cpu")
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
    run.peft = replace(KEYS, **{"init_from": str(folders[1]), **keys})
    return run


WAYS = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "read by each rank"])


@WAYS
def test_it_begins_as_pefts_own_model(folders: tuple[Path, Path, Any], sharded: bool) -> None:
    begins_as_peft(run_of(folders), folders[2], sharded)


@WAYS
def test_an_adapter_with_magnitudes_does_too(tmp_path: Path, sharded: bool) -> None:
    folders = made_by_peft(tmp_path, use_dora=True)
    begins_as_peft(run_of(folders, name="dora"), folders[2], sharded)


def test_an_adapter_of_falcons_linear_layers_does_too(tmp_path: Path) -> None:
    targets = ["query_key_value", "dense_4h_to_h"]
    folders = made_by_peft(tmp_path, kind="falcon", target_modules=targets)
    begins_as_peft(run_of(folders, targets=targets), folders[2], False)


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
        check_built(run)
    with pytest.raises(ConfigError, match=said):
        build_model(run, torch.device("cpu"), False)


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({"layers_to_transform": [1]}, ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"]),
        ({"target_modules": r".*\.(q|v)_proj"}, ["model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj"]),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}, ["model.layers.*.self_attn.q_proj"]),
    ],
)
def test_the_targets_that_a_refusal_names_fit(tmp_path: Path, fields: dict[str, Any], targets: list[str]) -> None:
    folders = made_by_peft(tmp_path, **fields)
    for wrong in (["all-linear"], ["k_proj"]):
        with pytest.raises(ConfigError, match=re.escape(f"use peft.targets=[{','.join(targets)}], ")):
            check_built(run_of(folders, targets=wrong))
    begins_as_peft(run_of(folders, targets=targets), folders[2], False)


def test_other_kinds_of_adapters_and_other_bases_are_refused(folders: tuple[Path, Path, Any], tmp_path: Path) -> None:
    run = with_settings(folders, tmp_path, {**settings_of(folders), "bias": "all"})
    with pytest.raises(ConfigError, match="its bias is 'all'; merge it with the peft package"):
        build_model(run, torch.device("cpu"), False)
    wider = tiny_model("llama", tie_word_embeddings=False, hidden_size=96)
    write_folder(materialise(build_meta(wider), 5, "cpu"), tmp_path / "wider")
    with pytest.raises(ConfigError, match="give the model that it was trained on"):
        check_built(run_of((tmp_path / "wider", folders[1], None)))


CHANGED: dict[str, Any] = {
    **{"peft_type": "LOHA", "bias": "all", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}},
    **{"megatron_config": {"tensor_model_parallel_size": 1}, "trainable_token_indices": [1]},
    **{"velora_config": {"num_groups": 1}, "alora_invocation_tokens": [1, 2], "use_qalora": True},
    **{"monteclora_config": {"num_samples": 2}, "layer_replication": [[0, 1], [0, 2]], "lora_bias": True},
    **{"target_parameters": ["mlp.weight"], "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2}},
    **{"kasa_config": {"beta": 0.1}, "init_lora_weights": "pissa", "r": 2, "lora_alpha": 3, "use_rslora": True},
    **{"use_dora": True},
}
"""Values of peft's fields under which its tensors mean something else."""
UNCHANGED: dict[str, Any] = {
    **{"task_type": "CAUSAL_LM", "auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
    **{"peft_version": "0.17.0", "base_model_name_or_path": "elsewhere", "revision": "main"},
    **{"inference_mode": False, "target_modules": "all-linear", "exclude_modules": ["k_proj"], "lora_dropout": 0.5},
    **{"fan_in_fan_out": True, "modules_to_save": ["lm_head"], "init_lora_weights": "gaussian"},
    **{"layers_to_transform": [0, 1], "layers_pattern": "layers", "megatron_core": "megatron.other"},
    **{"loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0}, "corda_config": {"corda_method": "kpm"}},
    **{"lora_ga_config": {"direction": "ArB2r"}, "qalora_group_size": 32},
    **{"runtime_config": {"ephemeral_gpu_offload": True}, "ensure_weight_tying": True},
}
"""Values of peft's fields that leave what its tensors compute as it is."""


def test_every_field_of_peft_is_known() -> None:
    from dataclasses import fields as fields_of

    from peft import LoraConfig

    assert {field.name for field in fields_of(LoraConfig)} <= FIELDS
    assert set(CHANGED) | set(UNCHANGED) == FIELDS


def with_settings(folders: tuple[Path, Path, Any], root: Path, settings: object) -> RunConfig:
    other = shutil.copytree(folders[1], root / "adapter")
    (other / "adapter_config.json").write_text(json.dumps(settings))
    return run_of((folders[0], other, None))


def settings_of(folders: tuple[Path, Path, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folders[1] / "adapter_config.json").read_text())
    return settings


@pytest.mark.parametrize("name", CHANGED)
def test_a_field_that_changes_what_is_computed_is_refused(
    folders: tuple[Path, Path, Any], tmp_path: Path, name: str
) -> None:
    run = with_settings(folders, tmp_path, {**settings_of(folders), name: CHANGED[name]})
    with pytest.raises(ConfigError) as error:
        check_built(run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_field_that_changes_nothing_is_read(folders: tuple[Path, Path, Any], tmp_path: Path, name: str) -> None:
    begins_as_peft(with_settings(folders, tmp_path, {**settings_of(folders), name: UNCHANGED[name]}), folders[2], False)


def test_every_other_kind_of_adapter_and_unknown_fields_are_refused(
    folders: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    plain = settings_of(folders)
    others: list[object] = [{**plain, "peft_type": kind.value} for kind in PEFT_TYPE_TO_CONFIG_MAPPING]
    assert len(others) > 20
    others.remove(plain)
    newer: list[object] = [{**plain, "a_newer_field": 16}, {"r": 4}, [], "LORA", 7]
    for number, settings in enumerate([*others, *newer]):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ConfigError, match=r"^peft\.init_from="):
            check_built(with_settings(folders, tmp_path / str(number), settings))


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_2", "olora"])
def test_adapters_that_changed_their_base_are_refused(tmp_path: Path, way: str) -> None:
    with pytest.raises(ConfigError, match=f"its init_lora_weights is '{way}'"):
        check_built(run_of(made_by_peft(tmp_path, init_lora_weights=way)))


TIED = {"tie_word_embeddings": True}


@WAYS
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_tied_embedding_that_peft_trained_is_read(tmp_path: Path, sharded: bool, module: str) -> None:
    options = {"modules_to_save": [module], "ensure_weight_tying": True}
    folders = made_by_peft(tmp_path, TIED, **options)
    begins_as_peft(run_of(folders, train_also=["embed_tokens.*"]), folders[2], sharded)


def test_a_tied_embedding_that_peft_untied_is_refused(tmp_path: Path) -> None:
    folders = made_by_peft(tmp_path, TIED, modules_to_save=["embed_tokens"])
    with pytest.raises(ConfigError, match=r"it has no base_model.model.lm_head.weight: peft leaves it as the base has"):
        check_built(run_of(folders, train_also=["embed_tokens.*"]))
    both = tmp_path / "both"
    both.mkdir()
    folders = made_by_peft(both, TIED, modules_to_save=["embed_tokens", "lm_head"])
    with pytest.raises(ConfigError, match=r"differ, and the model ties lm_head.weight to model.embed_tokens.weight"):
        build_model(run_of(folders, train_also=["embed_tokens.*"]), torch.device("cpu"), False)


@pytest.mark.parametrize("pattern", ["embed_tokens.*", "lm_head.*"])
def test_a_trained_tied_embedding_is_pefts_head_too(tmp_path: Path, pattern: str) -> None:
    from peft import PeftModel

    model: Any = build_meta(tiny_model("llama", **TIED))
    keys = replace(KEYS, train_also=[pattern])
    add_adapters(model, keys)
    materialise(model, 5, "cpu")
    write_folder(materialise(build_meta(tiny_model("llama", **TIED)), 6, "cpu"), tmp_path / "base")
    torch.manual_seed(1)
    base = build_model(run_of((tmp_path / "base", tmp_path, None), init_from=None), torch.device("cpu"), False)[0]
    model.load_state_dict(base.state_dict(), strict=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    stored = StoredModel(model.eval(), lambda name, dtype: model.state_dict()[name].to(dtype), tmp_path, None, None, 1)
    (tmp_path / "adapter").mkdir()
    write_adapter(stored, tmp_path / "adapter", torch.float32)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    ids = torch.arange(16).unsqueeze(0)
    torch.testing.assert_close(theirs.eval()(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    merged = theirs.merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    begins_as_peft(run_of((tmp_path / "base", tmp_path / "adapter", None), train_also=[pattern]), model, False)


def test_a_plain_adapter_has_only_fields_that_peft_0_11_takes(tmp_path: Path) -> None:
    """Versions of peft refuse fields that are newer than they are."""
    model: Any = build_meta(tiny_model("llama"))
    add_adapters(model, KEYS)
    materialise(model, 5, "cpu")
    stored = StoredModel(model.eval(), lambda name, dtype: model.state_dict()[name].to(dtype), tmp_path, None, None, 1)
    write_adapter(stored, tmp_path, torch.float32)
    names = json.loads((tmp_path / "adapter_config.json").read_text()).keys()
    common = {"peft_type", "task_type", "base_model_name_or_path", "inference_mode", "r", "lora_alpha", "lora_dropout"}
    assert names <= {
        *(*common, "use_rslora", "use_dora", "target_modules", "fan_in_fan_out", "modules_to_save", "bias")
    }
