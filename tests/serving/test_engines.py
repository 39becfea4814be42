"""Commands of vLLM, SGLang and llama.cpp: their sizes by hand, their words by the engines' own parsers where these are.

What cannot be installed next to this package's torch is stood for by a program of the same name and options.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.serving.engine_process import EngineClient, RefusedAnswerError, compare
from mgpu_pipe.serving.engines import EngineRequest, Gpus, choose_sizes, find_engine
from mgpu_pipe.serving.source import read_adapters
from tests.inference.support import write_run, write_texts
from tests.serving.servers import serving, train_run
from tests.support.command import mgpu
from tests.support.needs import need_server

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
ELEMENTS_70B = 70_553_706_496
"""Of https://huggingface.co/meta-llama/Meta-Llama-3-70B."""
GPUS = ("--gpus", "8", "--gpu-memory", "80GB")


def sizes_of(gpus: Gpus, context: int = 8192, concurrency: int = 16, dtype: str = "bf16", **fields: Any) -> Any:
    return choose_sizes({**LLAMA_70B, **fields}, ELEMENTS_70B, dtype, context, concurrency, gpus, 0.9)


def test_sizes_are_those_by_hand() -> None:
    """A token takes 2 * 80 layers * 8 heads * 128 * 2 bytes; (141.1 + 42.9) GB on 3 GPUs of 80 GB would fit, but 64
    heads do not divide by 3."""
    sizes = sizes_of(Gpus(8, 80 * 10**9))
    assert sizes.cache_bytes == 327_680 * 8192 * 16
    assert sizes.tensor_parallel == 4
    assert sizes.gpu_bytes == int((2 * ELEMENTS_70B + sizes.cache_bytes) / 4 + 1.5e9)
    assert sizes_of(Gpus(8, 141 * 10**9)).tensor_parallel == 2
    assert sizes_of(Gpus(8, 141 * 10**9), concurrency=1).tensor_parallel == 2  # 143.8 GB and more than one GPU
    assert sizes_of(Gpus(0, 0)).tensor_parallel == 1
    assert [sizes_of(Gpus(count, 80 * 10**9, 8)).tensor_parallel for count in (0, 8)] == [8, 8]


def test_key_value_heads_are_whole_or_repeated() -> None:
    """Four GPUs share two key-value heads, each of which two GPUs hold; 16 heads on 5 or 6 GPUs do not divide."""
    fields: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
    sizes = sizes_of(Gpus(7, 48 * 10**9), 8192, 1, **fields)
    assert sizes.tensor_parallel == 4
    assert sizes.gpu_bytes == int((2 * ELEMENTS_70B + 2 * sizes.cache_bytes) / 4 + 1.5e9)


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    for ranks in (None, 2):
        with pytest.raises(BadInputError, match=r"141\.1 GB and caches of 42\.9 GB .* each of 2 GPUs"):
            sizes_of(Gpus(2, 80 * 10**9, ranks))


def test_processes_on_cpus_share_layers_where_they_are_asked_for(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM ends on a machine with fewer NUMA nodes than processes unless it binds none."""
    request = engine_request(runs, sizes_of(Gpus(0, 0, 2)))
    command = find_engine("vllm").command(request, ["vllm"])
    assert options(list(command.words))["--tensor-parallel-size"] == "2"
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    alone = find_engine("vllm").command(engine_request(runs, sizes_of(Gpus(0, 0))), ["vllm"])
    assert "VLLM_CPU_OMP_THREADS_BIND" not in alone.environment
    wanted = ("--engine", "sglang", "--device", "cpu", "--tensor-parallel", "2")
    _, words, _ = printed(capsys, str(runs / "llama"), *wanted)
    assert options(words)["--tp-size"] == "2"


def engine_request(folder: Path, sizes: Any) -> EngineRequest:
    return EngineRequest(folder, "talk", "127.0.0.1", 1, None, "cpu", "fp32", sizes, memory_share=0.9, token=None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of families by name."""
    folder = tmp_path_factory.mktemp("engines")
    texts = write_texts(folder / "texts", 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_PIPE_CACHE", str(folder / "cache"))
        for family in ("llama", "bloom"):
            write_run(folder / family, family, texts, folder / "cache")
        write_run(folder / "small", "llama", texts, folder / "cache", num_hidden_layers=1)
        write_run(folder / "short", "llama", texts, folder / "cache", max_position_embeddings=16)
        write_run(folder / "wide", "llama", texts, folder / "cache", vocab_size=400)
        yield folder


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], list[str], dict[str, str]]:
    """The export's words, the engine's words, and the engine's variables that ``serve --print`` shows."""
    assert main(["serve", *words, "--print"]) == 0
    export, engine = map(shlex.split, capsys.readouterr().out.splitlines())
    variables = dict(word.split("=", 1) for word in engine if word.partition("=")[0].isupper() and "=" in word)
    return export, engine[len(variables) :], variables


