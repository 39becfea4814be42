"""What a user names is found, and its configuration judged, before torch is imported: a bad folder is told at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mgpu_pipe.checkpoint.integrity import read_state
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.checkpoint.select import resolve_source
from mgpu_pipe.config.freeze import load_untrusted
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import check_model_config, resolved_fields
from mgpu_pipe.models.folder import check_model_folder, stored_tensors, too_many_modules
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


def find(path: Path | str) -> Found:
    """The folder of a run (its newest whole step), a step or a Hugging Face model.

    Raises:
        BadInputError: the folder is of another kind, or its configuration describes no model that could be; of its
            kinds, CheckpointError for a damaged step and ModelFolderError for a model folder that is not whole.
    """
    folder = existing_folder(path)
    if (folder / "config.json").is_file():
        check_model_folder(folder)
        _check(ModelConfig(name=folder.name, path=str(folder)), stored_tensors(folder))
        return Found(folder)
    step = resolve_source(folder, key="folder")
    config, own = load_untrusted(step / "config.yaml")
    manifest = read_manifest(step)
    recorded = read_state(step, manifest, "full").get("model_config")
    names_a_model = config.model.path is not None
    if names_a_model and not (own and _is_there(str(config.model.path))):
        config = replace(config, model=recorded_model(recorded, step))
    config = replace(config, model=with_recorded_data(config.model, recorded))
    _check(config.model, len(manifest.tensors["model"]))
    return Found(step, config, own, names_a_model)


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


def _check(model: ModelConfig, tensors: int) -> None:
    """Refuse a model that cannot be, or that would have more layers than its weights have room for."""
    check_model_config(model)
    layers = resolved_fields(model).get("num_hidden_layers")
    if isinstance(layers, int):
        too_many_modules(layers, tensors)


def _is_there(path: str) -> bool:
    """Whether the model's folder of one's own run can be read; else the checkpoint says what the model is."""
    try:
        return local_folder(path).is_dir()
    except ConfigError:
        return False
