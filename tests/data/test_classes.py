"""Names and numbers of classes, and the majority baseline that ``check`` says beside accuracy.

Oracle of the baseline: labels counted by hand, and scikit-learn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.data import classes
from mgpu_pipe.data.classes import class_names, class_number
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.report.overview import overview
from tests.support.needs import need_digits
from tests.support.pictures import folder_of_classes

LONG = "9" * 5000
"""More digits than Python reads as a number."""


def test_numbers_come_by_value_before_words() -> None:
    assert class_names(ModelConfig(), DataConfig(), ["b", "10", "-3", "9", "a"]) == ["-3", "9", "10", "a", "b"]


def test_a_class_of_thousands_of_digits_is_a_word() -> None:
    assert class_names(ModelConfig(), DataConfig(), ["a", LONG, "10"]) == ["10", LONG, "a"]
    assert class_number(LONG, ["a", LONG]) == 1


def test_a_strange_class_of_thousands_of_digits_is_named_in_a_short_line() -> None:
    config = RunConfig()
    config.data.classes = ["a", "b"]
    with pytest.raises(ConfigError, match=r"the data also has a class '9{80}\.\.\.'"):
        class_names(config.model, config.data, ["a", LONG])


@pytest.mark.parametrize("twin", ["caf\u00e9 ", "cafe\u0301"])
def test_classes_that_look_alike_are_refused(twin: str) -> None:
    with pytest.raises(ConfigError, match=r"two classes that look like .*; write both alike"):
        class_names(ModelConfig(), DataConfig(), ["caf\u00e9", twin, "tea"])
    assert class_names(ModelConfig(), DataConfig(classes=["caf\u00e9", twin]), [twin]) == ["caf\u00e9", twin]


def test_names_of_a_table_of_the_datasets_library_are_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="the library writes the file: pip install datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"text {at}" for at in range(9)], "label": [1, 1, 0, 1, 1, 0, 1, 1, -1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    words = ("model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl", "data.seq_len=16")
    where = (
        f"data.paths=[{tmp_path}/rows.parquet]",
        f"data.cache_dir={tmp_path / 'cache'}",
        "model.config.vocab_size=300",
    )
    with pytest.raises(DataError, match=r"rows.parquet: row 9: has no class"):
        prepare(compose([*words, *where])[0])
    prepared: Any = prepare(compose([*words, *where, "data.on_bad_sample=skip"])[0])
    assert (prepared.classes, prepared.bad_samples) == (["no", "yes"], 1)
    assert np.bincount(np.concatenate([prepared.labels("train"), prepared.labels("validation")])).tolist() == [2, 6]
    (tmp_path / "empty.parquet").touch()
    both = f"data.paths=[{tmp_path}/empty.parquet,{tmp_path}/rows.parquet]"
    skipped: Any = prepare(compose([*words, *where, both, "data.on_bad_sample=skip"])[0])
    assert skipped.classes == ["no", "yes"]
    monkeypatch.setattr(classes, "class_names_of", lambda *_: [])
    earlier: Any = prepare(compose([*words, *where, "data.on_bad_sample=skip"])[0])
    assert earlier.classes == ["0", "1"]
    assert prepared.digest == earlier.digest, "runs of versions that numbered these classes resume"
    (tmp_path / "snli.jsonl").write_text('{"text": "a", "gold_label": "x"}\n{"text": "b", "gold_label": "-"}\n')
    snli = (f"data.paths=[{tmp_path}/snli.jsonl]", "data.label_column=gold_label")
    with pytest.raises(DataError, match=r"snli.jsonl:2: has no class; .*data.on_bad_sample=skip leaves it out"):
        prepare(compose([*words, *where, *snli])[0])


VIT = ("model=vit_tiny", "objective=image_classification")


def said(*overrides: str) -> str:
    return dict(overview(compose(overrides)[0])).get("majority", "")


def test_a_table_of_labelled_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"text {n}", "label": "abb"[n % 3]} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl")
    data = f"data.paths=[{tmp_path}/rows.jsonl]"
    assert said(*words, data) == "66.7% accuracy by always saying b (2 classes, 30 samples)"
    monkeypatch.setattr(classes, "COUNTED", 5)
    assert said(*words, data) == "60.0% accuracy by always saying b (2 classes, the first 5 samples)"


def test_folders_and_lists_of_pictures(tmp_path: Path) -> None:
    folder = folder_of_classes(tmp_path / "pictures", 4)
    (folder / "light" / "0.png").unlink()
    assert said(*VIT, "data=image_folder", f"data.paths=[{folder}]").startswith(
        "36.4% accuracy by always saying dark (3 c"
    )
    (tmp_path / "list.csv").write_text("image,label\n" + "".join(f"pictures/dark/{n}.png,x\n" for n in range(4)))
    assert said(*VIT, "data=image_list", f"data.paths=[{tmp_path}/list.csv]").startswith(
        "100.0% accuracy by always saying x"
    )


def test_digits_and_what_has_no_class() -> None:
    need_digits()
    from sklearn.datasets import load_digits

    labels = load_digits().target.tolist()
    share = 100 * max(map(labels.count, range(10))) / len(labels)
    assert said(*VIT, "data=digits").startswith(f"{share:.1f}% accuracy by always saying 3 (10 classes, 1,797 samples)")
    assert said("model=llama_tiny") == ""
