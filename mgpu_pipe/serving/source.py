"""The model and the adapters that a server answers with, as far as they are known before torch is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mgpu_pipe import __version__
from mgpu_pipe.architectures.formulas.parameters import count_parameters
from mgpu_pipe.checkpoint.manifest import read_manifest
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.cache import writing_to_cache
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, json_file, token_texts
from mgpu_pipe.errors import BadInputError, ModelFolderError, one_line
from mgpu_pipe.inference.find_model import ModelSource, find_model
from mgpu_pipe.models.fields import class_of, resolved_fields
from mgpu_pipe.models.weights.folder import ADAPTER, read_header, stored_elements
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, expand_home, is_file, parse_json, read_bytes

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
        elements: numbers in the weights.
        is_folder: whether the source is a model folder.
        digest: of weights, configuration and tokenizer.
        tokenizer: its folder.
    """

    source: Path
    name: str
    fields: Mapping[str, Any]
    elements: int
    is_folder: bool
    digest: str
    tokenizer: Path

    def export_folder(self, kind: str) -> Path:
        """Where an export of ``kind`` lies in the cache, e.g. ``hf-bf16``."""
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
        model_class, default = class_of(raw.get("architectures")), source.folder.resolve().name
        model = ModelConfig(name=default, path=str(source.folder))
    else:
        model_class, default = description(source.config.objective.name).model_class, source.config.run.name
        model = source.config.model
    if model_class not in GENERATIVE:
        raise BadInputError(f"{folder}: its {model_class} generates no text that a server streams; use mgpu-pipe eval")
    fields = resolved_fields(model)
    digest = _digest(source, frozen, average)
    return ServedModel(
        folder,
        name or default or "model",
        fields,
        _elements(source, fields),
        source.config is None,
        digest,
        source.tokenizer,
    )


def find_draft(folder: Path, model: ServedModel) -> ServedModel:
    """The model of ``folder`` that proposes tokens to ``model``.

    Raises:
        BadInputError: the draft model is missing, or has other tokens.
    """
    draft = find_served(folder, None, False, None)
    sizes = [served.fields.get("vocab_size") for served in (draft, model)]
    files = [served.tokenizer / TOKENIZER for served in (draft, model)]
    if (
        not all(is_file(file) for file in files)
        or sizes[0] != sizes[1]
        or token_texts(files[0]) != token_texts(files[1])
    ):
        raise BadInputError(
            f"--draft={folder}: has other tokens ({sizes[0]}) than {model.source} ({sizes[1]}); give a model with the "
            "same tokenizer"
        )
    return draft


def _elements(source: ModelSource, fields: Mapping[str, Any]) -> int:
    """Numbers in the weights: by the family's formula where there is one, else those that are stored."""
    exact = count_parameters(fields)
    if exact is not None:
        return exact.total
    if source.config is None:
        return stored_elements(source.folder)
    return sum(prod(tensor.shape) for tensor in read_manifest(source.folder).tensors["model"].values())


def _digest(source: ModelSource, frozen: Path | None, average: bool) -> str:
    """Hash of what an export is made of; of a model folder's weights only size and time."""
    content = hashlib.sha256(f"{__version__} {frozen} {average}".encode())
    if source.config is None:
        for file in sorted(source.folder.glob("*.safetensors")):
            content.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns} ".encode())
    else:
        content.update(read_manifest(source.folder).root.encode() + (source.folder / "config.yaml").read_bytes())
    for file in sorted({*(source.tokenizer or source.folder).glob("*.json*"), *source.folder.glob("config.json")}):
        content.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return content.hexdigest()[:16]


def make_cache() -> None:
    """Make the folder of served models; ConfigError if it cannot be made, or others can write into it."""
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


WEIGHTS = "adapter_model.safetensors"
OPTION = "--adapter"


@dataclass(frozen=True)
class NamedAdapter:
    """A folder of the peft package.

    Attributes:
        name: of the adapter in requests.
        rank: of its products.
        elements: numbers in its weights.
        extra: what it has next to LoRA of linear layers, which engines other than transformers do not take; empty for
            nothing.
    """

    name: str
    folder: Path
    rank: int
    elements: int
    extra: str

    @property
    def word(self) -> str:
        """The form of command lines, ``name=folder``."""
        return f"{self.name}={self.folder}"


def read_adapters(words: Sequence[str], model: str) -> tuple[NamedAdapter, ...]:
    """The adapters of ``--adapter name=folder ...`` of ``model``; BadInputError for equal names, or no adapter of
    peft."""
    adapters = list[NamedAdapter]()
    for word in words:
        adapters.append(_read(word, {model, *(adapter.name for adapter in adapters)}))
    return tuple(adapters)


def _read(word: str, taken: Collection[str]) -> NamedAdapter:
    name, _, place = word.partition("=")
    if not name or not place:
        raise BadInputError(f"{OPTION}={word}: has no name or no folder; write {OPTION} NAME=FOLDER")
    if name in taken:
        raise BadInputError(f"{OPTION}={word}: the name {name} is taken; choose another")
    folder = expand_home(Path(place)).absolute()
    try:
        settings: Any = parse_json(read_bytes(folder / ADAPTER, MAX_CONFIG_BYTES), folder / ADAPTER)
        header = read_header(folder / WEIGHTS)
        rank = int(settings.get("r", 8))
    except (OSError, ValueError, TypeError, AttributeError, ModelFolderError) as error:
        fix = "give a folder of the peft package, as export --format peft writes it"
        raise BadInputError(f"{OPTION}={word}: {one_line(error)}; {fix}") from error
    extra = "weights of DoRA" if settings.get("use_dora") else ""
    if settings.get("modules_to_save"):
        extra = "weights of whole modules"
    return NamedAdapter(name, folder, rank, sum(prod(entry["shape"]) for entry in header.values()), extra)


def refuse_extra(engine: str, adapters: Sequence[NamedAdapter]) -> None:
    """Raise BadInputError for adapters, which only the embedded server computes with."""
    for adapter in adapters:
        if adapter.extra:
            raise BadInputError(
                f"{OPTION}={adapter.word}: has {adapter.extra}, which {engine} does not take; use --engine transformers"
            )
