"""The streamed Hugging Face folder. Oracles: transformers' own ``save_pretrained``, and counted bytes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.cli.main import main
from mgpu_pipe.cli.verbs.export import _print_ids_without_rows
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import follows_file
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference import export_folder as export
from mgpu_pipe.inference.export_folder import _undo_half_a_replacement, export_folder, put_in_place, working_folder
from mgpu_pipe.inference.generation import generate_text, load_tokenizer
from mgpu_pipe.inference.model_folder import write_model_folder
from mgpu_pipe.inference.open import StoredModel, open_model, read_from, with_buffers
from mgpu_pipe.inference.streamed_weights import probe, streamed_logits
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.weights.model_files import saved_groups, write_configuration, write_tokenizer
from mgpu_pipe.parallel.device_memory import AllocationWatch
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.training.initial_weights import build_model
from tests.launch.launching import ROOT, alive, until
from tests.models.tiny import tiny_model

FAMILIES = ["llama", "gpt2", "qwen3", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_neox", "phi3", "opt"]


def made(family: str, **config: object) -> PreTrainedModel:
    return materialise(build_meta(tiny_model(family, **config)), 1, "cpu").eval()


def written(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def without_older_names(content: dict[str, Any]) -> dict[str, Any]:
    older = {"torch_dtype", "rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"}
    return {name: value for name, value in content.items() if name not in older}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    model = made(family)
    for name, limit in (("one", 1 << 30), ("shards", 50_000)):
        (tmp_path / name).mkdir()
        write_model_folder(model, read_from(model), tmp_path / name, torch.float32, limit)
    model.save_pretrained(tmp_path / "theirs")
    same(written(tmp_path / "one"), written(tmp_path / "theirs"))
    same(written(tmp_path / "shards"), written(tmp_path / "theirs"))
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "theirs"))
    assert without_older_names(ours) == without_older_names(theirs)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "shards", local_files_only=True) is not None


LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 500000.0, "rope_scaling": {**LLAMA31, "rope_type": "llama3"}}),
    ("qwen3", {"rope_theta": 1000000.0, "rope_scaling": None}),
    ("qwen3_moe", {"rope_theta": 1000000.0, "num_experts": 4}),
    ("gpt_neox", {"rotary_emb_base": 20000.0, "rotary_pct": 0.5}),
    ("phi", {"rope_theta": 20000.0, "partial_rotary_factor": 0.5}),
    ("phi3", {"rope_theta": 20000.0, "rope_scaling": LONG, "original_max_position_embeddings": 32}),
    (
        "gemma3_text",
        {"rope_theta": 2e6, "rope_local_base_freq": 20000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    ),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32}),
]
"""Fields as the folders of transformers 4 have them."""


@pytest.mark.parametrize(("family", "fields"), PUBLISHED, ids=[family for family, _ in PUBLISHED])
def test_a_configuration_keeps_the_names_by_which_transformers_4_reads_it(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    own = {**tiny_model(family).config, "model_type": family, **fields}
    (tmp_path / "config.json").write_text(json.dumps(own), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        write_configuration(AutoModelForCausalLM.from_config(config), tmp_path, torch.bfloat16)
    written_fields = json.loads((tmp_path / "config.json").read_text())
    assert {name: written_fields.get(name) for name in fields} == fields
    assert written_fields["torch_dtype"] == written_fields["dtype"] == "bfloat16"
    again = AutoConfig.from_pretrained(tmp_path)
    assert getattr(again, "rope_parameters", None) == config.rope_parameters
    assert getattr(again, "layer_types", None) == getattr(config, "layer_types", None)


@pytest.mark.parametrize(
    ("name", "tower"),
    [
        *((name, "vision_tower.vision_model") for name in ("llava_tiny", "gemma3_tiny", "paligemma_tiny")),
        ("mistral3_tiny", "vision_tower"),
        ("clip_tiny", "vision_model"),
    ],
)
def test_parts_have_the_names_of_published_folders(name: str, tower: str, tmp_path: Path) -> None:
    model_class = "AutoModel" if name == "clip_tiny" else "AutoModelForImageTextToText"
    model = materialise(build_meta(compose([f"model={name}"])[0].model, model_class), 1, "cpu")
    write_model_folder(model, read_from(model), tmp_path, torch.float32)
    parts = {part.partition(".embeddings.")[0].partition(".patch_conv.")[0] for part in written(tmp_path)}
    assert tower in parts and f"{tower}.vision_model" not in parts
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"].get("tie_word_embeddings") == config.get("tie_word_embeddings")
    again, read = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(read.values())
    same(*({name: value.flatten() for name, value in each.named_parameters()} for each in (again, model)))


def test_a_tokenizer_keeps_the_names_by_which_transformers_4_reads_it(tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "</s>": 1})), eos_token="</s>")
    fast.add_special_tokens({"extra_special_tokens": ["<turn>"]})
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(tmp_path / "own")
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "own", tmp_path / "out", False)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in settings
    assert settings["additional_special_tokens"] == ["<turn>"] and settings["chat_template"] == fast.chat_template
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.all_special_tokens == fast.all_special_tokens and again.chat_template == fast.chat_template


def tokens_of_each_pass(folder: Path) -> list[int]:
    """Of a greedy generation of five tokens after a prompt of four, by whatever the folder says."""
    model, counted = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval(), list[int]()

    def count(_: object, args: object, given: dict[str, torch.Tensor]) -> None:
        counted.append(given["input_ids"].shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    model.generate(torch.tensor([[3, 4, 5, 6]]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    return counted


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_an_export_generates_with_a_cache(family: str, tmp_path: Path) -> None:
    """One token a forward pass after the prompt, of a model that was made from its type."""
    (tmp_path / "out").mkdir()
    model = made(family)
    write_model_folder(model, read_from(model), tmp_path / "out", torch.float32)
    assert tokens_of_each_pass(tmp_path / "out") == [4, 1, 1, 1, 1]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("keeps_settings", [True, False])
def test_an_export_generates_as_the_makers_folder_does(cache: bool, keeps_settings: bool, tmp_path: Path) -> None:
    """Oracle: the maker's folder, through training's own model of it and back."""
    maker, out = tmp_path / "maker", tmp_path / "out"
    theirs = made("llama")
    theirs.config.update({"use_cache": cache, "eos_token_id": [7, 9], "pad_token_id": 9, "output_router_logits": True})
    theirs.save_pretrained(maker)
    settings = {
        "eos_token_id": [7, 9],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 11,
        "use_cache": cache,
        "repetition_penalty": 1.1,
        "transformers_version": "4.40.0",
        "_of_the_maker": 1,
    }
    (maker / "generation_config.json").write_text(json.dumps(settings))
    if not keeps_settings:
        (maker / "generation_config.json").unlink()
    config = RunConfig(model=ModelConfig(path=str(maker)))
    trained, _ = build_model(config, torch.device("cpu"), sharded=False)
    trained(input_ids=torch.tensor([[3, 4]]), use_cache=False).logits.sum().backward()
    twin = with_buffers(build_meta(config.model))
    stored = StoredModel(twin, read_from(trained), tmp_path, None, config, 1, maker=maker)
    export_folder(stored, out)
    assert tokens_of_each_pass(out) == tokens_of_each_pass(maker) == ([4, 1, 1, 1, 1] if cache else [4, 5, 6, 7, 8])
    ours, makers = (json.loads((folder / "config.json").read_text()) for folder in (out, maker))
    assert without_older_names(ours) == without_older_names(makers)
    if keeps_settings:
        assert json.loads((out / "generation_config.json").read_text()) == settings


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_logits_by_blocks_are_the_whole_models_and_leave_it_on_meta(family: str) -> None:
    model = made(family)
    twin = made(family)
    for name, parameter in build_meta(tiny_model(family)).named_parameters():
        module, _, attribute = name.rpartition(".")
        twin.get_submodule(module)._parameters[attribute] = parameter
    twin.tie_weights()
    ids = torch.arange(24).reshape(2, 12)
    assert torch.equal(streamed_logits(twin, read_from(model), {"input_ids": ids}, torch.float32), model(ids).logits)
    assert all(parameter.is_meta for parameter in twin.parameters())


def run_of(folder: Path, family: str, **config: object) -> Path:
    """A run's folder with the initial weights as its only checkpoint."""
    run = RunConfig(model=tiny_model(family, **config))
    folder.mkdir()
    freeze(run, folder / "config.yaml")
    model = materialise(build_meta(run.model), 1, "cpu")
    shards = [
        LocalShard(TensorSlice.whole(name, tuple(p.shape)), tuple(p.shape), p.data)
        for name, p in model.named_parameters()
    ]
    save(folder / "checkpoints", 3, shards, [], {}, folder / "config.yaml")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_neither_writing_nor_running_ever_holds_the_model(family: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", family, num_hidden_layers=8, vocab_size=64)
    stored = open_model(run)
    parameters = [4 * parameter.numel() for parameter in stored.model.parameters()]
    (tmp_path / "out").mkdir()
    with AllocationWatch() as writing:
        write_model_folder(stored.model, stored.read, tmp_path / "out", torch.float32)
    assert writing.peak <= 3 * max(parameters) + 100_000 < sum(parameters) / 2
    with AllocationWatch() as running:
        streamed_logits(stored.model, stored.read, {"input_ids": torch.zeros(1, 4, dtype=torch.long)}, torch.float32)
    assert running.peak <= sum(parameters) / 2


def test_a_large_tensor_is_gone_before_the_next_is_read(tmp_path: Path) -> None:
    """Embedding and head are the first and the last tensor, and none between them fills a chunk of the file."""
    stored = open_model(run_of(tmp_path / "run", "llama", vocab_size=40_000))
    (tmp_path / "out").mkdir()
    with AllocationWatch() as writing:
        write_model_folder(stored.model, stored.read, tmp_path / "out", torch.float32)
    assert writing.peak <= 1.1 * 4 * 40_000 * 64


def test_a_merged_tensor_is_converted_on_its_own() -> None:
    model = build_meta(tiny_model("mixtral"))
    groups = {group.sources: group.outputs for group in saved_groups(model)}
    assert all(len(sources) == 1 for sources in groups)
    experts = groups[("model.layers.1.mlp.experts.gate_up_proj",)]
    assert len(experts) == 8 and all("block_sparse_moe.experts" in name for name in experts)


@pytest.mark.slow
def test_export_in_shards_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", "llama")
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out), "--max-shard-size", "100KB"]) == 0
    shards = sorted(out.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 110_000 for shard in shards)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in written(out).values())
    loaded = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    stored = open_model(run)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, stored.read(name, torch.float32)), name
    capsys.readouterr()
    assert main(["export", str(run), "--out", str(out), "--max-shard-size", "5 bananas"]) == 2
    assert "use a size such as 5GB" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_gives_other_logits_never_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mgpu_pipe.inference import model_folder

    convert = model_folder.convert_for_saving

    def wrong(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor * 1.5 if "q_proj" in name else tensor for name, tensor in convert(model, tensors).items()}

    monkeypatch.setattr(model_folder, "convert_for_saving", wrong)
    run = run_of(tmp_path / "run", "llama", initializer_range=0.5)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 1
    assert "logits differ" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_cannot_beput_in_place_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial, rename = tmp_path / "out", tmp_path / "out.partial", Path.rename
    for folder in (out, partial):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)

    def fail(source: Path, target: Path) -> Path:
        if source == partial:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        put_in_place(partial, out)
    assert (out / "config.json").read_text() == "out" and not (tmp_path / "out.old").exists()


