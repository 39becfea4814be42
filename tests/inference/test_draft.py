"""``generate --draft``. The oracle of tokens is the same command without a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from mgpu_pipe.cli.main import main
from tests.inference.support import write_run, write_texts

PROMPTS = ("the quick brown", "an old", "lazy dog while a small cat", "sleeps")
WORDS = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
TOKENS = 24
GREEDY = [*WORDS, "--temperature", "0", "--max-new-tokens", str(TOKENS)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs: the model, a twin, one with nearly the same weights, a smaller one, and others that cannot draft."""
    folder = tmp_path_factory.mktemp("drafts")
    texts, cache = write_texts(folder / "texts", 6), folder / "cache"
    write_run(folder / "model", "llama", texts, cache)
    write_run(folder / "twin", "llama", texts, cache)
    write_run(folder / "near", "llama", texts, cache, scale=3.9)
    write_run(folder / "small", "llama", texts, cache, num_hidden_layers=1)
    write_run(folder / "short", "llama", texts, cache, max_position_embeddings=16)
    write_run(folder / "wide", "llama", texts, cache, vocab_size=400)
    write_run(folder / "stateful", "mamba", texts, cache)
    return folder


def answers(place: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["generate", str(place / "model"), *GREEDY, *words]) == 0
    return capfd.readouterr().out


def passes_of(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """A mapping from each llama model that runs, in the order of their first passes, to its forward passes."""
    passes = dict[int, int]()
    original = LlamaForCausalLM.forward

    def counted(self: LlamaForCausalLM, *args: Any, **options: Any) -> Any:
        passes[id(self)] = passes.get(id(self), 0) + 1
        return original(self, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    return passes


@pytest.mark.parametrize("draft", ["twin", "near", "small"])
def test_a_draft_changes_no_token(
    place: Path, draft: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(place, capfd)
    passes = passes_of(monkeypatch)
    assert answers(place, capfd, "--draft", str(place / draft)) == expected
    assert len(passes) == 2, "both models ran"


def test_a_draft_of_the_same_weights_saves_forward_passes(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = passes_of(monkeypatch)
    answers(place, capfd)
    [alone] = passes.values()
    passes.clear()
    answers(place, capfd, "--draft", str(place / "twin"))
    drafted, checked = passes.values()
    assert checked <= alone / 2 and drafted > checked


def test_a_draft_proposes_to_a_model_on_the_disk(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "map.yaml"
    file.write_text("{'': disk, model.embed_tokens: cpu}")
    words = ["--device-map", str(file), "--offload-folder", str(tmp_path / "disk"), "--draft", str(place / "near")]
    assert answers(place, capfd, *words) == answers(place, capfd)
    file.write_text("{'': disk}")
    assert main(["generate", str(place / "model"), *GREEDY, *words]) == 2
    assert "are on the disk; place them elsewhere" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model", "--draft", "twin", "--temperature", "0.5"], "takes the likeliest tokens; add --temperature 0"),
        (["model", "--draft", "twin"], "takes the likeliest tokens; add --temperature 0"),
        (["model", "--draft", "wide", "--temperature", "0"], "has other tokens (400) than"),
        (["model", "--draft", "short", "--temperature", "0"], "its context is 16, a prompt and its answer take up to"),
        (["model", "--draft", "stateful", "--temperature", "0"], "takes no token back"),
        (["stateful", "--draft", "model", "--temperature", "0"], "takes no token back"),
        (["model", "--draft", "nothing", "--temperature", "0"], "nothing: no such folder"),
    ],
)
def test_what_cannot_draft_is_one_line(
    place: Path, words: list[str], problem: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert main(["generate", *words, "--prompt", "the quick brown"]) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and problem in printed.err


def test_another_tokenizer_of_the_same_size_is_refused(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(place / "other", "llama", place / "texts", place / "cache")
    file = place / "other" / "tokenizer" / "tokenizer.json"
    text = file.read_text()
    swapped = text.replace('"a":', '"a_":', 1).replace('"b":', '"a":', 1).replace('"a_":', '"b":', 1)
    assert swapped != text
    file.write_text(swapped)
    assert main(["generate", str(place / "model"), *GREEDY, "--draft", str(place / "other")]) == 2
    assert "has other tokens (304)" in capfd.readouterr().err
