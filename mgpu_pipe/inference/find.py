"""What a user names is found, and its configuration judged, before torch is imported: a bad folder is told at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mgpu_pipe.checkpoint.integrity import read_state
from mgpu_pipe.checkpoint.left_out import LeftOut
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.checkpoint.select import resolve_source
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.plain_files import NotPlainError
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import check_tokenizer
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import check_model_config, resolved_fields
from mgpu_pipe.models.folder import check_model_folder, stored_elements, stored_tensors, too_many_modules, too_wide
from mgpu_pipe.models.settings import recorded_model, with_recorded_data


@dataclass(frozen=True)
class Found:
    """A step of a run, or a Hugging Face folder."""

    folder: Path
    config: RunConfig | None = None
    """The run's frozen configuration, the model as far as the step says what it is; None for a Hugging Face folder."""
    own: bool = True
    """This user's launches wrote the configuration: the files that it names are theirs."""
    names_a_model: bool = True
    """The configuration as it is written names a model folder."""
    tokenizer: Path | None = None
    """The folder of the tokenizer, where one is kept."""


def find(path: Path | str) -> Found:
    """The folder of a run (its newest whole step), a step or a Hugging Face model.

    Raises:
        BadInputError: the folder is of another kind, or its configuration describes no model that could be; of its
            kinds, CheckpointError for a damaged step and ModelFolderError for a model folder that is not whole.
    """
    folder = existing_folder(path)
    if (folder / "config.json").is_file():
        check_model_folder(folder)
        _check(ModelConfig(name=folder.name, path=str(folder)), stored_tensors(folder), stored_elements(folder))
        return Found(folder, tokenizer=_tokenizer_folder(folder))
    step = resolve_source(folder, key="folder")
    config, own = load_untrusted(step / "config.yaml")
    manifest = read_manifest(step)
    state = read_state(step, manifest, "full")
    recorded = state.get("model_config")
    names_a_model = config.model.path is not None
    if names_a_model and not (own and _is_there(str(config.model.path))):
        config = replace(config, model=recorded_model(recorded, step))
    config = replace(config, model=with_recorded_data(config.model, recorded))
    stored = manifest.tensors["model"]
    whole = LeftOut.from_state(state, step) is None
    _check(config.model, len(stored), sum(prod(tensor.shape) for tensor in stored.values()) if whole else None)
    return Found(step, config, own, names_a_model, _tokenizer_folder(RunPaths(step.parents[1]).tokenizer))


def existing_folder(path: Path | str) -> Path:
    """The folder at ``path``; nothing in it is read.

    Raises:
        BadInputError: nothing is there, or no folder that this program opens.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise BadInputError(f"{path}: no such folder; give a run's, step's or Hugging Face model's folder")
    known = [RunPaths(folder).config, RunPaths(folder).checkpoints, folder / "manifest.json", folder / "config.json"]
    if not any(entry.exists() for entry in known):
        raise BadInputError(
            f"{path}: neither a run's folder (checkpoints/), a step's (manifest.json) nor a model's (config.json)"
        )
    return folder


def _check(model: ModelConfig, tensors: int, numbers: int | None) -> None:
    """Refuse a model that cannot be, or that is larger than its weights.

    Args:
        numbers: that the weights hold; None where they do not hold all.
    """
    check_model_config(model)
    fields = resolved_fields(model)
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int):
        too_many_modules(layers, tensors)
    if numbers is not None:
        too_wide(fields, numbers)


def _tokenizer_folder(folder: Path) -> Path | None:
    """The folder if it holds a tokenizer.

    Raises:
        BadInputError: something in it is not read.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any(os.path.lexists(folder / name) for name in names):
        return None
    if folder.is_symlink():
        raise NotPlainError(f"{folder}: is a symbolic link; put a copy of the folder there")
    check_tokenizer(folder)
    return folder


def _is_there(path: str) -> bool:
    """Whether the model's folder of one's own run can be read; else the checkpoint says what the model is."""
    try:
        return local_folder(path).is_dir()
    except ConfigError:
        return False
