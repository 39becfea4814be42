"""``model.config.vocab_size`` gives a folder's model new rows, the same ones however it is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mgpu_pipe.errors import ModelFolderError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.weights.pretrained import load_pretrained
from mgpu_pipe.models.weights.slices import FolderWeights
from tests.models.tiny import tiny_model, write_folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_new_rows_follow_the_folders_own(family: str, tied: bool, tmp_path: Path) -> None:
    source = tiny_model(family, vocab_size=128, tie_word_embeddings=tied)
    small = materialise(build_meta(source), 5, "cpu")
    write_folder(small, tmp_path / "small")
    model = replace(source, type=None, path=str(tmp_path / "small"), config={"vocab_size": 140})
    loaded = load_pretrained(model, "cpu", seed=7)
    sliced = build_meta(model)
    FolderWeights(model, 7)(sliced, torch.device("cpu"))
    drawn = dict(materialise(build_meta(model), 7, "cpu").named_parameters())
    stored, grown = dict(small.named_parameters()), 0
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, sliced.get_parameter(name)), name
        if len(parameter) == 140:
            grown += 1
            assert torch.equal(parameter[:128], stored[name]) and torch.equal(parameter[128:], drawn[name][128:])
        else:
            assert torch.equal(parameter, stored[name])
    assert grown == (1 if tied else 2) and loaded.config.vocab_size == 140
    with pytest.raises(ModelFolderError, match="of another shape"):
        load_pretrained(replace(model, config={"vocab_size": 100}), "cpu", seed=7)
    with pytest.raises(ModelFolderError, match="of another shape"):
        load_pretrained(model, "cpu")
