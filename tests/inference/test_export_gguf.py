"""``mgpu-pipe export --format gguf``. Oracles: transformers' reader of GGUF and, where npm has it, llama.cpp itself."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.inference import export_gguf as export
from mgpu_pipe.inference.accuracy import relative_difference
from mgpu_pipe.inference.check_gguf import LIBRARY_VARIABLE, TABLE_TOLERANCE, LlamaLibrary, find_library
from mgpu_pipe.inference.export_gguf import GgufReport, export_gguf, write_modelfile
from mgpu_pipe.inference.gguf import FILE, layouts, write
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.gguf_tokenizer import describe_tokenizer
from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES
from mgpu_pipe.inference.gguf.model_metadata import metadata_of, settings_of
from mgpu_pipe.inference.import_weights import open_gguf
from mgpu_pipe.inference.open import StoredModel, read_from, with_buffers
from mgpu_pipe.inference.streamed_weights import probe
from mgpu_pipe.models.build import build_meta, materialise
from tests.inference.support import VOCABULARY, write_run, write_texts, write_tokenizer
from tests.models.tiny import tiny_model
from tests.support.libllama import libllama
from tests.support.program import forked_module
from tests.support.sampling import one_in

FAMILIES = list(GGUF_FAMILIES)
MORE = {"gemma3_text": {"query_pre_attn_scalar": 16}}
GEMMA3_27B = {"num_hidden_layers": 62, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 8}
"""Blocks as many as in the published model, by which llama.cpp knows it; its heads too are not a part of the width."""
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}


@pytest.fixture(autouse=True)
def _check_by_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "subprocess", types.SimpleNamespace(run=forked_module))
    folder = libllama()
    if folder is not None:
        monkeypatch.setenv(LIBRARY_VARIABLE, str(folder))


def stored_model(family: str, folder: Path, **config: object) -> tuple[StoredModel, PreTrainedModel]:
    """A model with weights far from its initialisation, and a tokenizer."""
    settings = tiny_model(
        family, **{"vocab_size": VOCABULARY + 4, "bos_token_id": None, **MORE.get(family, {}), **config}
    )
    model = materialise(build_meta(settings), 1, "cpu").eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    tokenizer = write_tokenizer(folder / "tokenizer")
    return StoredModel(with_buffers(build_meta(settings)), read_from(model), folder, tokenizer, None, None, True), model


def exported(family: str, folder: Path, dtype: Any = "fp32", **config: object) -> GgufReport:
    return export_gguf(stored_model(family, folder, **config)[0], folder / "out", dtype)


def expected_readers(family: str, scaled: bool = False) -> set[str]:
    transformers = set() if family == "mixtral" or scaled else {"transformers"}
    return {"this program", *transformers, *({"llama.cpp"} if libllama() else ())}


@pytest.mark.slow
@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_every_reader_gives_the_logits_of_every_family(family: str, tmp_path: Path) -> None:
    report = exported(family, tmp_path)
    assert report.readers.keys() == expected_readers(family) and report.accuracies[0].error < 1e-6
    file = GgufFile(tmp_path / "out" / FILE)
    tied = family in ("gemma3_text", "gpt2")
    assert ("output.weight" in file.tensors) != tied
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    assert file.metadata["tokenizer.ggml.pre"] == "gpt-2"


@pytest.mark.slow
@pytest.mark.parametrize("family", one_in(2, FAMILIES))
def test_a_file_is_read_back_to_the_last_bit(family: str, tmp_path: Path) -> None:
    stored, model = stored_model(family, tmp_path)
    export_gguf(stored, tmp_path / "out", "fp32")
    (tmp_path / "scratch").mkdir()
    again = open_gguf(tmp_path / "out" / FILE, tmp_path / "scratch")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.read(name, torch.float32), tensor, rtol=0, atol=3e-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_every_type_gives_what_it_rounds_to(family: str, dtype: str, tmp_path: Path) -> None:
    report = exported(family, tmp_path, dtype)
    exact, rounded = report.accuracies
    assert rounded.nbytes < 0.6 * exact.nbytes and rounded.nbytes <= report.nbytes
    assert 1e-6 < rounded.error < (1 if family == "mixtral" else 0.1), "a router may choose another expert"
    assert report.readers["this program"] < 1e-5


@pytest.mark.slow
def test_llama_cpp_quantises_to_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 256 values are whole blocks of Q4_K."""
    wide = {"hidden_size": 256, "intermediate_size": 512}
    if libllama() is not None:
        stored, model = stored_model("llama", tmp_path, **wide)
        report = export_gguf(stored, tmp_path / "out", "q4_k")
        exact, rounded = report.accuracies
        assert report.readers.keys() == expected_readers("llama") and report.readers["this program"] < 1e-5
        assert rounded.nbytes < 0.25 * exact.nbytes and rounded.error > 1e-3
        (tmp_path / "scratch").mkdir()
        again = open_gguf(tmp_path / "out" / FILE, tmp_path / "scratch")
        for name, tensor in model.state_dict().items():
            error = (again.read(name, torch.float32) - tensor).norm() / tensor.norm()
            assert error < 0.12, name
        file = GgufFile(tmp_path / "out" / FILE)
        assert file.metadata["general.file_type"] == 15 and file.tensors["blk.0.ffn_up.weight"].kind == 12
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Modelfile", "README.md", FILE]
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    if find_library() is None:
        with pytest.raises(BadInputError, match=r"needs llama\.cpp's library; pip install llama-cpp"):
            exported("llama", tmp_path / "none", "q4_k", **wide)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [LLAMA3, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}]
)
def test_scaled_rotations_are_those_of_the_run(config: dict[str, object], tmp_path: Path) -> None:
    report = exported("llama", tmp_path, max_position_embeddings=128, **config)
    assert report.readers.keys() == expected_readers("llama", scaled=True)


