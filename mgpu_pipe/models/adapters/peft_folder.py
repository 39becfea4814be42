"""Adapters that a folder of the peft package holds, as the first values of a run's own.

Format: ``adapter_config.json``, and ``adapter_model.safetensors`` whose names are
``base_model.model.<layer>.lora_A.weight`` and, of modules that were trained whole, ``base_model.model.<parameter>``
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgpu_pipe.config.peft import PeftConfig
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, check_folder, parse_json, read_bytes
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.dora import MAGNITUDE, row_norms
from mgpu_pipe.models.adapters.low_rank import A, B, as_rows
from mgpu_pipe.models.folder import read_header

PREFIX = "base_model.model."
"""What peft writes before a model's own names."""
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEYS = (("r", "r", 8), ("alpha", "lora_alpha", 8), ("rslora", "use_rslora", False))
"""Ours, peft's, and peft's default."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "target_parameters": (None, []),
}
"""Settings of peft that have no counterpart here, and what they have to be."""


def name_in_peft(name: str) -> str:
    """What a folder of peft calls a parameter."""
    ending = {A: ".weight", B: ".weight", MAGNITUDE: "_vector"}.get(name.rpartition(".")[2], "")
    return f"{PREFIX}{name}{ending}"


def measures(name: str) -> str | None:
    """The layer whose rows' lengths peft's values of this parameter hold, and ours do not; mostly None."""
    layer, _, own = name.rpartition(".")
    return layer if own == MAGNITUDE else None


def lengths(model: nn.Module, layer: str, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Lengths of the frozen rows of ``layer``, or of ``weight`` in its place."""
    module = model.get_submodule(layer)
    assert isinstance(module.weight, torch.Tensor)
    whole = module.weight if weight is None else weight
    return row_norms(as_rows(module, whole)).float()


def first_adapters(keys: PeftConfig, trained: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of the folder ``keys.init_from`` for the model's trained parameters, in fp32; none without a folder.

    They are peft's, see :func:`measures`.

    Args:
        trained: whole shapes, by name.

    Raises:
        ConfigError: it is no such folder, or holds adapters of other sizes or other layers than the configuration's.
    """
    if keys.init_from is None:
        return
    from safetensors import safe_open

    folder = Path(keys.init_from).expanduser()
    check_peft_folder(keys, trained)
    with safe_open(str(folder / WEIGHTS), "pt") as file:
        for name in trained:
            yield name, file.get_tensor(name_in_peft(name)).float()


def check_peft_folder(keys: PeftConfig, trained: Mapping[str, tuple[int, ...] | None]) -> None:
    """Whether the folder ``keys.init_from`` has the run's adapters.

    Args:
        trained: whole shapes of the model's trained parameters, by name; None where they are not known yet.

    Raises:
        ConfigError: it cannot be read, or holds other kinds, sizes or layers.
    """
    folder = Path(str(keys.init_from)).expanduser()
    try:
        check_folder(folder)
        settings = parse_json(read_bytes(folder / SETTINGS, MAX_CONFIG_BYTES), folder / SETTINGS)
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _refused(keys, f"give a folder with {SETTINGS} and {WEIGHTS}", reason) from error
    dora = bool(settings.get("use_dora"))
    if dora != (keys.name == "dora"):
        kind = "dora" if dora else "lora"
        raise ConfigError("peft", keys.name, f"use peft={kind}", f"the adapter of {folder} is one of {kind}")
    for name, wanted in PLAIN.items():
        if settings.get(name) not in wanted and name in settings:
            raise _refused(keys, "merge it with the peft package", f"its {name} is {settings[name]!r}")
    for name, theirs, usual in KEYS:
        value = settings.get(theirs, usual)
        if value != getattr(keys, name):
            raise ConfigError(
                f"peft.{name}", getattr(keys, name), f"use {value}", f"the adapter of {folder} has {value}"
            )
    ours = {name_in_peft(name): (name, shape) for name, shape in trained.items()}
    for theirs, (name, shape) in ours.items():
        if theirs not in header:
            fix = f"use peft.targets={_listed(settings.get('target_modules'))}, and peft.train_also as it was"
            raise _refused(keys, fix, f"it has no {theirs}, and the run trains {name}")
        stored = tuple(header[theirs]["shape"])
        if shape not in (None, stored):
            raise _refused(keys, "give the model that it was trained on", f"{theirs} is {stored}, {name} {shape}")
    left = sorted(set(header) - set(ours))
    if left:
        fix = f"use peft.targets={_listed(settings.get('target_modules'))}, or name it in peft.train_also"
        raise _refused(keys, fix, f"it holds {left[0]}, which the run does not train")


def _listed(modules: object) -> str:
    # peft writes a set, in an order of its own.
    return f"[{','.join(sorted(map(str, modules)))}]" if isinstance(modules, list) else str(modules)


def _refused(keys: PeftConfig, fix: str, reason: str) -> ConfigError:
    return ConfigError("peft.init_from", keys.init_from, fix, reason)
