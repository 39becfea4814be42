"""Somebody else's model folder: each trick changes one thing in it. Oracle: the kernel's record of what is touched."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.cli.main import main
from tests.hostile.support import (
    attempt,
    cases,
    code,
    outside,
    refused_early,
    replaced_by_link,
    replaced_by_pipe,
    sparse,
)

HUGE = 1 << 42
GENERATE = ("generate", "MODEL", "--prompt", "the", "--max-new-tokens", "2")
CHECK = ("check", "model=hf", "model.path=MODEL", "data=synthetic", "data.seq_len=64", "logger=none")
EXPORT = ("export", "MODEL", "--out", "exported")
INIT = ("model=llama_tiny", "data=synthetic", "trainer.max_steps=1", "logger=none", "checkpoint.init_from=MODEL")
WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
PICKLE = b"cos\nsystem\n(S'true'\ntR."
Trick = Callable[[Path, Path], None]


def pipe(name: str) -> Trick:
    return lambda model, out: replaced_by_pipe(model / name)


def link(name: str, target: str = "secret.json") -> Trick:
    return lambda model, out: replaced_by_link(model / name, target if target[0] == "/" else out / target)


def large(name: str) -> Trick:
    return lambda model, out: sparse(model / name, HUGE)


def text(name: str, content: str) -> Trick:
    def trick(model: Path, out: Path) -> None:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(content.replace("OUT", str(out)))

    return trick


def setting(name: str = "config.json", **changes: Any) -> Trick:
    """Values of a JSON file; modules that would leave a mark lie beside it."""

    def trick(model: Path, out: Path) -> None:
        path = model / name
        held = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**held, **changes}).replace("OUT", str(out)))
        for module in ("evil.py", "modeling_llama.py", "configuration_llama.py", "torch.py", "transformers.py"):
            (model / module).write_text(code(out) + "class Evil: pass\n")

    return trick


def header(raw: bytes, length: int | None = None) -> Trick:
    """Another header, at the same size of the file."""

    def trick(model: Path, out: Path) -> None:
        new = (len(raw) if length is None else length).to_bytes(8, "little") + raw
        (model / WEIGHTS).write_bytes(new + (model / WEIGHTS).read_bytes()[len(new) :])

    return trick


def entry(**changes: Any) -> Trick:
    """Another first entry in the header."""

    def trick(model: Path, out: Path) -> None:
        data = (model / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        held = json.loads(data[8 : 8 + length])
        held[next(name for name in held if name != "__metadata__")] |= changes
        raw = json.dumps(held).encode()
        (model / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])

    return trick


def long_header(model: Path, out: Path) -> None:
    sparse(model / WEIGHTS, HUGE)
    with (model / WEIGHTS).open("r+b") as file:
        file.write((90 << 20).to_bytes(8, "little"))


def indexed(weight_map: Any) -> Trick:
    def trick(model: Path, out: Path) -> None:
        shutil.copyfile(model / WEIGHTS, out / "sub" / "x.safetensors")
        (model / WEIGHTS).rename(model / "a.safetensors")
        (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}).replace("OUT", str(out)))

    return trick


def index_pipe(model: Path, out: Path) -> None:
    indexed({})(model, out)
    replaced_by_pipe(model / INDEX)


def pickle_alone(model: Path, out: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(PICKLE)


def listening(model: Path, out: Path) -> None:
    here = os.getcwd()
    os.chdir(model)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("chat_template.jinja")
    os.chdir(here)


TRICKS: dict[str, tuple[Trick, tuple[str, ...], int | None]] = {
    "config_pipe": (pipe("config.json"), GENERATE, 2),
    "config_link": (link("config.json"), GENERATE, 2),
    "config_zero": (link("config.json", "/dev/zero"), CHECK, 2),
    "config_large": (large("config.json"), CHECK, 2),
    "config_nested": (text("config.json", '{"model_type": "llama", "x": ' + "[" * 200_000), CHECK, 2),
    "config_list": (text("config.json", "[]"), CHECK, 2),
    "code": (setting(auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}), GENERATE, 0),
    "code_elsewhere": (setting(auto_map={"AutoModelForCausalLM": "some/where--evil.Evil"}), GENERATE, 0),
    "code_check": (setting(auto_map={"AutoModelForCausalLM": "evil.Evil"}), CHECK, 0),
    "class": (setting(architectures=["os.system"]), GENERATE, 0),
    "kernel": (setting(attn_implementation="some/kernel", _attn_implementation="some/kernel"), GENERATE, 0),
    "quantized": (setting(quantization_config={"quant_method": "evil", "auto_map": "evil.Evil"}), GENERATE, 0),
    "type": (setting(model_type="../../outside/x"), CHECK, 2),
    "type_list": (setting(model_type=["llama"]), CHECK, 2),
    "layers": (setting(num_hidden_layers=10_000_000), GENERATE, 2),
    "layers_check": (setting(num_hidden_layers=10_000_000), CHECK, 2),
    "layers_float": (setting(num_hidden_layers=1e7), GENERATE, 2),
    "layers_many": (setting(num_hidden_layers=60_000), GENERATE, 2),
    "layers_negative": (setting(num_hidden_layers=-1), GENERATE, 2),
    "labels": (setting(num_labels=1 << 40), GENERATE, 2),
    "vocabulary": (setting(vocab_size=1 << 40), GENERATE, 2),
    "vocabulary_in_bounds": (setting(vocab_size=200_000_000), GENERATE, 2),
    "width_in_bounds": (setting(intermediate_size=100_000_000), EXPORT, 2),
    "adapter": (text("adapter_config.json", '{"base_model_name_or_path": "OUT", "peft_type": "LORA"}'), GENERATE, 2),
    "names_itself": (setting(_name_or_path="OUT", name_or_path="OUT"), GENERATE, 0),
    "weights_pipe": (pipe(WEIGHTS), GENERATE, 2),
    "weights_link": (link(WEIGHTS), GENERATE, 2),
    "weights_zero": (link(WEIGHTS, "/dev/zero"), CHECK, 2),
    "header_length": (header(b"{}", 1 << 62), GENERATE, 2),
    "header_large": (long_header, CHECK, 2),
    "header_nested": (header(b'{"a":' * 3000), GENERATE, 2),
    "header_no_object": (header(b"[1]"), GENERATE, 2),
    "offsets_negative": (entry(data_offsets=[-8, 0]), GENERATE, 2),
    "offsets_overlap": (entry(data_offsets=[0, 8]), GENERATE, 2),
    "offsets_texts": (entry(data_offsets=["0", "8"]), CHECK, 2),
    "shape_huge": (entry(shape=[1 << 62, 1 << 62]), GENERATE, 2),
    "type_unknown": (entry(dtype="EVIL"), GENERATE, 2),
    "index_outside": (indexed({"model.norm.weight": "../../outside/sub/x.safetensors"}), GENERATE, 2),
    "index_absolute": (indexed({"model.norm.weight": "OUT/sub/x.safetensors"}), CHECK, 2),
    "index_lists": (indexed({"model.norm.weight": ["a.safetensors"]}), CHECK, 2),
    "index_pipe": (index_pipe, CHECK, 2),
    "pickle_alone": (pickle_alone, GENERATE, 2),
    "pickle_beside": (text("pytorch_model.bin", PICKLE.decode()), GENERATE, 0),
    "tokenizer_pipe": (pipe(TOKENIZER), GENERATE, 2),
    "tokenizer_link": (link(TOKENIZER), EXPORT, 2),
    "tokenizer_nested": (text(TOKENIZER, "[" * 200_000), GENERATE, 2),
    "tokenizer_code": (
        setting(
            "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil"
        ),
        GENERATE,
        None,
    ),
    "tokenizer_elsewhere": (setting("tokenizer_config.json", tokenizer_file="OUT/secret.json"), GENERATE, None),
    "tokenizer_vocabulary": (
        setting(
            "tokenizer_config.json",
            vocab_file="OUT/secret.txt",
            merges_file="OUT/secret.txt",
            tokenizer_class="GPT2Tokenizer",
        ),
        GENERATE,
        None,
    ),
    "template_endless": (text("chat_template.jinja", "{% for i in range(10**12) %}x{% endfor %}"), GENERATE, 2),
    "template_socket": (listening, GENERATE, 2),
    "generation_pipe": (pipe("generation_config.json"), GENERATE, 2),
    "generation_link": (link("generation_config.json"), EXPORT, 2),
    "generation_broken": (text("generation_config.json", "{"), GENERATE, None),
    "generation_code": (lambda model, out: text("custom_generate/generate.py", code(out))(model, out), GENERATE, 0),
    "folder_link": (lambda model, out: (model / "additional_chat_templates").symlink_to(out), GENERATE, 2),
    "circle": (lambda model, out: (model / "x.json").symlink_to("x.json"), GENERATE, None),
    "modules": (setting(), EXPORT, 0),
    "init_link": (link("config.json"), INIT, 2),
}


@pytest.fixture(scope="module")
def made(made: Path) -> Path:
    """The run's export."""
    assert main(["export", str(made), "--out", str(made.with_name("model"))]) == 0
    return made.with_name("model")


