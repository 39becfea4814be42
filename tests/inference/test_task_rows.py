"""Files of evaluation tasks are read as training reads them. The oracle is the source of training."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pytest
from pyarrow import parquet
from transformers import LlamaConfig, LlamaForCausalLM

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.cache import no_progress
from mgpu_pipe.data.sources.text_files import FORMAT
from mgpu_pipe.data.sources.text_tables import TEXTS
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import DataError
from mgpu_pipe.inference import generation
from mgpu_pipe.inference.tasks import measure, rows_of
from mgpu_pipe.inference.tasks.answers import Question
from mgpu_pipe.inference.tasks.choice import Choice
from mgpu_pipe.inference.tasks.judge import Judge
from tests.inference.support import write_tokenizer

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix.lower() == ".csv":
        fields = [[value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows]
        with path.open("w", newline="", encoding="utf-8-sig") as out:
            csv.writer(out).writerows([rows[0].keys(), *fields])
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix.lower() == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["p.csv", "P.CSV", "p.json", "p.jsonl", "P.JSONL", "p.parquet", "table"])
def test_perplexity_is_of_the_texts_of_a_table(tmp_path: Path, name: str) -> None:
    file = write_table(tmp_path / name, [{"id": "1", "text": "hello"}, {"id": "2", "text": "one, two"}])
    data = compose(["data=jsonl", f"data.paths=[{file}]"])[0].data
    source = TEXTS[0].open(data, tmp_path / "cache", no_progress, "data.paths")
    expected = [str(document.text) for document in source.documents()]
    task = EvalTask(kind="perplexity", paths=[str(file)])
    assert list(rows_of(task, "t", "text")) == expected == ["hello", "one, two"]
    with pytest.raises(DataError, match=r"set data.text_column to one that is there: id, text"):
        rows_of(task, "t", "body")


def test_perplexity_is_of_the_texts_of_training(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_text("\ufeffmarked", encoding="utf-8")
    (tmp_path / "plain.md").write_text("# plain\n")
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        archive.writestr("a.txt", "first")
        archive.writestr("b.txt", "second")
    paths = [tmp_path / name for name in ("bom.txt", "plain.md", "t.zip")]
    data = compose(["data=text_files", f"data.paths=[{tmp_path}/*.*]"])[0].data
    source = FORMAT.open_files(data, paths, tmp_path / "cache", no_progress)
    expected = [str(document.text) for document in source.documents()]
    task = EvalTask(kind="perplexity", paths=[str(path) for path in paths])
    assert list(rows_of(task, "t", "text")) == expected == ["marked", "# plain\n", "first", "second"]
    nested = write_table(tmp_path / "n.jsonl", [{"meta": {"text": "inside"}}])
    assert list(rows_of(EvalTask(kind="perplexity", paths=[str(nested)]), "t", "meta.text")) == ["inside"]
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfea")
    with pytest.raises(DataError, match=r"bad\.txt"):
        rows_of(EvalTask(kind="perplexity", paths=[str(tmp_path / "bad.txt")]), "t", "text")


@pytest.mark.parametrize("name", ["p.csv", "p.json", "p.jsonl", "p.parquet"])
def test_questions_and_choices_lie_in_tables(tmp_path: Path, name: str) -> None:
    file = write_table(tmp_path / name, [{"messages": TALK, "tools": json.dumps([TOOL])}])
    assert list(rows_of(EvalTask(paths=[str(file)]), "t", "text")) == [Question(TALK[:1], "a", [TOOL])]
    file = write_table(tmp_path / f"c-{name}", [{"prompt": "[1]", "choices": ["x", "y"], "answer": 1}])
    assert list(rows_of(EvalTask(kind="choice", paths=[str(file)]), "t", "text")) == [Choice("[1]", ["x", "y"], 1)]


def test_the_tools_of_a_question_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = generation.load_tokenizer(write_tokenizer(tmp_path))
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    texts, encode = [], generation.encode

    def record(*arguments: Any) -> list[int]:
        ids = encode(*arguments)
        texts.append(str(tokenizer.decode(ids)))
        return ids

    monkeypatch.setattr(generation, "encode", record)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    judge = Judge(cast(Any, SimpleNamespace(model=LlamaForCausalLM(config))), tokenizer, chat_of(tmp_path), 64)
    rows = [Question(TALK[:1], "a", [TOOL]), Question(TALK[:1], "a")]
    assert measure(rows, EvalTask(max_new_tokens=2), judge).denominator == 2
    assert texts == ["f\nuser q\nassistant ", "user q\nassistant "]
