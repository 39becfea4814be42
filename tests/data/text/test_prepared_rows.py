"""Which rows are trained on and which are held out, of pairs and of labelled texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare, read_prepared

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "pairs": (("model=t5_tiny", "objective=seq2seq", "data=pairs_jsonl"), ("source", "target")),
    "labelled": (("model=bert_tiny", "objective=sequence_classification", "data=labelled_jsonl"), ("text", "label")),
}


def written(file: Path, names: tuple[str, str], numbers: range) -> Path:
    rows = [{names[0]: f"text {number}", names[1]: "odd" if number % 2 else "even"} for number in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("held", "sizes"), [("a share", None), ("another file", (40, 10)), ("the same file", (40, 40)), ("none", (40, 0))]
)
def test_a_split_is_a_share_or_a_file(tmp_path: Path, kind: str, held: str, sizes: Any) -> None:
    chosen, names = KINDS[kind]
    train = written(tmp_path / "train.jsonl", names, range(40))
    other = written(tmp_path / "other.jsonl", names, range(100, 110))
    more = {
        "a share": ["data.validation_fraction=0.3"],
        "another file": [f"data.validation_paths=[{other}]"],
        "the same file": [f"data.validation_paths=[{train}]"],
        "none": ["data.validation_fraction=0"],
    }[held]
    paths = (f"data.paths=[{train}]", f"data.cache_dir={tmp_path / 'cache'}", "model.config.vocab_size=384")
    config, _ = compose([*chosen, *paths, "data.seq_len=24", *more])
    prepared = prepare(config)
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    known = prepared.as_dict()
    found = known["train_samples"], known["held_out_samples"]
    assert found == sizes if sizes else sum(found) == 40 and min(found) > 0
    assert len(prepared.open(config, "train")) == found[0]
    if found[1]:
        assert len(prepared.open(config, "validation")) == found[1]
    else:
        with pytest.raises(ValueError, match="holds nothing out"):
            prepared.open(config, "validation")
