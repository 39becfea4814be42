"""Rows that ``model.config.vocab_size`` adds to the vocabulary of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import draw_parameter, recipe_of
from mgpu_pipe.models.folder import read_config_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def adds_rows(model: ModelConfig, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a stored tensor lacks nothing but rows of the vocabulary.

    Args:
        stored, wanted: shapes.
    """
    size = model.config.get("vocab_size")
    return bool(wanted) and wanted[0] == size and 0 < stored[0] < wanted[0] and stored[1:] == wanted[1:]


def with_new_rows(twin: PreTrainedModel, name: str, stored: Any, seed: int) -> torch.Tensor:
    """The parameter ``name`` whole: the ``stored`` rows, and behind them keyed initial values.

    Args:
        twin: the model on the meta device, not split.
        stored: a tensor, or a slice of a file.
    """
    whole = draw_parameter(twin, recipe_of(twin), name, seed)
    rows: torch.Tensor = stored[...]
    whole[: len(rows)] = rows
    return whole


def stored_vocabulary(model: ModelConfig, folder: Path) -> int | None:
    """The vocabulary of a folder to which ``model.config.vocab_size`` adds rows; None where it adds none."""
    size, stored = model.config.get("vocab_size"), read_config_json(folder).get("vocab_size")
    return stored if isinstance(size, int) and isinstance(stored, int) and 0 < stored < size else None


def add_rows(model: PreTrainedModel, twin: PreTrainedModel, seed: int) -> None:
    """Give ``model`` the rows that its ``twin`` on the meta device has more, with keyed initial values, in place."""
    before = {name: len(parameter) for name, parameter in model.named_parameters() if parameter.ndim}
    model.resize_token_embeddings(twin.config.vocab_size, mean_resizing=False)
    recipe = recipe_of(twin)
    for name, parameter in model.named_parameters():
        if parameter.ndim and len(parameter) > before[name]:
            new = (before[name], len(parameter))
            parameter.data[new[0] :] = draw_parameter(twin, recipe, name, seed, rows=new)
