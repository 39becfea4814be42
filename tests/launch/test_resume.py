"""What may differ on a resume, asked of a real checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_pipe.checkpoint.save import save
from mgpu_pipe.config.freeze import freeze
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.text.prepare_text import PreparedData, prepare
from mgpu_pipe.data.text.tokenizer_folder import token_differences
from mgpu_pipe.errors import CheckpointError, ConfigErrors
from mgpu_pipe.launch.resume import check_init_from, check_resume, resume_step

STEP = 4
Change = Callable[[RunConfig], None]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    run = RunConfig()
    run.model.type, run.model.config = "llama", {"vocab_size": 300}
    run.data.source, run.data.seq_len, run.data.cache_dir = "synthetic", 32, str(tmp_path / "cache")
    run.data.synthetic.num_documents = 50
    run.trainer.max_steps = 10
    return run


@pytest.fixture
def prepared(config: RunConfig) -> PreparedData:
    return prepare(config)


@pytest.fixture
def step(config: RunConfig, prepared: PreparedData, tmp_path: Path) -> Path:
    freeze(config, tmp_path / "config.yaml")
    state = {"data_digest": prepared.digest, "validation_digest": "held out", "precision": "fp32"}
    return save(tmp_path / "checkpoints", STEP, [], [], state, tmp_path / "config.yaml")


def notices_of_start(config: RunConfig, prepared: PreparedData) -> list[str]:
    return check_init_from(config.model, config.data.tokenizer, config.checkpoint, prepared)


def changed(config: RunConfig, key: str, value: object) -> RunConfig:
    other = deepcopy(config)
    node: object = other
    *sections, name = key.split(".")
    for section in sections:
        node = getattr(node, section)
    setattr(node, name, value)
    return other


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "other"),
        ("data.micro_batch_size", 2),
        ("trainer.devices", 4),
        ("trainer.max_steps", 20),
        ("checkpoint.keep_last", 0),
        ("strategy.name", "ddp"),
        ("trainer.log_every_n_steps", 7),
        ("precision.name", "fp32"),
    ],
)
def test_what_does_not_change_the_result_changes_without_a_word(
    config: RunConfig, prepared: PreparedData, step: Path, key: str, value: object
) -> None:
    assert check_resume(changed(config, key, value), prepared, step) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 1.0),
        ("optimizer.weight_decay", 0.0),
        ("scheduler.name", "linear"),
        ("precision.name", "bf16"),
        ("precision.tf32", True),
        ("trainer.gradient_clip_val", None),
        ("model.attn_implementation", "eager"),
    ],
)
def test_what_a_user_may_want_to_change_is_told(
    config: RunConfig, prepared: PreparedData, step: Path, key: str, value: object
) -> None:
    (notice,) = check_resume(changed(config, key, value), prepared, step)
    assert notice.startswith(f"resuming with {key}={value} (was ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 7),
        ("model.config", {"vocab_size": 300, "num_hidden_layers": 3}),
        ("data.seq_len", 64),
        ("data.global_batch_size", 64),
        ("optimizer._target_", "torch.optim.SGD"),
    ],
)
def test_what_may_not_change_is_refused(
    config: RunConfig, prepared: PreparedData, step: Path, key: str, value: object
) -> None:
    with pytest.raises(ConfigErrors, match=rf"{key}[.\w]*=.*to resume from it, or checkpoint.init_from"):
        check_resume(changed(config, key, value), prepared, step)


def test_other_data_is_refused(config: RunConfig, step: Path) -> None:
    other = changed(config, "data.validation_fraction", 0.5)
    with pytest.raises(ConfigErrors, match=r"is not what it was trained on \(data.validation_fraction\)"):
        check_resume(other, prepare(other), step)


def test_another_tokenizer_is_refused_with_the_tokens_that_differ(
    config: RunConfig, prepared: PreparedData, step: Path, tmp_path: Path
) -> None:
    tokenizer_folder(tmp_path / "tokenizer", ["other"])
    told = r"not what it was trained on \(the tokenizer: 0 is 'other' there and .* here\)"
    with pytest.raises(ConfigErrors, match=told):
        check_resume(config, replace(prepared, digest="of another tokenizer"), step)


def test_another_runs_end_leaves_nothing_to_train(config: RunConfig, prepared: PreparedData, step: Path) -> None:
    ended = changed(config, "trainer.max_steps", STEP)
    with pytest.raises(ConfigErrors, match=r"trainer.max_steps=4: .* is at step 4 already; use more than 4"):
        check_resume(ended, prepared, step)
    assert check_resume(ended, prepared, step, is_own_step=True) == []  # killed after its last save


def tokenizer_folder(folder: Path, tokens: list[str], **entries: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}}, **entries}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_ids_that_mean_another_token_are_told_and_added_tokens_are_not(tmp_path: Path) -> None:
    one = tokenizer_folder(tmp_path / "one", ["a", "b", "c"])
    longer = tokenizer_folder(tmp_path / "longer", ["a", "b", "c"], added_tokens=[{"id": 3, "content": "<x>"}])
    other = tokenizer_folder(tmp_path / "other", ["a", "c", "b"])
    assert token_differences(one, longer) == [] == token_differences(one, tmp_path)
    assert token_differences(one, other) == ["1 is 'b' there and 'c' here", "2 is 'c' there and 'b' here"]


def test_weights_of_another_tokenizer_or_model_type_are_refused(
    config: RunConfig, prepared: PreparedData, step: Path, tmp_path: Path
) -> None:
    start = changed(config, "checkpoint.init_from", str(tmp_path))
    assert notices_of_start(start, prepared) == [], "a checkpoint without a tokenizer beside it"
    shutil.copytree(prepared.tokenizer_folder, tmp_path / "tokenizer")
    assert notices_of_start(start, prepared) == []
    (notice,) = notices_of_start(changed(start, "model.config", {"vocab_size": 300, "rope_theta": 5.0}), prepared)
    assert notice == "starting from weights trained with model.config.rope_theta=None (now 5.0)"
    tokenizer_folder(tmp_path / "tokenizer", ["other", "tokens"])
    with pytest.raises(ConfigErrors) as refused:
        notices_of_start(changed(start, "model.type", "gpt2"), prepared)
    assert [str(error).split("=")[0] for error in refused.value.errors] == ["model.type", "data.tokenizer"]
    said = str(refused.value)
    assert "0 is 'other' there" in said and f"use data.tokenizer={tmp_path}/tokenizer" in said


def test_weights_of_a_model_folder_with_another_tokenizer_are_refused(
    config: RunConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    folder = tokenizer_folder(tmp_path / "model", ["other"])
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigErrors, match=r"data.tokenizer=auto: the weights of .* gives other ids"):
        notices_of_start(changed(config, "checkpoint.init_from", str(folder)), prepared)


def test_settings_that_a_model_folder_had_are_told(config: RunConfig, prepared: PreparedData, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rms_norm_eps": 0.5}')
    start = changed(config, "checkpoint.init_from", str(tmp_path))
    (notice,) = notices_of_start(changed(start, "model.config", {"rms_norm_eps": 1e-5}), prepared)
    assert notice == "starting from weights trained with model.config.rms_norm_eps=0.5 (now 1e-05)"
    with pytest.raises(ConfigErrors, match=r"model.type=gpt2: the weights of .* are a llama's; use llama"):
        notices_of_start(changed(start, "model.type", "gpt2"), prepared)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(tmp_path: Path) -> None:
    config, _ = compose(["checkpoint.resume=auto", f"run.dir={tmp_path}"])
    assert resume_step(config.checkpoint, RunPaths(tmp_path)) is None
    step = tmp_path / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in it can be read whole \(1 damaged\)"):
        resume_step(config.checkpoint, RunPaths(tmp_path))


def test_changed_held_out_files_are_refused_like_changed_training_files(
    config: RunConfig, prepared: PreparedData, step: Path
) -> None:
    for same in ("held out", ""):  # none given now, or the same ones
        check_resume(config, replace(prepared, validation_digest=same), step)
    with pytest.raises(ConfigErrors, match=r"data\.validation_paths=.*the held-out data is not what .*step-00000004"):
        check_resume(config, replace(prepared, validation_digest="changed"), step)
