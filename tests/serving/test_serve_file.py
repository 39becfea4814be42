"""Several models on one machine: their shares by hand, the commands that get them, and two servers of one command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from mgpu_pipe.cli.main import main
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.serving.engines import Gpus
from mgpu_pipe.serving.serve_file import GpuShare, Need, check_host, read_serve_file, share_gpus
from tests.inference.support import write_run, write_texts
from tests.support.command import launched
from tests.support.needs import need_server

GB = 10**9


def test_shares_are_by_need() -> None:
    """Two GPUs of 80 GB: the model of both goes first, then 20 GB to the first and 10 GB to the second."""
    shares = share_gpus([Need(1, 20 * GB), Need(1, 10 * GB), Need(2, 30 * GB)], Gpus(2, 80 * GB), 0.9)
    expected = [((0,), 0.9 * 20 / 50), ((1,), 0.9 * 10 / 40), ((0, 1), 0.9 * 30 / 50)]
    assert [(given.devices, pytest.approx(given.share)) for given in shares] == expected
    assert share_gpus([Need(1, GB)], Gpus(1, 80 * GB), 0.9) == [GpuShare((0,), 0.9)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"1 x 50\.0 GB, 1 x 30\.0 GB, and 1 GPUs have 72\.0 GB"):
        share_gpus([Need(1, 50 * GB), Need(1, 30 * GB)], Gpus(1, 80 * GB), 0.9)
    with pytest.raises(BadInputError, match="2 x "):
        share_gpus([Need(2, GB)], Gpus(1, 80 * GB), 0.9)
    with pytest.raises(BadInputError, match=r"need 17\.0 GB, and this machine has 16\.0 GB"):
        check_host([Need(0, 9 * GB), Need(0, 8 * GB), Need(1, 99 * GB)], 16 * GB)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("models: [", "YAML"),
        ("model: []", "no list of models"),
        ("models: []", "no list of models"),
        ("models: [{folder: a}]", "no port"),
        ("models: [{folder: a, port: 1, gpu: 2}]", "models[0].gpu: no such key"),
        ("models: [{folder: a, port: [1]}]", "models[0].port"),
        ("models: [{folder: a, port: 1}, {folder: b, port: 1}]", "port=1 stands twice"),
        ("models: [{folder: a, port: 1, name: x}, {folder: b, port: 2, name: x}]", "name=x stands twice"),
        ("models: [{folder: a, port: 1, engine: vlm}]", "did you mean vllm?"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    assert main(["serve", str(tmp_path / "serve.yaml")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and part in said.err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    texts = write_texts(folder / "texts", 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_PIPE_CACHE", str(folder / "cache"))
        write_run(folder / "run", "llama", texts, folder / "cache")
    models = [
        {"folder": str(folder / "run"), "engine": "vllm", "port": 8001, "name": "a", "concurrency": 4},
        {"folder": str(folder / "run"), "engine": "sglang", "port": 8002, "name": "b", "concurrency": 10**6},
    ]
    (folder / "engines.yaml").write_text(json.dumps({"models": models}))
    embedded = [{"folder": "run", "port": 0, "name": name} for name in "ab"]
    (folder / "serve.yaml").write_text(json.dumps({"models": embedded}))
    return folder


def test_engines_get_their_gpus_and_shares(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(place / "cache"))
    assert read_serve_file(place / "engines.yaml")[1][1:] == [
        "--engine=sglang",
        "--port=8002",
        "--name=b",
        "--concurrency=1000000",
    ]
    assert main(["serve", str(place / "engines.yaml"), "--print", "--gpus", "2", "--gpu-memory", "80GB"]) == 0
    vllm, sglang = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "export" not in line]
    assert "CUDA_VISIBLE_DEVICES=1" in vllm and "CUDA_VISIBLE_DEVICES=0" in sglang  # the larger goes first
    assert vllm[vllm.index("--gpu-memory-utilization") + 1] == "0.9" and vllm[vllm.index("--port") + 1] == "8001"
    assert main(["serve", str(place / "engines.yaml"), "--print", "--gpus", "1", "--gpu-memory", "80GB"]) == 0
    words = shlex.split(capsys.readouterr().out)
    shares = [float(words[words.index(name) + 1]) for name in ("--gpu-memory-utilization", "--mem-fraction-static")]
    assert sum(shares) == pytest.approx(0.9, abs=0.002) and 5 * shares[0] < shares[1]


@pytest.mark.slow
def test_two_models_answer_and_end_together(place: Path) -> None:
    need_server()
    process = launched(place / "cache", place, "serve", "serve.yaml")
    lines = process.first_lines(6)
    assert [line for line in lines if line.startswith("5 of 5")] == ["5 of 5 greedy answers equal the run's\n"] * 2
    assert [line.split()[1] for line in lines if line.startswith("serving")] == ["a", "b"]
    process.terminate()
    assert process.wait(60) == 0
