"""Finds the model that a user names and checks its configuration before torch is imported, so that errors are quick."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mgpu_pipe.checkpoint.left_out import LeftOut
from mgpu_pipe.checkpoint.manifest import read_manifest, read_state
from mgpu_pipe.checkpoint.selection import resolve_source
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import OLDER, TOKENIZER, check_tokenizer
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import check_model_config, resolved_fields
from mgpu_pipe.models.model_settings import recorded_model, with_recorded_data
from mgpu_pipe.models.weights.folder import (
    check_model_folder,
    refuse_many_modules,
    refuse_wide_matrices,
    stored_elements,
    stored_tensors,
)
from mgpu_pipe.models.weights.sentence_modules import save_anew
from mgpu_pipe.system.local_files import NotPlainError, exists, expand_home, is_file, is_folder


@dataclass(frozen=True)
class ModelSource:
    """A step of a run, or a Hugging Face folder."""

    folder: Path
    config: RunConfig | None = None
    """The run's frozen configuration, its model completed from the step; None for a Hugging Face folder."""
    is_trusted: bool = True
    """Whether this user's launches wrote the configuration, so that its file names may be opened."""
    names_a_model: bool = True
    """Whether the configuration as written names a model folder."""
    tokenizer: Path | None = None
    """The tokenizer's folder, if there is one."""


def find_model(path: Path | str) -> ModelSource:
    """Finds the model of a run's folder (its latest complete step), a step's folder or a Hugging Face folder.

    Raises:
        BadInputError: the folder is of another kind, or its configuration describes an impossible model.
        CheckpointError: the step is damaged.
        ModelFolderError: the model folder is incomplete.
    """
    folder = existing_folder(path)
    if is_file(folder / "config.json"):
        check_model_folder(folder)
        _check_size(ModelConfig(name=folder.name, path=str(folder)), stored_tensors(folder), stored_elements(folder))
        return ModelSource(folder, tokenizer=tokenizer_folder(folder))
    step = resolve_source(folder, key="folder")
    config, is_trusted = load_untrusted(step / "config.yaml")
    manifest = read_manifest(step)
    state = read_state(step, manifest, "full")
    recorded = state.get("model_config")
    names_a_model = config.model.path is not None
    if names_a_model and not (is_trusted and _can_be_read(str(config.model.path))):
        config = replace(config, model=recorded_model(recorded, step))
    config = replace(config, model=with_recorded_data(config.model, recorded))
    stored = manifest.tensors["model"]
    whole = LeftOut.from_state(state, step) is None
    _check_size(config.model, len(stored), sum(prod(tensor.shape) for tensor in stored.values()) if whole else None)
    tokenizer = tokenizer_folder(RunPaths(step.parents[1]).tokenizer)
    return ModelSource(step, config, is_trusted, names_a_model, tokenizer)


def model_of_folder(folder: Path, strategy: str) -> ModelConfig:
    """The causal language model of a Hugging Face folder, which ``strategy`` cuts; BadInputError for another kind."""
    model = ModelConfig(name=folder.name, path=str(folder))
    fields = resolved_fields(model)
    if fields.get("is_encoder_decoder") or "text_config" in fields or fields.get("quantization_config"):
        fix = "use strategy=ddp"
        raise BadInputError(f"{folder}: strategy={strategy} opens folders of causal language models alone; {fix}")
    return model


def existing_folder(path: Path | str) -> Path:
    """The folder at ``path``; reads none of its files.

    Raises:
        BadInputError: there is no such folder, or this program cannot open its kind.
    """
    folder = expand_home(path)
    if not is_folder(folder):
        prompt = "; a prompt is given by --prompt TEXT" if " " in str(path) else ""
        raise BadInputError(f"{path}: no such folder; give a run's, step's or Hugging Face model's folder{prompt}")
    known = [RunPaths(folder).config, RunPaths(folder).checkpoints, folder / "manifest.json", folder / "config.json"]
    if not any(exists(entry) for entry in known):
        raise BadInputError(
            f"{path}: neither a run's folder (checkpoints/), a step's (manifest.json) nor a model's (config.json); "
            f"{save_anew(folder) or 'give one of these'}"
        )
    return folder


def _check_size(model: ModelConfig, tensors: int, numbers: int | None) -> None:
    """Refuse an impossible model, or one larger than the ``numbers`` in its weights, if known."""
    check_model_config(model)
    fields = resolved_fields(model)
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int):
        refuse_many_modules(layers, tensors)
    if numbers is not None:
        refuse_wide_matrices(fields, numbers)


def tokenizer_folder(folder: Path) -> Path | None:
    """The folder if it holds a tokenizer, else None.

    Raises:
        BadInputError: one of its files cannot be read.
    """
    names = (TOKENIZER, "tokenizer_config.json", *OLDER)
    if not any(os.path.lexists(folder / name) for name in names):
        return None
    if folder.is_symlink():
        raise NotPlainError(f"{folder}: is a symbolic link; put a copy of the folder there")
    check_tokenizer(folder)
    return folder


def _can_be_read(path: str) -> bool:
    """Whether the model's folder can be read; otherwise the model's configuration comes from the checkpoint."""
    try:
        return is_folder(local_folder(path))
    except ConfigError:
        return False