@pytest.mark.parametrize(
    "trick",
    cases(
        TRICKS,
        """
    config_large config_list code_elsewhere class names_itself type_list layers_check layers_negative vocabulary
    weights_link weights_zero header_no_object offsets_texts index_absolute index_lists pickle_beside tokenizer_pipe
    generation_link template_endless""",
    ),
)
def test_a_model(trick: str, made: Path, tmp_path: Path, cache: Path) -> None:
    change, words, expected = TRICKS[trick]
    forbidden, model = outside(tmp_path / "outside"), Path(shutil.copytree(made, tmp_path / "model"))
    change(model, forbidden)
    work = model if trick == "modules" else tmp_path / "work"  # the stranger's folder as the working folder too
    work.mkdir(exist_ok=True)
    ended, said = attempt([word.replace("MODEL", str(model)) for word in words], work, cache, forbidden)
    assert expected in (None, ended), said
    if (work / "exported").exists():
        assert not any("do not read" in path.read_text(errors="replace") for path in (work / "exported").iterdir())


@pytest.mark.slow
def test_it_is_refused_before_anything_slow_is_imported(made: Path, tmp_path: Path, cache: Path) -> None:
    refused_early(TRICKS, ("template_endless",), made, tmp_path, cache)  # the template runs once the model is there