@pytest.mark.slow
def test_a_context_shorter_than_the_probe_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "subprocess", subprocess)  # an interpreter of its own, as a user's export has
    run = run_of(tmp_path / "run", "gpt2", n_positions=16)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0


def test_a_t5_that_scales_no_outputs_says_so_to_every_reader(tmp_path: Path) -> None:
    """transformers 4 takes it from tie_word_embeddings, and 5 where a folder is opened."""
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
    for tied in (False, True):
        model = T5ForConditionalGeneration(T5Config(**{**sizes, "tie_word_embeddings": tied}))
        write_configuration(model, tmp_path, torch.float32)
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
        assert T5Config.from_pretrained(tmp_path).scale_decoder_outputs is tied


def test_a_text_model_with_a_scale_of_logits_is_probed_with_tokens() -> None:
    assert set(probe(build_meta(tiny_model("cohere")))) == {"input_ids"}


def test_a_first_token_outside_of_the_vocabulary_is_left_out(tmp_path: Path):
    text = {
        "vocab_size": 40,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = CLIPConfig(text_config={**text, "eos_token_id": 5}, vision_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        model = CLIPModel(config)
    write_configuration(model, tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, 5)
    assert config.text_config.bos_token_id == 49406, "the run's own is left alone"


def test_a_class_of_transformers_that_changes_the_ids_is_replaced(tmp_path: Path):
    """Llama 2's file puts a space before every part of a text, which LlamaTokenizer of transformers 5 does not."""
    vocab = {
        token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "\u2581b"])
    }
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>", fuse_unk=True))
    prepend, spaces = normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([prepend, spaces])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "a</s>b a"
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False).input_ids != expected
    assert load_tokenizer(tmp_path)(text, add_special_tokens=False).input_ids == expected
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert follows_file(PreTrainedTokenizerFast.from_pretrained(tmp_path), tmp_path)
    export._keep_ids(tmp_path)
    kept = AutoTokenizer.from_pretrained(tmp_path)
    assert kept(text, add_special_tokens=False).input_ids == expected
    assert kept.model_input_names == ["input_ids", "attention_mask"] and kept.eos_token == "</s>"


