"""What ``mgpu-pipe data`` shows is what is trained on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from mgpu_pipe.cli.main import main
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.loader import train_step_batches
from mgpu_pipe.data.prepare_data import prepare as prepare_any
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.packed_dataset import PackedDataset
from mgpu_pipe.data.text.prepare_text import prepare
from mgpu_pipe.data.text.preview import parts_of, uncounted_of
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.topology import BatchPlan
from tests.data.support import config, sentences, write_jsonl

ROWS = [{"prompt": sentences(n, 4), "completion": f"No. {n}! " + sentences(-n, 1 + n % 9)} for n in range(40)]


def test_the_parts_that_are_marked_are_the_labels(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", ROWS)
    run = config(tmp_path, source="chat_jsonl", paths=[str(path)], chat_template="chatml", seq_len=48)
    prepared = prepare(run)
    samples = PackedDataset.open(prepared, "train")
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    every = np.arange(len(samples))
    batch = samples.batch(every)
    cut = 0
    for row, parts in enumerate(parts_of(prepared, samples, every, every, causal=True)):
        labels = batch["labels"][row]
        said = "".join(part.text for part in parts if part.trained)
        wanted = tokenizer.decode(labels[labels != IGNORE_INDEX].tolist(), skip_special_tokens=False)
        # The label behind a cut document's last token is its next one, which stands in another sample.
        cut += said != wanted
        assert wanted.startswith(said)
        shown = "".join(part.text for part in parts)
        whole = tokenizer.decode(batch["input_ids"][row].tolist(), skip_special_tokens=False)
        assert whole.startswith(shown) and not whole[len(shown) :].replace("<|endoftext|>", "")
        assert sum(part.begins for part in parts) in (
            shown.count("<|im_start|>user"),
            shown.count("<|im_start|>user") + 1,
        )
    assert cut < len(samples) / 2


@pytest.mark.parametrize("kind", ["chat", "pairs", "labelled", "masked"])
def test_the_verb_shows_every_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chat.jsonl", ROWS)
    labelled = [{"text": sentences(n, 5), "label": "odd" if n % 2 else "even"} for n in range(40)]
    write_jsonl(tmp_path / "labelled.jsonl", labelled)
    words, expected = {
        "chat": (
            ["model=llama_tiny", "data=chat_jsonl", "data.paths=[chat.jsonl]", "data.chat_template=chatml"],
            "\u00bbNo. ",
        ),
        "pairs": (
            ["objective=seq2seq", "model=t5_mini", "data=number_words", "data.numbers.count=50", "data.seq_len=16"],
            "\u00bb",
        ),
        "labelled": (
            [
                "objective=sequence_classification",
                "model=bert_tiny",
                "data=labelled_jsonl",
                "data.paths=[labelled.jsonl]",
            ],
            "\u00bb \u2192 ",
        ),
        "masked": (["objective=masked_lm", "model=bert_tiny", "data=chat_jsonl"], "\u00bb"),
    }[kind]
    if kind == "masked":
        (tmp_path / "a.txt").write_text(sentences(3, 4000))
        words = [*words[:2], "data=text_files", "data.paths=[a.txt]", "data.validation_fraction=0"]
    assert main(["data", *words, "data.seq_len=32", "data.global_batch_size=8", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    for word in (
        *("source ", "amount ", "samples ", "an epoch ", "loss ", "padding ", "lengths ", "tokens a ", "sample 1 "),
    ):
        assert f"\n{word}" in f"\n{out}", word
    assert expected in out and "sample 2" not in out
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("kind", ["chat", "text", "masked", "mixture"])
def test_what_is_marked_is_what_the_first_step_is_trained_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the verb's words to the labels of the first step's micro-batches, on both of two processes."""
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chat.jsonl", ROWS)
    # Shorter than a sample: a cut text's last label is the first word of another sample.
    write_jsonl(tmp_path / "text.jsonl", [{"meta": {"text": sentences(n, 5)}} for n in range(90)])
    chat = ["data=chat_jsonl", "data.paths=[chat.jsonl]", "data.chat_template=chatml"]
    text = ["data=jsonl", "data.paths=[text.jsonl]", "data.text_column=meta.text"]
    words = {
        "chat": ["model=llama_tiny", *chat],
        "text": ["model=llama_tiny", *text],
        "masked": ["model=bert_tiny", "objective=masked_lm", *text],
        "mixture": [
            "model=llama_tiny",
            "data=mixture",
            "data.chat_template=chatml",
            "data.sources={a: {source: chat_jsonl, paths: [chat.jsonl]}, "
            "b: {paths: [text.jsonl], text_column: meta.text}}",
        ],
    }[kind]
    words += ["data.seq_len=64", "data.global_batch_size=4", "data.validation_fraction=0"]
    assert main(["data", *words, "--samples", "4"]) == 0
    shown = re.split(r"(?m)^sample \d.*\n\n", capsys.readouterr().out)[1:]
    marked = ["".join(re.findall("\u00bb([^\u00ab]*)\u00ab", sample)) for sample in shown]
    run = compose(words)[0]
    prepared = prepare_any(run)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))
    view, trained = objective_class(run.objective.name).samples, []
    for rank in range(2):
        step_batch = next(
            iter(train_step_batches(prepared.complete(run), prepared, BatchPlan(4, 2, 1), rank, 0, 1, view))
        )
        rows = [row for batch in step_batch.micro_batches for row in batch["labels"]]
        trained += [row[row != IGNORE_INDEX].tolist() for row in rows]
    assert step_batch.loss_denominator == sum(map(len, trained)) > 0
    assert marked == [tokenizer.decode(labels, skip_special_tokens=False) for labels in trained]


def test_documents_without_loss_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    path = write_jsonl(tmp_path / "text.jsonl", [{"text": sentences(n, 5) if n % 4 else ""} for n in range(40)])
    assert main(["data", "model=llama_tiny", "data=jsonl", f"data.paths=[{path}]", "--samples", "1"]) == 0
    assert "no loss   10 documents: they are empty" in capsys.readouterr().out
    prepared = prepare(config(tmp_path, source="jsonl", paths=[str(path)]))
    assert uncounted_of(prepared) == 10
    store = TokenStore.open(prepared.folder)
    mask = np.ones(len(store.tokens), np.uint8)
    first, last = int(store.offsets[1]), int(store.offsets[2])
    mask[first + 1 : last] = 0  # the first token of a document is nobody's label
    monkeypatch.setattr(TokenStore, "open", lambda folder: replace(store, loss_mask=mask))
    assert uncounted_of(prepared) == 11


def test_classes_are_shown_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {at}", "label": "yx"[at % 2]}) + "\n" for at in range(40)))
    words = ["model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl", f"data.paths=[{path}]"]
    assert main(["data", *words, "--samples", "1"]) == 0
    assert "classes   0 x, 1 y\n" in capsys.readouterr().out


def test_a_wrong_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MGPU_PIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt": "a"}) + "\n")
    words = ["model=llama_tiny", "data=chat_jsonl", "data.paths=[chat.jsonl]", "data.chat_template=plain"]
    assert main(["data", *words]) == 2
    assert "chat.jsonl:2: has no column 'messages'" in capsys.readouterr().err
    assert main(["data", *words, "--samples", "0"]) == 2
    assert "--samples: 0: use a whole number of at least 1" in capsys.readouterr().err
