"""Runs that start from a folder's weights, or from those of a run that is still saving."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.text.tokenizer_folder import plain_tokenizer
from mgpu_pipe.errors import BadInputError, ModelFolderError
from mgpu_pipe.inference.export_folder import export_folder
from mgpu_pipe.inference.open import load_run, open_model
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.weights.pretrained import stored_buffers
from mgpu_pipe.training import initial_weights
from tests.checkpoint.support import save_alone
from tests.families.cells import Variant, small
from tests.models.old_folders import write_old
from tests.models.tiny import write_folder
from tests.support import small_runs
from tests.support.processes import run_processes
from tests.support.sampling import one_in

OLD = {"bert": "masked_lm", "gpt2": "causal_lm", "llama": "causal_lm", "pythia": "causal_lm"}
WITH_BUFFERS = ("deepseek_v3", "gemma4_text", "glm4_moe")


def folder_of(kind: str, root: Path) -> Path:
    if kind in OLD:
        return write_old(kind, root)
    model = materialise(build_meta(small(Variant(kind))), 1, "cpu")
    for number, buffer in enumerate(stored_buffers(model).values()):
        buffer.add_(0.25 * (number + 1))
    return write_folder(model, root / kind)


def composed(root: Path, *overrides: str) -> RunConfig:
    shape = ("data=synthetic", "data.seq_len=16", "data.global_batch_size=4", "data.validation_max_samples=4")
    more = ("trainer.max_steps=4", "logger=none", "trainer.progress=off", f"data.cache_dir={root / 'cache'}")
    return compose(["model=hf", *shape, *more, "trainer.accelerator=cpu", "data.packing=none", *overrides])[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*one_in(4, OLD), *one_in(3, WITH_BUFFERS)])
def test_a_run_from_a_folder_is_saved_resumed_and_exported(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = folder_of(kind, tmp_path / "hf")
    given = (f"model.path={folder}", f"objective={OLD.get(kind, 'causal_lm')}")
    whole = small_runs.run(composed, tmp_path / "whole", 1, *given, "strategy=single")
    saved = ("checkpoint.every_n_steps=2", "checkpoint.keep_last=0")
    small_runs.run(composed, tmp_path / "first", 2, *given, "strategy=fsdp", *saved)
    step = tmp_path / "first" / "checkpoints" / "step-00000002"
    resumed = small_runs.run(composed, tmp_path / "second", 2, *given, "strategy=zero2", resume=step)
    assert resumed["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-5)
    assert resumed["val/loss"] == pytest.approx(whole["val/loss"], rel=1e-5)
    loaded = load_run(tmp_path / "second").model
    theirs = getattr(transformers, type(loaded).__name__).from_pretrained(folder, local_files_only=True)
    before = {name: buffer for name, buffer in theirs.named_buffers() if name in stored_buffers(theirs)}
    assert kind in OLD or before
    for name, buffer in before.items():
        assert torch.equal(loaded.get_buffer(name), buffer), name
    export_folder(open_model(tmp_path / "second"), tmp_path / "out")
    again = type(theirs).from_pretrained(tmp_path / "out", local_files_only=True).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(again[name].reshape(tensor.shape), tensor), name


@pytest.mark.slow
def test_an_export_stays_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    folder = write_old("bert", tmp_path / "hf")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 32}')
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    given = (f"model.path={folder}", "objective=masked_lm", "strategy=single", "trainer.max_steps=1")
    small_runs.run(composed, tmp_path / "run", 1, *given)
    export_folder(open_model(tmp_path / "run"), tmp_path / "out")
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    modules[1]["path"] = "../hf"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelFolderError, match=r"names \.\./hf"):
        export_folder(open_model(tmp_path / "run"), tmp_path / "other")


def test_a_tokenizer_in_older_files_alone_is_refused_beforehand(tmp_path: Path) -> None:
    folder = write_old("bert", tmp_path / "hf")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[MASK]\n[SEP]\n")
    (tmp_path / "text.txt").write_text("some words")
    config = composed(tmp_path, f"model.path={folder}", "objective=masked_lm", "strategy=single")
    text = replace(config, data=replace(config.data, source="text_files", paths=[str(tmp_path / "text.txt")]))
    preflight(config)
    named = replace(text, data=replace(text.data, tokenizer=str(folder)))
    for read in (lambda: preflight(text), lambda: preflight(named), lambda: plain_tokenizer(folder)):
        with pytest.raises(BadInputError, match=r"keeps its tokenizer as vocab\.txt, .*; write one with transformers"):
            read()


def _step_of(root: Path) -> int:
    """Rank 1 comes later: another step was saved meanwhile."""
    config = RunConfig()
    config.checkpoint.init_from = str(root)
    with patch.object(initial_weights, "resolve_source", return_value=root / f"step-{4 + dist.get_rank():08d}"):
        return initial_weights.weights_reader(config.checkpoint).manifest.step


def test_ranks_that_look_at_different_times_take_the_same_step(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (4, 5):
        save_alone(root, step)
    assert run_processes(2, _step_of, root) == [4, 4]
