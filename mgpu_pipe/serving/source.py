"""The model that a server answers with: what is known of it before torch is imported, and its folder for engines."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe import __version__
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.data.cache import writing_to_cache
from mgpu_pipe.data.text.tokenizer_folder import json_file
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find_model import ModelSource, find_model
from mgpu_pipe.models.fields import class_of, resolved_fields

GENERATIVE = ("AutoModelForCausalLM", "AutoModelForImageTextToText")
SERVED = "served"
"""Folder of the cache with the exported models."""


@dataclass(frozen=True)
class ServedModel:
    """A model to serve.

    Attributes:
        source: the folder that the user named, a run's, a step's or a model's.
        name: of the model in requests.
        fields: of the model's configuration.
        digest: of weights, configuration and tokenizer; empty for a model folder, which is served as it is.
    """

    source: Path
    name: str
    fields: dict[str, Any]
    digest: str

    def folder(self, kind: str) -> Path:
        """Where an export of ``kind`` lies in the cache, e.g. ``hf-bf16``; a model's own folder for a folder's."""
        if not self.digest:
            return self.source
        return cache_folder(None) / SERVED / f"{self.digest}-{kind}"


def find_served(folder: Path, frozen: Path | None, average: bool, name: str | None) -> ServedModel:
    """The model of a run's, step's or Hugging Face folder.

    Raises:
        BadInputError: there is no model that generates text, or it has no tokenizer.
    """
    source = find_model(folder)
    if source.tokenizer is None:
        raise BadInputError(f"{folder}: no tokenizer next to it; give a folder that has one")
    if source.config is None:
        raw = json_file(source.folder / "config.json")
        model_class, fields = class_of(raw.get("architectures")), raw
    else:
        model_class = description(source.config.objective.name).model_class
        fields = resolved_fields(source.config.model)
    if model_class not in GENERATIVE:
        raise BadInputError(f"{folder}: its {model_class} generates no text that a server streams; use mgpu-pipe eval")
    default = source.folder.resolve().name if source.config is None else source.config.run.name
    return ServedModel(folder, name or default or "model", fields, _digest(source, frozen, average))


def _digest(source: ModelSource, frozen: Path | None, average: bool) -> str:
    if source.config is None:
        return ""
    content = hashlib.sha256(f"{__version__} {read_manifest(source.folder).root} {frozen} {average}".encode())
    for file in (source.folder / "config.yaml", *sorted((source.tokenizer or source.folder).glob("*.json*"))):
        content.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def make_cache() -> None:
    """Make the cache's folder of served models, which only this user can write.

    Raises:
        ConfigError: it cannot be made, or others can write into it.
    """
    cache = cache_folder(None)
    with writing_to_cache(cache):
        private_folder(cache)
        (cache / SERVED).mkdir(exist_ok=True)


def read_answers(file: Path) -> dict[str, Any] | None:
    """The recorded answers of a run, see :mod:`mgpu_pipe.serving.prepare`; None where there are none."""
    try:
        answers: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answers
