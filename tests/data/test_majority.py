"""The majority baseline that ``check`` says beside accuracy. Oracle: labels counted by hand, and scikit-learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data import majority
from mgpu_pipe.report.overview import overview
from tests.support.needs import need_digits
from tests.support.pictures import folder_of_classes

VIT = ("model=vit_tiny", "objective=image_classification")


def said(*overrides: str) -> str:
    return dict(overview(compose(overrides)[0])).get("majority", "")


def test_a_table_of_labelled_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"text {n}", "label": "abb"[n % 3]} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl")
    data = f"data.paths=[{tmp_path}/rows.jsonl]"
    assert said(*words, data) == "66.7% accuracy by always saying b (2 classes, 30 samples)"
    monkeypatch.setattr(majority, "COUNTED", 5)
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
