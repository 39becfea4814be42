"""A model on the GPU, the host and the disk gives the tokens of one that is whole on the GPU; dry on host and disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mgpu_pipe.cli.main import main
from tests.inference.support import write_run, write_texts

WORDS = ("--prompt", "the quick brown", "--prompt", "an old", "--temperature", "0", "--max-new-tokens", "20")


@pytest.mark.parametrize(
    ("family", "layers"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("mixtral", "num_hidden_layers")]
)
def test_the_gpu_the_host_and_the_disk_give_the_same_tokens(
    family: str,
    layers: str,
    device: torch.device,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "user"))
    run = tmp_path / "run"
    model = write_run(run, family, write_texts(tmp_path / "texts", 6), tmp_path / "cache", **{layers: 6})
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    words = ["generate", str(run), *WORDS]
    assert main(words) == 0
    expected = capfd.readouterr().out
    limits = f"0={nbytes // 2},cpu={nbytes // 4}" if device.type == "cuda" else f"cpu={nbytes // 2}"
    place = ["--device-map", "auto", "--max-memory", limits, "--offload-folder", str(tmp_path / "disk")]
    assert main([*words, *place]) == 0
    printed = capfd.readouterr()
    assert printed.out == expected
    rows = dict(re.findall(r"^(cuda:0|cpu|disk) +([\d,]+)", printed.err, re.MULTILINE))
    sizes = {name: int(size.replace(",", "")) for name, size in rows.items()}
    assert sum(sizes.values()) == nbytes and all(sizes.values())
    assert set(sizes) == {device.type.replace("cuda", "cuda:0"), "cpu", "disk"}
    if device.type == "cuda":
        assert main([*words, *place, "--draft", str(run)]) == 0
        assert capfd.readouterr().out == expected
