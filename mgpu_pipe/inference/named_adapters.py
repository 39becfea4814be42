"""Adapters of the peft package next to a model: each makes a second model that shares the first one's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.models.adapters.lora import add_adapters, is_adapter
from mgpu_pipe.models.adapters.low_rank import MAGNITUDE, A, B
from mgpu_pipe.models.adapters.peft_folder import (
    ADAPTER_SETTINGS,
    ADAPTER_WEIGHTS,
    PREFIX,
    first_adapters,
    lengths,
    magnitude_layer,
    name_in_peft,
)
from mgpu_pipe.models.weights.folder import read_header
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, parse_json, read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model that computes with the adapter of ``folder``; all other weights are those of ``model``, not copies.

    Raises:
        ConfigError: the adapter is not one of this model, or of a kind other than LoRA and DoRA.
        ModelFolderError: its weights cannot be read.
    """
    keys = adapter_keys(folder)
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # else its layers count as frozen, which take no adapter
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    add_adapters(twin, keys)
    _unshare(twin, {name for name, value in twin.named_parameters() if value.requires_grad and not is_adapter(name)})
    parameters = dict(twin.named_parameters())
    for name, value in first_adapters(keys, twin):
        layer = magnitude_layer(name)
        parameters[name].data.copy_(value if layer is None else value - lengths(twin, layer).to(value.device))
    return twin.eval()


def adapter_keys(folder: Path) -> PeftConfig:
    """The configuration of an adapter, from its settings and the names of its tensors."""
    settings = parse_json(read_bytes(folder / ADAPTER_SETTINGS, MAX_CONFIG_BYTES), folder / ADAPTER_SETTINGS)
    names = read_header(folder / ADAPTER_WEIGHTS)
    return PeftConfig(
        name="dora" if settings.get("use_dora") else "lora",
        r=settings.get("r", 8),
        alpha=settings.get("lora_alpha", 8),
        rslora=bool(settings.get("use_rslora")),
        targets=_layers(names),
        train_also=other_weights(names),
        init_from=str(folder),
    )


def _layers(names: Iterable[str]) -> list[str]:
    """Layers with adapters."""
    ending = name_in_peft(f".{A}").removeprefix(PREFIX)
    return sorted(name.removeprefix(PREFIX).removesuffix(ending) for name in names if name.endswith(ending))


def other_weights(names: Iterable[str]) -> list[str]:
    """Parameters that an adapter's file replaces, next to its adapters."""
    endings = tuple(name_in_peft(f".{kind}").removeprefix(PREFIX) for kind in (A, B, MAGNITUDE))
    return sorted(name.removeprefix(PREFIX) for name in names if not name.endswith(endings))


def _unshare(model: nn.Module, names: set[str]) -> None:
    """Gives ``model`` its own parameters under these names, and under other names that they are tied to."""
    every = dict(model.named_parameters(remove_duplicate=False))
    copies = {id(every[name]): nn.Parameter(every[name].detach().clone()) for name in names}
    for name, parameter in every.items():
        if id(parameter) in copies:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, copies[id(parameter)])
