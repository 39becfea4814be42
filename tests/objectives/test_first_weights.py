"""Files of what a run measures once: named by all that decided it, and read only as it was written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.objectives import answers, tower_features
from mgpu_pipe.objectives.first_weights import RunStart, array_file, is_whole, write_hashes
from mgpu_pipe.topology import BatchPlan


class Data:
    """What a run's measurements ask its prepared data."""

    digest, validation_digest, train_samples = "samples", "held out", 5

    def evaluated_samples(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64)


def features() -> Any:
    made = object.__new__(tower_features.LlavaFeatures)
    made._shape, made._tables = (2, 3), {}
    return made


def start_of(folder: Path, weights: str = "first", **changes: Any) -> RunStart:
    config = RunConfig()
    data: Any = Data()
    plan = BatchPlan.resolve(config.data, 1)
    return replace(RunStart(config, folder, data, plan, 0, 4, "fp32", lambda: weights), **changes)


def test_what_decided_the_numbers_names_their_file(tmp_path: Path) -> None:
    first = start_of(tmp_path).file("reference", 1)
    assert start_of(tmp_path).file("reference", 1) == first
    other_data: Any = Data()
    other_data.digest = "others"
    other_held_out: Any = Data()
    other_held_out.validation_digest = "others"
    longer = RunConfig()
    longer.data.seq_len += 1
    others = [
        start_of(tmp_path, "second").file("reference", 1),
        start_of(tmp_path, precision="bf16").file("reference", 1),
        start_of(tmp_path, prepared=other_data).file("reference", 1),
        start_of(tmp_path, prepared=other_held_out).file("reference", 1),
        start_of(tmp_path, config=longer).file("reference", 1),
        start_of(tmp_path).file("reference", 2),
        start_of(tmp_path).file("features-train", 1),
    ]
    assert len({first, *others}) == 8


@pytest.mark.parametrize("module", [answers, tower_features], ids=lambda module: module.__name__)
def test_the_version_of_the_mathematics_names_the_file(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> Path:
        if module is answers:
            return answers.ReferenceTable.file(start_of(tmp_path))
        return Path(features().file(start_of(tmp_path), "train"))

    first = name()
    monkeypatch.setattr(module, "MATHEMATICS", module.MATHEMATICS + 1)
    assert name() != first


@pytest.mark.parametrize("at", [0, 100, 128, 4000, -1])
def test_a_flipped_bit_is_damage(at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = array_file(tmp_path, "features-train", 1)
    assert not is_whole(path), "there is none"
    np.save(path, np.arange(1000, dtype=np.float32))
    assert not is_whole(path), "a kill came before its hashes"
    write_hashes(path)
    assert is_whole(path) and caplog.text == ""
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)
    assert not is_whole(path) and f"{path} is damaged: it is computed again" in caplog.text
    content[at] ^= 16
    path.write_bytes(content[:-4])
    assert not is_whole(path)
    path.write_bytes(content)
    assert is_whole(path)


def test_damaged_features_are_not_taken(tmp_path: Path) -> None:
    path = features().file(start_of(tmp_path), "train")
    np.save(path, np.zeros((5, 2, 3), np.float32))
    write_hashes(path)
    assert features().load(start_of(tmp_path))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert not features().load(start_of(tmp_path))