def test_gemma_3_27b_scales_queries_by_its_width(tmp_path: Path) -> None:
    stored, model = stored_model("gemma3_text", tmp_path, **GEMMA3_27B, query_pre_attn_scalar=16)
    file, tokens = tmp_path / FILE, describe_tokenizer(stored.tokenizer_folder, VOCABULARY + 4)
    write.write_gguf(write.lay_out(model), stored.read, file, "fp32", {**metadata_of(model.config), **tokens}, {})
    assert settings_of(GgufFile(file), "gemma3_text")["query_pre_attn_scalar"] == 16
    library = libllama()
    if library is not None:
        inputs = probe(stored.model)["input_ids"]
        expected = model(inputs, use_cache=False).logits.detach()
        found = LlamaLibrary(library, file).logits(inputs)
        assert relative_difference(found, expected) < TABLE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_file_without_the_permutation_is_caught(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this program's own reader has the same mistake, by the others."""
    plain = {name: replace(place, rotary_heads="") for name, place in GGUF_FAMILIES[family].tensors.items()}
    broken = replace(GGUF_FAMILIES[family], tensors=plain)
    if family == "llama" or libllama():
        with monkeypatch.context() as patch:
            patch.setattr(layouts, "GGUF_FAMILIES", {**GGUF_FAMILIES, family: broken})
            patch.setattr(write, "GGUF_FAMILIES", {**GGUF_FAMILIES, family: broken})
            with pytest.raises(MgpuError, match=r"logits by (transformers|llama.cpp) differ"):
                exported(family, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(write, "to_file", lambda place, tensor, config: [tensor])
        with pytest.raises(MgpuError, match="is not the inverse"):
            exported("llama", tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("opt", {}, "--format=gguf: opt has no table; use --format hf"),
        ("llama", {"hidden_act": "gelu"}, "cannot compute hidden_act=gelu"),
        ("mistral", {"sliding_window": 16}, "cannot compute sliding_window=16"),
        ("gemma3_text", {"query_pre_attn_scalar": 8}, "cannot compute query_pre_attn_scalar=8"),
        ("gemma3_text", {**GEMMA3_27B, "query_pre_attn_scalar": 8}, "cannot compute query_pre_attn_scalar=8"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "cannot compute scale_attn_by_inverse_layer_idx=True"),
        ("qwen3", {"attention_bias": True}, "cannot compute attention_bias=True"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused_by_name(
    family: str, config: dict[str, object], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInputError, match="--format") as problem:
        exported(family, tmp_path, **config)
    assert expected in str(problem.value) and not (tmp_path / "out").exists()


def test_a_run_without_a_tokenizer_or_with_another_kind_is_refused(tmp_path: Path) -> None:
    stored, _ = stored_model("llama", tmp_path)
    with pytest.raises(BadInputError, match=r"no tokenizer\.json"):
        export_gguf(replace(stored, tokenizer_folder=None), tmp_path / "out", "fp32")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(content))
    with pytest.raises(BadInputError, match="cuts texts by"):
        export_gguf(stored, tmp_path / "out", "fp32")


TURNS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def evaluated(root: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """Perplexity by ``eval`` of all held-out data, which is few rows here."""
    assert main(["eval", str(root)]) == 0
    return float(
        next(line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity"))
    )


@pytest.mark.slow
def test_a_run_becomes_a_file_and_a_modelfile_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    write_run(root, "llama", write_texts(tmp_path / "texts", 12), tmp_path / "cache")
    words = ["export", str(root), "--out", str(out), "--format", "gguf"]
    assert main([*words, "--dtype", "q8_0"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.split()[0] in ("fp32", "q8_0")}
    assert rows["fp32"][3] == "0.0e+00" and float(rows["fp32"][2]) == pytest.approx(evaluated(root, capsys), rel=1e-4)
    assert float(rows["q8_0"][2]) == pytest.approx(float(rows["fp32"][2]), rel=0.05)
    assert "transformers" in printed and "ollama create" in printed
    lines = (out / "Modelfile").read_text().splitlines()
    assert lines[:3] == [f"FROM ./{FILE}", 'TEMPLATE """{{ .Prompt }}"""', 'PARAMETER stop "<|endoftext|>"']
    assert main(words) == 2 and "--force" in capsys.readouterr().err
    assert main([*words, "--force", "--dtype", "bf16", "--compare-dtypes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:7]] == ["fp32", "fp16", "bf16", "q8_0"]
    for more in (["--adapter"], ["--push", "a/b"]):
        assert main([*words, "--force", *more]) == 2
    assert main(["export", str(root), "--out", str(tmp_path / "hf"), "--dtype", "q8_0"]) == 2
    assert main(["export", str(root), "--out", str(tmp_path / "hf"), "--dtype", "q4_k"]) == 2


def test_a_modelfile_takes_numbers_only(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    settings = {"do_sample": True, "temperature": "1\nADAPTER /x", "top_k": True, "top_p": 0.5, "repetition_penalty": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    write_modelfile(folder, FILE, tmp_path, 64, False)
    lines = (tmp_path / "Modelfile").read_text().splitlines()
    assert lines[-3:] == ["PARAMETER num_ctx 64", "PARAMETER top_p 0.5", "PARAMETER repeat_penalty 2"]


def test_a_failed_check_names_the_problem_and_not_the_file_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(command: Sequence[str], **rest: Any) -> Any:
        file = Path(command[-2])
        file.write_bytes(file.read_bytes()[:-4096])
        return forked_module(command, **rest)

    monkeypatch.setattr(export, "subprocess", types.SimpleNamespace(run=cut_off))
    with pytest.raises(MgpuError) as problem:
        exported("llama", tmp_path)
    assert "failed its check and was removed: is cut off: " in str(problem.value)
    assert str(tmp_path) not in str(problem.value) and "copy" not in str(problem.value)


def test_a_chat_template_is_translated_where_turns_are_joined_as_they_are() -> None:
    from mgpu_pipe.data.text.render_chat import ChatTemplate
    from mgpu_pipe.inference.export_gguf import go_template

    special = {"eos_token": "<e>", "bos_token": "<b>"}
    assert go_template(ChatTemplate(TURNS, special, ("<e>",)), "<b>") == (
        '{{ range .Messages }}{{ if eq .Role "system" }}<|system|>{{ .Content }}<e>'
        '{{ else if eq .Role "user" }}<|user|>{{ .Content }}<e>'
        '{{ else if eq .Role "assistant" }}<|assistant|>{{ .Content }}<e>{{ end }}{{ end }}<|assistant|>'
    )
    assert go_template(ChatTemplate("<b>" + TURNS, special, ("<e>",)), "<b>") is not None
    polite = "{% if messages[0]['role'] != 'system' %}<|system|>Be kind.{{ eos_token }}{% endif %}" + TURNS
    template = go_template(ChatTemplate(polite, special, ("<e>",)), "<b>")
    assert template is not None and template.startswith("{{ if not .System }}<|system|>Be kind.<e>{{ end }}{{ range")
    counted = TURNS.replace("message['role']", "loop.index ~ message['role']")
    assert go_template(ChatTemplate(counted, special, ("<e>",)), "<b>") is None
