"""Reading a folder's weights part by part. Oracle: transformers' own ``from_pretrained`` through load_pretrained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ModelFolderError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.local_shards import TensorPart, local_parts, local_tensor
from mgpu_pipe.models.weights.pretrained import load_pretrained
from mgpu_pipe.models.weights.slices import FolderWeights, fill_from_folder
from mgpu_pipe.parallel.fsdp import apply_fully_shard
from mgpu_pipe.topology import Meshes, ParallelDims
from tests.models.tiny import tiny_model, write_folder
from tests.support.processes import run_processes
from tests.support.tiny import MODELS, model_class


def folder_of(name: str, root: Path) -> Path:
    model = materialise(build_meta(MODELS[name], model_class(MODELS[name])), 3, "cpu")
    return write_folder(model, root / name)


def _filled(folders: list[str]) -> list[dict[str, list[tuple[TensorPart, torch.Tensor]]]]:
    found = []
    for folder in folders:
        source = ModelConfig(path=folder)
        model = build_meta(source)
        apply_fully_shard(model, Meshes(ParallelDims(dp_shard=dist.get_world_size()), "cpu").data_mesh(), "fp32")
        fill_from_folder(model, source, "cpu")
        assert not any(buffer.is_meta for buffer in model.buffers())
        found.append(
            {
                name: [(part, block.view(local_tensor(p).detach()).clone()) for block, part in local_parts(p, None)]
                for name, p in model.named_parameters()
            }
        )
    return found


def test_every_rank_reads_its_own_parts(tmp_path: Path) -> None:
    folders = {name: str(folder_of(name, tmp_path)) for name in MODELS}
    by_rank = run_processes(3, _filled, list(folders.values()))
    for number, folder in enumerate(folders.values()):
        whole = load_pretrained(ModelConfig(path=folder), "cpu")
        for rank in by_rank:
            held = rank[number]
            assert held.keys() == {name for name, _ in whole.named_parameters()}
            for name, parameter in whole.named_parameters():
                for part, value in held[name]:
                    ranges = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.shape, strict=True))
                    assert torch.equal(value, parameter.detach()[ranges]), name
        sizes = [sum(value.numel() for parts in rank[number].values() for _, value in parts) for rank in by_rank]
        assert sum(sizes) == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ({"num_key_value_heads": 4}, "another shape"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "unexpected"),
    ],
)
def test_a_folder_of_another_model_is_refused(tmp_path: Path, field: dict[str, Any], kind: str) -> None:
    source = ModelConfig(path=str(folder_of("llama", tmp_path)), config=field)
    with pytest.raises(ModelFolderError, match=kind):
        fill_from_folder(build_meta(source), source, "cpu")


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
