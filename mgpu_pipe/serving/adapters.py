"""Adapters that a server chooses by the ``model`` of a request; without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError, ModelFolderError, one_line
from mgpu_pipe.models.weights.folder import ADAPTER, read_header
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, expand_home, parse_json, read_bytes

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
    """The adapters of ``--adapter name=folder ...``.

    Args:
        model: name of the model that they adapt.

    Raises:
        BadInputError: two adapters have the same name, or a folder is no adapter of peft.
    """
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
    """Refuse adapters that only the embedded server computes with.

    Raises:
        BadInputError: there is one.
    """
    for adapter in adapters:
        if adapter.extra:
            raise BadInputError(
                f"{OPTION}={adapter.word}: has {adapter.extra}, which {engine} does not take; use --engine transformers"
            )
