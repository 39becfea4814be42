"""``export --push``, and the whole way: by name, offline, pushed, by name again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load

from tests.hub.support import RUN, Place, folder_of, rows
from tests.support.hub import TOKEN, files_of

pytestmark = pytest.mark.slow
DATA = ("data=text_files", 'data.paths=["hf://datasets/acme/texts/data/**/*.txt"]')


def test_from_the_hub_and_back(place: Place, model: Path, texts: Path) -> None:
    card = b"---\nlicense: cc-by-4.0\n---\n# Texts\n"
    held_out = ("data.validation_paths=[hf://datasets/acme/texts@v1/data/000.txt]",)
    files = {f"data/{name}": text for name, text in files_of(texts).items()}
    commit = place.hub.dataset("acme/texts").commit({**files, "README.md": card})
    place.hub.dataset("acme/texts").refs["v1"] = commit
    place.hub.model("acme/words").commit(files_of(model))
    words = ("model=hf", "model.path=acme/tiny", "data.tokenizer=acme/words", *DATA, *held_out, *RUN, "run.dir=tuned")
    place.run(*words, "trainer.max_steps=2")
    frozen = yaml.safe_load((place.root / "tuned" / "config.yaml").read_text())
    assert frozen["data"]["paths"] == [f"hf://datasets/acme/texts@{commit}/data/**/*.txt"]
    assert frozen["data"]["validation_paths"] == [f"hf://datasets/acme/texts@{commit}/data/000.txt"]
    assert frozen["data"]["tokenizer"] == f"acme/words@{place.hub.model('acme/words').refs['main']}"

    # Data, tokenizer and weights have moved, and there is no network: the run goes on as one from folders.
    for repository in place.hub.repositories.values():
        repository.commit({"README.md": b"all gone"})
    place.hub.requests.clear()
    place.run(*words, "checkpoint.resume=auto", offline=True)
    assert not place.hub.requests
    local = ("data=text_files", f"data.paths=[{texts}/*.txt]", f"data.validation_paths=[{texts}/000.txt]")
    truth = folder_of(place.run("model=hf", f"model.path={model}", *local, *RUN))
    assert rows(place.root / "tuned") == rows(truth)

    said = place.run("export", "tuned", "--out", "out", "--push", "acme/tuned", "--private", token=TOKEN)
    pushed = place.hub.model("acme/tuned")
    there = pushed.commits[pushed.refs["main"]]
    assert f"pushed out to {place.hub.url}/acme/tuned/commit/{pushed.refs['main']}" in said and pushed.private
    weights = load((place.root / "out" / "model.safetensors").read_bytes())
    sent = load(there["model.safetensors"])
    assert sent.keys() == weights.keys() and all(torch.equal(sent[name], weights[name]) for name in sent)
    text = there["README.md"].decode()
    front, body = yaml.safe_load(text.split("---")[1]), text.split("---", 2)[2]
    assert front["base_model"] == "acme/tiny" and front["datasets"] == ["acme/texts"]
    assert f"acme/texts at commit {commit} (data/**/*.txt), licence cc-by-4.0" in body.replace("\\*", "*")
    summary = json.loads((place.root / "tuned" / "summary.json").read_text())
    assert f"{summary['metrics']['val/loss']:.6g}" in body and "4 of 4 samples of 32 tokens" in body
    assert str(place.root) not in text and str(texts) not in text

    # By name again: what was trained is what is trained on.
    again = place.run("model=hf", "model.path=acme/tuned", *local, *RUN, "trainer.max_steps=1", token=TOKEN)
    exported = place.run("model=hf", "model.path=out", *local, *RUN, "trainer.max_steps=1")
    assert rows(folder_of(again)) == rows(folder_of(exported))

    # A second push leaves nothing of the first one's weights beside its own.
    place.run("export", "tuned", "--out", "parts", "--max-shard-size", "100KB", "--push", "acme/tuned", token=TOKEN)
    there = pushed.commits[pushed.refs["main"]]
    assert "model.safetensors" not in there and "model.safetensors.index.json" in there


def test_every_refusal_of_a_push_is_one_line_before_the_export(place: Place, model: Path) -> None:
    words = ("export", str(model), "--out", "out", "--push")
    assert "this machine has no token" in place.refused(*words, "acme/new")
    assert "refuses this account (401); log in" in place.refused(*words, "acme/new", token="hf_other")
    assert "give <org>/<name>" in place.refused(*words, "new", token=TOKEN)
    assert "give <org>/<name>" in place.refused(*words, "acme/new@v1", token=TOKEN)
    assert "HF_HUB_OFFLINE is set" in place.refused(*words, "acme/new", token=TOKEN, offline=True)
    assert "without --push" in place.refused(*words[:-1], "--private")
    assert not (place.root / "out").exists()
    place.hub.writers.clear()
    line = place.refused(*words, "acme/tiny", token=TOKEN)
    assert "refuses this account (403); log in (hf auth login) or set HF_TOKEN with a token that may" in line