def test_a_prompt_with_a_token_without_a_row_is_refused(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<x>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2, **sizes)).eval()
    with pytest.raises(BadInputError, match=r"prompt with '<x>': the model has no row for this token; leave it out"):
        generate_text(model, tmp_path, ["a<x>"], max_new_tokens=1)


def test_ids_without_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": [{"id": 2, "content": "<x>"}]})
    )
    _print_ids_without_rows(tmp_path, LlamaConfig(vocab_size=2))
    assert "1 tokens that the model has no row for (its vocabulary has 2), the first is 2 ('<x>')" in (
        capsys.readouterr().out
    )
    _print_ids_without_rows(tmp_path, LlamaConfig(vocab_size=3))
    assert capsys.readouterr().out == ""


PARENT = """
import subprocess, sys
from mgpu_pipe.system.child_process import bind_command
child = subprocess.Popen(bind_command([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]),
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_bound_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(child), "the child's end")


def test_a_child_whose_parent_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    other = [*bind_command(["touch", str(tmp_path / "begun")])]
    other[other.index(str(os.getpid()))] = "1"  # not its parent
    assert subprocess.run(other).returncode == 1
    assert not list(tmp_path.iterdir())


def test_what_a_killed_export_left_is_cleaned_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "half.safetensors").touch()
    with working_folder(out) as folder:
        assert folder == left and not list(folder.iterdir())
        with pytest.raises(BadInputError, match="another process is writing it"), working_folder(out):
            pass
        (folder / "file").touch()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_in_the_middle_of_a_replacement_loses_no_folder(renames: int, tmp_path: Path) -> None:
    out, waiting = tmp_path / "out", tmp_path / "out.replaced.partial"
    waiting.mkdir()
    (waiting / "config.json").write_text("old")
    if renames == 2:
        out.mkdir()
        (out / "config.json").write_text("new")
    _undo_half_a_replacement(out)
    assert (out / "config.json").read_text() == ("old" if renames == 1 else "new")
    assert not waiting.exists()
