"""Model folders: what is refused before torch is there, and round trips through transformers' own from_pretrained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import BadInputError, ConfigErrors, ModelFolderError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import check_model_config
from mgpu_pipe.models.weights.folder import INDEX, WEIGHTS, check_model_folder
from mgpu_pipe.models.weights.pretrained import load_pretrained
from tests.models.tiny import tiny_model, write_folder

FAMILIES = ["llama", "gpt2", "qwen3", "mixtral"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp("models") / family
        model = materialise(build_meta(tiny_model(family, tie_word_embeddings=family == "qwen3")), 1, "cpu")
        write_folder(model, made[family])
    return made


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


def error_of(folder: Path, tokenizer_vocab_size: int | None = None) -> str:
    with pytest.raises(ModelFolderError) as caught:
        check_model_folder(folder, tokenizer_vocab_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_transformers_loads(folders: dict[str, Path], family: str) -> None:
    ours = load_pretrained(ModelConfig(path=str(folders[family])), "cpu").eval()
    theirs = AutoModelForCausalLM.from_pretrained(folders[family], local_files_only=True).eval()
    written = materialise(build_meta(tiny_model(family, tie_word_embeddings=family == "qwen3")), 1, "cpu").eval()
    ids = torch.arange(3, 20)[None]
    expected = theirs(input_ids=ids).logits
    assert torch.equal(ours(input_ids=ids).logits, expected)
    assert torch.equal(written(input_ids=ids).logits, expected)
    assert theirs.config.use_cache
    assert ours.config.use_cache
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters())
    check_model_folder(folders[family], tokenizer_vocab_size=128)


def test_mixtral_is_saved_under_its_published_names(folders: dict[str, Path]) -> None:
    from safetensors import safe_open

    with safe_open(folders["mixtral"] / WEIGHTS, "pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in set(file.keys())


def test_configuration_overrides_reach_a_loaded_model(folder: Path) -> None:
    model = load_pretrained(ModelConfig(path=str(folder), config={"rms_norm_eps": 0.5}), "cpu")
    assert model.config.rms_norm_eps == 0.5
    assert model.model.norm.variance_epsilon == 0.5


def test_bf16_weights_load_as_fp32(folder: Path) -> None:
    model = load_pretrained(ModelConfig(path=str(folder)), "cpu")
    bf16 = write_folder(model, folder / "bf16", torch.bfloat16)
    again = load_pretrained(ModelConfig(path=str(bf16)), "cpu")
    assert again.dtype == torch.float32
    assert torch.equal(again.lm_head.weight, model.lm_head.weight.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 3}, "missing: model.layers.2"),
        ({"num_hidden_layers": 1}, "unexpected: model.layers.1"),
        ({"vocab_size": 256}, "of another shape: lm_head.weight, model.embed_tokens.weight"),
    ],
)
def test_weights_that_do_not_fit_are_listed(folder: Path, config: dict[str, int], message: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        load_pretrained(ModelConfig(path=str(folder), config=config), "cpu")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_override_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(BadInputError, match="rms_norm_eps"):
        load_pretrained(ModelConfig(path=str(folder), config={"rms_norm_ep": 0.5}), "cpu")


def test_folders_without_something(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in error_of(tmp_path / "nowhere")
    weights = folder / WEIGHTS
    weights.rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin" in error_of(folder)
    assert "safetensors" in error_of(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no weights" in error_of(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in error_of(folder)
    (folder / "config.yaml").touch()
    assert f"mgpu-pipe export {folder} --out <folder>" in error_of(folder)


def test_a_damaged_generation_config_is_refused_before_transformers_reads_it(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[1]")
    assert "generation_config.json is damaged: not a JSON object; copy it again" in error_of(folder)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_size_that_is_no_number_is_refused(folder: Path, number: str) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "intermediate_size": float(number)}))
    with pytest.raises(ConfigErrors, match=r"size -?(nan|inf): (this is no number|no model is that large)"):
        check_model_config(ModelConfig(path=str(folder)))


def test_damaged_weights_are_told_from_the_header(folder: Path) -> None:
    weights = folder / WEIGHTS
    whole = weights.read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 100, 5, 0):
        weights.write_bytes(whole[:kept])
        assert "model.safetensors is truncated" in error_of(folder)
    weights.write_bytes(whole + b"x")
    assert "1 bytes more" in error_of(folder)
    weights.write_bytes(b"\xff" * len(whole))
    assert "impossible length" in error_of(folder)
    weights.write_bytes(whole[:8] + b"x" + whole[9:])
    assert "header is not readable" in error_of(folder)


def test_shards_of_an_index(folder: Path) -> None:
    model = load_pretrained(ModelConfig(path=str(folder)), "cpu")
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    check_model_folder(folder)
    index = json.loads((folder / INDEX).read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    content = (folder / shard).read_bytes()
    (folder / shard).write_bytes(content[:-10])
    assert f"{shard} is truncated" in error_of(folder)
    (folder / shard).unlink()
    assert f"{shard} is missing" in error_of(folder)
    (folder / shard).write_bytes(content)
    index["weight_map"]["model.layers.9.x"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    assert "model.layers.9.x" in error_of(folder)


def test_vocabulary_must_be_the_tokenizers(folder: Path) -> None:
    assert "128 entries, the tokenizer's 129" in error_of(folder, 129)
    assert "the tokenizer's 60" in error_of(folder, 60)
    check_model_folder(folder, 126)
    check_model_folder(folder, 30, made_for=128)
