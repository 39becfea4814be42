"""Which rows of each kind are trained on and which are held out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from tests.data.support import write_jsonl

KINDS: dict[str, tuple[tuple[str, ...], Callable[[int], dict[str, Any]]]] = {
    "pairs_jsonl": (
        ("model=t5_tiny", "objective=seq2seq"),
        lambda number: {"source": f"text {number}", "target": parity(number)},
    ),
    "labelled_jsonl": (
        ("model=bert_tiny", "objective=sequence_classification"),
        lambda number: {"text": f"text {number}", "label": parity(number)},
    ),
    "preferences_jsonl": (
        ("objective=dpo", "data.chat_template=plain"),
        lambda number: {"prompt": f"text {number}", "chosen": parity(number), "rejected": parity(number + 1)},
    ),
    "unpaired_jsonl": (
        ("objective=kto", "data.chat_template=plain"),
        lambda number: {"prompt": f"text {number}", "completion": parity(number), "label": number % 2 == 0},
    ),
    "embedding_pairs": (
        ("model=bert_tiny", "objective=text_embedding"),
        lambda number: {"query": f"text {number}", "positive": f"{parity(number)} {number}"},
    ),
    "scored_pairs": (
        ("model=bert_tiny", "objective=text_similarity"),
        lambda number: {"sentence1": f"text {number}", "sentence2": parity(number), "score": number % 7},
    ),
}


def parity(number: int) -> str:
    return "odd" if number % 2 else "even"


def written(file: Path, row: Callable[[int], dict[str, Any]], numbers: range) -> Path:
    return write_jsonl(file, [row(number) for number in numbers])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("held", "sizes"), [("a share", None), ("another file", (40, 10)), ("the same file", (40, 40)), ("none", (40, 0))]
)
def test_a_split_is_a_share_or_a_file(tmp_path: Path, kind: str, held: str, sizes: Any) -> None:
    chosen, row = KINDS[kind]
    train = written(tmp_path / "train.jsonl", row, range(40))
    other = written(tmp_path / "other.jsonl", row, range(100, 110))
    more = {
        "a share": ["data.validation_fraction=0.3"],
        "another file": [f"data.validation_paths=[{other}]"],
        "the same file": [f"data.validation_paths=[{train}]"],
        "none": ["data.validation_fraction=0"],
    }[held]
    paths = (f"data.paths=[{train}]", f"data.cache_dir={tmp_path / 'cache'}", "model.config.vocab_size=384")
    config, _ = compose([*chosen, f"data={kind}", *paths, "data.seq_len=96", *more])
    prepared = prepare(config)
    assert read_prepared(json.loads(json.dumps(prepared.as_dict()))) == prepared
    known = prepared.as_dict()
    found = known["train_samples"], known["held_out_samples"]
    assert found == sizes if sizes else sum(found) == 40 and min(found) > 0
    rows = prepared.open(config, "train")
    indices = np.arange(4)
    assert len(rows) == found[0] and {len(field) for field in rows.batch(indices, indices).values()} == {4}
    assert 0 <= rows.padding(indices) < rows.positions(indices) and rows.valid_units(indices, indices) >= 4
    if found[1]:
        assert len(prepared.open(config, "validation")) == found[1]
    else:
        with pytest.raises(ValueError, match="holds nothing out"):
            prepared.open(config, "validation")
