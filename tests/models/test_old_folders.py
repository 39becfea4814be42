"""Folders written by old versions load as transformers loads them, through every reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.weights.pretrained import load_pretrained, stored_buffers
from mgpu_pipe.models.weights.slices import fill_from_folder
from tests.families.cells import Variant, small
from tests.models.old_folders import KINDS, write_old
from tests.models.tiny import write_folder

DRAWN = "masked_spec_embed"
"""What transformers draws at random where a folder lacks it."""


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_old_folder_is_read_as_transformers_reads_it(tmp_path: Path, kind: str, shards: int) -> None:
    import transformers

    source = ModelConfig(path=str(write_old(kind, tmp_path, shards)))
    whole = load_pretrained(source, "cpu", seed=7)
    sliced = fill_from_folder(build_meta(source), source, "cpu", 7)
    maker = getattr(transformers, type(whole).__name__)
    theirs = maker.from_pretrained(source.path, local_files_only=True, dtype=torch.float32)
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    for model in (whole, sliced):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            if not name.endswith(DRAWN):
                assert torch.equal(tensor.reshape(expected[name].shape), expected[name]), name
    trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, parameter in sliced.named_parameters() if parameter.requires_grad]
    drawn = [name for name, _ in whole.named_parameters() if name.endswith(DRAWN)]
    assert all(torch.equal(whole.get_parameter(name), sliced.get_parameter(name)) for name in drawn)


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text"])
def test_buffers_of_a_folder_are_read_part_by_part_too(tmp_path: Path, family: str) -> None:
    source = ModelConfig(path=str(tmp_path / family))
    made = materialise(build_meta(small(Variant(family))), 1, "cpu")
    kept = stored_buffers(made)
    for number, buffer in enumerate(kept.values()):
        buffer.add_(0.1 * (number + 1))
    write_folder(made, tmp_path / family)
    for model in (fill_from_folder(build_meta(source), source, "cpu"), load_pretrained(source, "cpu")):
        for name, buffer in stored_buffers(model).items():
            assert torch.equal(buffer, kept[name]), name
    assert kept
