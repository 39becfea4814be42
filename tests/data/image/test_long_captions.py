"""Captions that are longer than ``data.seq_len`` are cut, left out or refused, and counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.data.images.prepare_captions import PreparedCaptions
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import ConfigError, ConfigErrors
from tests.objectives.test_contrastive import captioned

LONG = "a square with very many words of which each costs more than one of the tokens that there are"


def prepared_captions(folder: Path, *overrides: str) -> PreparedCaptions:
    """Sixty pictures, every fifth with a long caption."""
    config = captioned(folder, *overrides)
    table = folder / "captions.csv"
    header, *lines = table.read_text().splitlines()
    lines = [f"{line.partition(',')[0]},{LONG}" if at % 5 == 0 else line for at, line in enumerate(lines)]
    table.write_text("\n".join([header, *lines]) + "\n")
    found = prepare(config)
    assert isinstance(found, PreparedCaptions)
    again = read_prepared(found.as_dict())
    assert again == found and isinstance(again, PreparedCaptions)
    return again


def test_long_captions_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    cut = prepared_captions(tmp_path, "data.on_too_long=auto")
    said = prepared_captions(tmp_path, "data.on_too_long=truncate")
    left = prepared_captions(tmp_path, "data.on_too_long=drop")
    assert cut.digest == said.digest != left.digest and cut.too_long_samples == left.too_long_samples == 12
    assert cut.train_samples + cut.held_out_samples == 60 and left.train_samples + left.held_out_samples == 48
    config = captioned(tmp_path)
    assert cut.too_long(config.data) == "12 captions are longer than data.seq_len=12: cut at their end " + (
        "(data.on_too_long=truncate)"
    )
    assert "12 captions are longer than data.seq_len=12: left out" in left.too_long(config.data)
    config = captioned(tmp_path, "data.on_too_long=drop")
    samples = left.open(config, "train")
    batch = samples.batch(np.arange(len(samples)), np.arange(len(samples)))
    captions = {tuple(row) for row in batch["input_ids"].tolist()}
    assert len(captions) == 3, "one a class: the long one is gone"
    fits = prepared_captions(tmp_path, "data.on_too_long=drop", "data.seq_len=120")
    whole = prepared_captions(tmp_path, "data.seq_len=120")
    assert fits.digest == whole.digest and fits.train_samples + fits.held_out_samples == 60


def test_long_captions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len=12: 1 of 4 captions are longer.*data.on_too_long=refuse"):
        prepared_captions(tmp_path, "data.on_too_long=refuse")
    with pytest.raises(ConfigErrors, match=r"data.on_too_long=split: .*; use auto, refuse, drop, truncate"):
        preflight(captioned(tmp_path, "data.on_too_long=split"))
