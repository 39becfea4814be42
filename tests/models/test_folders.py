"""Model folders, also of old versions and without a head. Oracle: transformers' own ``from_pretrained``."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    SamConfig,
    ViTConfig,
    ViTModel,
)

from mgpu_pipe.cli.main import main
from mgpu_pipe.cli.verbs.eval import _evaluation_config
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.sources.compared_texts import EmbeddingPairsConfig
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, ModelFolderError
from mgpu_pipe.inference.open import load_run, open_model
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import check_model_config
from mgpu_pipe.models.weights.folder import INDEX, WEIGHTS, check_model_folder
from mgpu_pipe.models.weights.pretrained import load_pretrained, stored_buffers
from mgpu_pipe.models.weights.slices import fill_from_folder
from tests.families.cells import Variant, small
from tests.inference.support import VOCABULARY, write_tokenizer
from tests.models.old_folders import KINDS, write_old
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


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_a_package_that_a_family_needs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^model.type=gemma3n: .*requires the timm library.*; install that package"):
        build_meta(ModelConfig(type="gemma3n"), "AutoModelForImageTextToText")


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
    (folder / "modules.json").touch()
    assert f"save its modules anew: SentenceTransformer('{folder}').save_pretrained(" in error_of(folder)
    (folder / "modules.json").unlink()
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


def test_a_large_rotary_base_is_no_size(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    rotary = {"rope_type": "default", "rope_theta": 3580165449.0}  # of Llama 3 with a million positions
    (folder / "config.json").write_text(json.dumps({**fields, "rope_parameters": rotary}))
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mlp.up_proj.weight", torch.float8_e4m3fn),
        ("mlp.up_proj.weight", torch.int8),
        ("mlp.up_proj.qweight", torch.int32),
        ("mlp.experts.gate_up_proj_blocks", torch.uint8),
    ],
)
def test_quantised_weights_are_refused(folder: Path, name: str, dtype: torch.dtype) -> None:
    tensors = {**load_file(folder / WEIGHTS), f"model.layers.0.{name}": torch.ones(64, 32).to(dtype)}
    save_file(tensors, folder / WEIGHTS)
    assert f"its weights are quantised (model.layers.0.{name} is " in error_of(folder)


def test_plain_weights_whose_layers_round_are_refused(folder: Path) -> None:
    """BitNet's layers round weights and inputs; a field that is left over from training is none of it."""
    config = json.loads((folder / "config.json").read_text())
    for method, said in (("bitnet", "its layers round weights and inputs as they compute"), ("bitsandbytes", "")):
        config["quantization_config"] = {"quant_method": method, "quantization_mode": "online"}
        (folder / "config.json").write_text(json.dumps(config))
        if said:
            assert said in error_of(folder)
        else:
            check_model_folder(folder)


def test_whole_numbers_beside_weights_are_read(folder: Path) -> None:
    more = {"a.position_ids": torch.ones(1, 4).int(), "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}
    save_file({**load_file(folder / WEIGHTS), **more}, folder / WEIGHTS)
    check_model_folder(folder)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["torch.bfloat16", "float16", "bfloat", "auto"])
def test_the_type_of_numbers_in_a_folder_decides_nothing(folder: Path, name: str, value: str) -> None:
    content = json.loads((folder / "config.json").read_text())
    del content["dtype"]
    (folder / "config.json").write_text(json.dumps({**content, name: value}))
    assert load_pretrained(ModelConfig(path=str(folder)), "cpu").lm_head.weight.dtype == torch.float32


def test_tied_weights_with_other_values_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen3"], tmp_path / "tied"))
    tensors = load_file(folder / WEIGHTS)
    embedding = tensors["model.embed_tokens.weight"]
    model = ModelConfig(path=str(folder))
    apart = replace(model, config={"tie_word_embeddings": False})

    def write_head(head: torch.Tensor) -> None:
        save_file({**tensors, "lm_head.weight": head}, folder / WEIGHTS, {"format": "pt"})

    write_head(embedding.clone())
    for loaded in (load_pretrained(model, "cpu"), fill_from_folder(build_meta(model), model, "cpu")):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    write_head(embedding + torch.eye(*embedding.shape))
    for load in (load_pretrained, lambda model, device: fill_from_folder(build_meta(model), model, device)):
        with pytest.raises(ModelFolderError, match=r"ties lm_head.weight to model.embed_tokens.weight.*=false"):
            load(model, "cpu")
        assert torch.equal(load(apart, "cpu").lm_head.weight, embedding + torch.eye(*embedding.shape))


def test_vocabulary_must_be_the_tokenizers(folder: Path) -> None:
    assert "128 entries, the tokenizer's 129" in error_of(folder, 129)
    assert "the tokenizer's 60" in error_of(folder, 60)
    check_model_folder(folder, 126)
    check_model_folder(folder, 30, made_for=128)


SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def stored(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return stored(GPT2Model(GPT2Config(vocab_size=VOCABULARY, **sizes, **ids)), folder)


def test_tied_weights_without_a_head_are_a_causal_language_model(tmp_path: Path) -> None:
    run = load_run(gpt2(tmp_path / "gpt2"))
    assert type(run.model).__name__ == type(open_model(run.source).model).__name__ == "GPT2LMHeadModel"
    assert _evaluation_config(run, []).objective.name == "causal_lm"


def test_tied_weights_without_a_head_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tokenizer(gpt2(tmp_path / "gpt2"))
    assert main(["generate", str(folder), "--prompt", "the quick", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


def test_untied_weights_without_a_head_make_vectors_and_continue_nothing(tmp_path: Path) -> None:
    folder = stored(LlamaModel(LlamaConfig(vocab_size=64, **SIZES)), tmp_path / "llama")
    assert type(load_run(folder).model) is LlamaModel
    with pytest.raises(ModelFolderError, match=r"missing: lm_head\.weight"):
        load_pretrained(ModelConfig(path=str(folder)), torch.device("cpu"), model_class="AutoModelForCausalLM")


def test_a_family_that_is_trained_without_a_head_has_none(tmp_path: Path) -> None:
    run = load_run(stored(BertModel(BertConfig(vocab_size=64, **SIZES)), tmp_path / "bert"))
    assert isinstance(run.model, BertModel)
    assert _evaluation_config(run, []).objective.name == "text_embedding"
    assert _evaluation_config(run, ["data=scored_pairs", "data.paths=[a]"]).objective.name == "text_similarity"


def test_the_data_tell_what_a_classifier_is_evaluated_for(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, num_labels=1, **SIZES)  # type: ignore[call-arg]
    run = load_run(stored(BertForSequenceClassification(config), tmp_path / "bert"))
    for source, objective in (
        ("embedding_pairs", "reranker"),
        ("preferences_jsonl", "reward"),
        ("labelled_jsonl", "sequence_classification"),
    ):
        assert _evaluation_config(run, [f"data={source}", "data.paths=[a]"]).objective.name == objective


def test_a_type_that_no_objective_trains_is_refused(tmp_path: Path) -> None:
    SamConfig(architectures=["SamModel"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="transformers has no causal language model sam"):
        check_model_config(ModelConfig(path=str(tmp_path)))


def test_a_model_of_pictures_without_a_head_has_none(tmp_path: Path) -> None:
    folder = stored(ViTModel(ViTConfig(image_size=32, **SIZES)), tmp_path / "vit")
    assert isinstance(load_run(folder).model, ViTModel)


def test_vectors_of_a_folder_are_evaluated_by_its_files(tmp_path: Path) -> None:
    folder = stored(BertModel(BertConfig(vocab_size=64, **SIZES)), tmp_path / "bert")
    run = load_run(folder)
    keys = description("text_embedding").keys(pooling="last_token", normalize=False)
    given = EmbeddingPairsConfig(query_prompt="find: ", document_prompt="text: ")
    (folder / "1_Pooling").mkdir()
    for name, content in keys.folder_files(given, 16).items():
        (folder / name).write_text(json.dumps(content))
    words = ["data=embedding_pairs", "data.paths=[a.jsonl]", "data.document_prompt='other: '"]
    config: Any = _evaluation_config(run, words)
    assert (config.objective.pooling, config.objective.normalize) == ("last_token", False)
    assert (config.data.query_prompt, config.data.document_prompt) == ("find: ", "other: ")
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    config = _evaluation_config(run, words)
    assert config.objective.pooling == "cls"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(BadInputError, match="text_embedding has no max_tokens; measure it with"):
        _evaluation_config(run, words)


DRAWN = "masked_spec_embed"
"""What transformers draws at random where a folder lacks it."""


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_old_folder_is_read_as_transformers_reads_it(tmp_path: Path, kind: str, shards: int) -> None:
    import transformers

    source = ModelConfig(path=str(write_old(kind, tmp_path, shards)))
    whole = load_pretrained(source, "cpu", seed=7)
    sliced = fill_from_folder(build_meta(source), source, "cpu", 7)
    maker = getattr(transformers, type(whole).__name__)
    theirs = maker.from_pretrained(source.path, local_files_only=True, dtype=torch.float32)
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    for model in (whole, sliced):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            if not name.endswith(DRAWN):
                assert torch.equal(tensor.reshape(expected[name].shape), expected[name]), name
    trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, parameter in sliced.named_parameters() if parameter.requires_grad]
    drawn = [name for name, _ in whole.named_parameters() if name.endswith(DRAWN)]
    assert all(torch.equal(whole.get_parameter(name), sliced.get_parameter(name)) for name in drawn)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text"])
def test_buffers_of_a_folder_are_read_part_by_part_too(tmp_path: Path, family: str) -> None:
    source = ModelConfig(path=str(tmp_path / family))
    made = materialise(build_meta(small(Variant(family))), 1, "cpu")
    kept = stored_buffers(made)
    for number, buffer in enumerate(kept.values()):
        buffer.add_(0.1 * (number + 1))
    write_folder(made, tmp_path / family)
    for model in (fill_from_folder(build_meta(source), source, "cpu"), load_pretrained(source, "cpu")):
        for name, buffer in stored_buffers(model).items():
            assert torch.equal(buffer, kept[name]), name
    assert kept