def options(words: list[str]) -> dict[str, str]:
    """Values by option."""
    return {name: value for name, value in pairwise(words) if name.startswith("--")}


def test_vllm_on_gpus(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export, words, variables = printed(capsys, str(runs / "llama"), "--engine", "vllm", *GPUS, "--token", "secret")
    assert words[:2] == ["vllm", "serve"] and "secret" not in words and variables["VLLM_API_KEY"] == "secret"
    assert export[:3] == ["mgpu-pipe", "export", str(runs / "llama")] and options(export)["--out"] == words[2]
    wanted = {"--dtype": "bfloat16", "--max-model-len": "64", "--max-num-seqs": "16", "--tensor-parallel-size": "1"}
    assert wanted.items() <= options(words).items() and options(words)["--host"] == "127.0.0.1"
    assert main(export[1:]) == 0 and (Path(words[2]) / "generation_config.json").is_file()


def test_the_embedded_server_is_a_command_of_this_program(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(runs / "llama"), "--print", "--port", "0"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["mgpu-pipe", "serve", str(runs / "llama")] and options(words)["--dtype"] == "fp32"


def test_sglang_on_cpus_and_llama_cpp(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, words, _ = printed(capsys, str(runs / "llama"), "--engine", "sglang", "--device", "cpu", "--context", "32")
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert {"--context-length": "32", "--device": "cpu", "--dtype": "float32"}.items() <= options(words).items()
    chosen = ("--engine", "llama_cpp", "--concurrency", "4", "--dtype")
    export, _, _ = printed(capsys, str(runs / "llama"), *chosen, "q4_k")
    assert options(export)["--dtype"] == "q4_k"
    export, words, variables = printed(capsys, str(runs / "llama"), *chosen, "q8_0")
    assert options(words)["--ctx-size"] == "256" and options(words)["--parallel"] == "4"
    assert options(words)["--model"] == f"{options(export)['--out']}/model.gguf"
    assert options(export)["--format"] == "gguf" and options(export)["--dtype"] == "q8_0"
    assert len(variables["LLAMA_API_KEY"]) >= 32


def test_a_draft_goes_to_each_engine(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafted = [str(runs / "llama"), "--draft", str(runs / "small"), "--engine"]
    for engine, place in (("vllm", GPUS), ("sglang", GPUS), ("llama_cpp", ())):
        assert main(["serve", *drafted, engine, *place, "--print"]) == 0
        *exports, line = map(shlex.split, capsys.readouterr().out.splitlines())
        folder = options(exports[-1])["--out"]
        assert exports[-1][:3] == ["mgpu-pipe", "export", str(runs / "small")]
        words = options(line)
        if engine == "vllm":
            config = json.loads(words["--speculative-config"])
            assert config == {"method": "draft_model", "model": folder, "num_speculative_tokens": 5}
        elif engine == "sglang":
            assert words["--speculative-algorithm"] == "STANDALONE"
            assert words["--speculative-draft-model-path"] == folder
        else:
            assert words["--model-draft"] == f"{folder}/model.gguf" and words["--gpu-layers-draft"] == "0"


def test_a_draft_takes_memory_and_divides_as_the_model_does() -> None:
    alone = sizes_of(Gpus(8, 80 * 10**9))
    shape = {**LLAMA_70B, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    draft = (shape, 10**9)
    drafted = choose_sizes(LLAMA_70B, ELEMENTS_70B, "bf16", 8192, 16, Gpus(2, 141 * 10**9), 0.9, draft)
    assert drafted.tensor_parallel == 2
    cache = 2 * 8 * 2 * 4096 * 2 * 8192 * 16  # heads of 8192 / 2
    assert drafted.cache_bytes == alone.cache_bytes + cache
    assert drafted.gpu_bytes == int((2 * (ELEMENTS_70B + 10**9) + drafted.cache_bytes) / 2 + 1.5e9)


def write_adapter(folder: Path, **settings: Any) -> Path:
    """A folder of the peft package whose weights no model reads."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 24, **settings}))
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(24, 5)}, folder / "adapter_model.safetensors")
    return folder


def last_line(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The words that start the server, of ``serve --print``; an export that is there already has no line."""
    assert main(["serve", *words, "--print"]) == 0
    return shlex.split(capsys.readouterr().out.splitlines()[-1])


def test_adapters_go_to_each_engine_by_name(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (f"{name}={write_adapter(tmp_path / name)}" for name in ("polite", "rude"))
    given = [str(runs / "llama"), "--adapter", first, "--adapter", second]
    words = last_line(capsys, *given, "--engine", "vllm", *GPUS)
    assert options(words)["--max-lora-rank"] == "32" and options(words)["--max-loras"] == "2"
    place = words.index("--lora-modules")
    assert words[place + 1 : place + 3] == [first, second] and "--enable-lora" in words
    words = last_line(capsys, *given, "--engine", "sglang", *GPUS)
    place = words.index("--lora-paths")
    assert words[place + 1 : place + 3] == [first, second] and "--enable-lora" in words
    words = last_line(capsys, *given)
    assert [words[place + 1] for place, word in enumerate(words) if word == "--adapter"] == [first, second]
    serve_file = tmp_path / "serve.yaml"
    model = f"{{folder: {runs / 'llama'}, port: 1, engine: vllm, adapter: [{first}, {second}]}}"
    serve_file.write_text(f"models: [{model}]")
    assert main(["serve", str(serve_file), "--print", "--gpus", "1", "--gpu-memory", "80GB"]) == 0
    assert f"--lora-modules {first} {second}" in capsys.readouterr().out


def test_adapters_that_an_engine_does_not_take_are_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_adapter(tmp_path / "plain")
    dora = write_adapter(tmp_path / "dora", use_dora=True)
    whole = write_adapter(tmp_path / "whole", modules_to_save=["lm_head"])
    for words, part in (
        (("vllm", f"a={dora}"), "has weights of DoRA, which vllm does not take; use --engine transformers"),
        (("sglang", f"a={whole}"), "has weights of whole modules, which sglang does not take"),
        (("llama_cpp", f"a={plain}"), "llama.cpp chooses no adapter by the model of a request"),
        (("vllm", str(plain)), "has no name or no folder; write --adapter NAME=FOLDER"),
        (("vllm", f"llama={plain}"), "the name llama is taken"),
        (("vllm", f"a={runs / 'llama'}"), "give a folder of the peft package, as export --format peft writes it"),
    ):
        given = ["--name", "llama", "--print", *(GPUS if words[0] != "llama_cpp" else ())]
        assert main(["serve", str(runs / "llama"), "--engine", words[0], "--adapter", words[1], *given]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and part in said.err


def test_adapters_take_memory(runs: Path, tmp_path: Path) -> None:
    [adapter] = read_adapters([f"polite={write_adapter(tmp_path / 'polite')}"], "llama")
    assert (adapter.name, adapter.rank, adapter.elements, adapter.extra) == ("polite", 24, 24 * 5, "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("llama", "--engine", "vllm", "--device", "cpu"), "heads of 16"),
        (("bloom", "--engine", "llama_cpp"), "bloom is none of llama, mistral"),
        (("llama", "--engine", "vllm", *GPUS, "--context", "65"), "made for 64"),
        (("llama", "--engine", "vllm", "--gpus", "1", "--gpu-memory", "1GB"), "GB a GPU"),
        (("llama", "--engine", "vllm", *GPUS, "--dtype", "q8_0"), "vllm takes fp32"),
        (("llama", "--engine", "vllm", "--gpus", "1"), "give both"),
        (("llama", "--context", "8"), "--context"),
        (("llama", "--tensor-parallel", "2"), "--tensor-parallel: transformers takes none"),
        (("llama", "--engine", "llama_cpp", "--tensor-parallel", "2"), "--tensor-parallel: llama_cpp takes none"),
        (("llama", "--engine", "vllm", *GPUS, "--tensor-parallel", "3"), "=3: the attention heads do not divide"),
        (("llama", "--engine", "vllm", *GPUS, "--tensor-parallel", "16"), "=16: the attention heads"),
        (("llama", "--engine", "vllm", *GPUS[2:], "--gpus", "1", "--tensor-parallel", "2"), "=2: there are 1 GPUs"),
        (("llama", "--draft", "small"), "--draft: is for other engines than transformers"),
        (("llama", "--engine", "vllm", *GPUS, "--draft", "wide"), "has other tokens (400)"),
        (("llama", "--engine", "vllm", *GPUS, "--draft", "short"), "made for 16 tokens; add --context 16"),
        (("llama", "--engine", "vllm", *GPUS, "--draft", "nosuch"), "nosuch: no such folder"),
    ],
)
def test_what_an_engine_refuses_is_one_line(
    runs: Path, words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    assert main(["serve", *words, "--print"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and part in said.err


@pytest.mark.parametrize("name", ["vllm", "sglang", "llama_cpp"])
def test_the_line_that_installs_an_engine(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=rf"python3 -m venv {tmp_path}/env && .*/pip install .* --engine-env"):
        find_engine(name).find(tmp_path / "env")


def test_the_server_of_llama_cpp_python_takes_no_draft(runs: Path) -> None:
    request = replace(engine_request(runs, sizes_of(Gpus(0, 0))), draft=runs)
    with pytest.raises(BadInputError, match="--draft: the server of llama-cpp-python takes none"):
        find_engine("llama_cpp").command(request, ["python", "-m", "llama_cpp.server"])


def test_vllms_own_parser_takes_the_words(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM's parser is its own: pip install vllm")
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ModuleNotFoundError:  # where other versions have it
        from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert main(["export", str(runs / "small"), "--out", str(runs / "draft")]) == 0
    capsys.readouterr()
    _, words, _ = printed(capsys, str(runs / "llama"), "--engine", "vllm", *GPUS, "--draft", str(runs / "draft"))
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    assert parsed.max_model_len == 64 and parsed.tensor_parallel_size == 1


def test_sglangs_own_parser_takes_the_words(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang's parser is its own: pip install sglang")
    from sglang.srt.server_args import prepare_server_args

    assert main(["export", str(runs / "small"), "--out", str(runs / "sglang_draft")]) == 0
    capsys.readouterr()
    drafted = ("--draft", str(runs / "sglang_draft"))
    _, words, _ = printed(capsys, str(runs / "llama"), "--engine", "sglang", *GPUS, *drafted)
    assert prepare_server_args(words[3:]).context_length == 64


def test_an_answer_that_ends_within_a_character_is_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM leaves the bytes out."""
    monkeypatch.setattr(EngineClient, "greedy_answer", lambda *_: "caf")
    client = EngineClient("http://127.0.0.1:1", None, "talk")
    compare(client, {"answers": [("a", "caf\ufffd"), ("b", "caf\ufffde")], "is_chat": False}, is_exact=False)
    assert "1 of 2 greedy answers" in (said := capsys.readouterr().out) and "to 'b' it answers" in said


def test_a_refused_answer_is_a_different_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp sends no answer whose bytes are not UTF-8; one that is sent and equal is enough."""

    def answer(client: EngineClient, prompt: str, *_: object) -> str:
        if prompt == "sent":
            return "same"
        if prompt == "lost":
            raise MgpuError("http://127.0.0.1:1/v1: no answer (timed out)")
        raise RefusedAnswerError("http://127.0.0.1:1/v1: the server answers 500: no UTF-8")

    monkeypatch.setattr(EngineClient, "greedy_answer", answer)
    client, pairs = EngineClient("http://127.0.0.1:1", None, "talk"), [("refused", "\ufffd"), ("sent", "same")]
    compare(client, {"answers": pairs, "is_chat": False}, is_exact=False)
    assert "1 of 2 greedy answers" in (said := capsys.readouterr().out) and "'the server answers 500: no UTF-8'" in said
    for kept, is_exact in ((pairs, True), (pairs[:1], False)):
        with pytest.raises(MgpuError, match="answers 500"):
            compare(client, {"answers": kept, "is_chat": False}, is_exact)
    with pytest.raises(MgpuError, match="no answer"):
        compare(client, {"answers": [("lost", ""), *pairs], "is_chat": False}, is_exact=False)


STANDIN = """#!{python}
import argparse, json, os, signal, socket
parser = argparse.ArgumentParser()
parser.add_argument("verb", choices=["serve"])
parser.add_argument("model")
for name in ("served-model-name", "host", "dtype"):
    parser.add_argument("--" + name, required=True)
for name in ("port", "max-model-len", "max-num-seqs", "tensor-parallel-size"):
    parser.add_argument("--" + name, required=True, type=int)
parser.add_argument("--speculative-config", required=True, type=json.loads)
options = parser.parse_args()
assert os.path.isfile(os.path.join(options.speculative_config["model"], "config.json"))
if os.fork() == 0:  # as vLLM's engine core, which SIGTERM of the front does not reach
    open({pids!r}, "w").write(str(os.getpid()))
    while True:
        signal.pause()
os.environ["MGPU_PIPE_SERVE_TOKEN"] = os.environ["VLLM_API_KEY"]
from mgpu_pipe.serving.server.__main__ import main
listener = socket.create_server((options.host, options.port))
main(options.model, options.served_model_name, options.host, str(listener.detach()), "cpu")
"""


def write_program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.mark.slow
def test_an_engine_is_awaited_compared_and_ended_with_all_that_it_started(tmp_path: Path) -> None:
    need_server()
    cache, pids = tmp_path / "cache", tmp_path / "pid"
    train_run(tmp_path, cache)
    write_program(tmp_path / "env" / "bin" / "vllm", STANDIN.format(python=sys.executable, pids=str(pids)))
    words = ["run", "--engine", "vllm", "--engine-env", "env", "--name", "my model", "--draft", "run"]
    with serving(cache, tmp_path, *words) as started:
        assert started.printed[0] == "5 of 5 greedy answers equal the run's\n"
        assert "serving my model" in started.printed[1] and started.send("/v1/models")[0] == 200
    child = Path(f"/proc/{pids.read_text()}")
    deadline = time.monotonic() + 60
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    write_program(tmp_path / "env" / "bin" / "vllm", "#!/bin/sh\necho no kernel image is available\nexit 3\n")
    said = mgpu(cache, tmp_path, "serve", "run", "--engine", "vllm", "--engine-env", "env", "--port", "0", code=1)
    assert "--engine=vllm: ended: no kernel image is available" in said
    assert os.listdir(tmp_path / "cache" / "served")
