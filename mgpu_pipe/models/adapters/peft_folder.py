"""Reads adapters of the peft package as initial values of a run.

Format: ``adapter_config.json``, and ``adapter_model.safetensors`` whose names are
``base_model.model.<layer>.lora_A.weight`` and, for fully trained modules, ``base_model.model.<parameter>``
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.low_rank import MAGNITUDE, A, B, as_rows, row_norms
from mgpu_pipe.models.weights.folder import read_header
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, check_folder, expand_home, parse_json, read_bytes

COMPARED = frozenset({"r", "lora_alpha", "use_rslora", "use_dora"})
"""Fields that must agree with the run's keys."""
NAMED = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("ensure_weight_tying", "fan_in_fan_out"),
    }
)
"""Fields that name layers; names and shapes of tensors decide instead."""
UNUSED = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
        *("qalora_group_size", "runtime_config"),
    }
)
"""Fields that do not affect trained tensors: names, training, settings of a method that another field enables, and
places of tensors."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Other values change the base's weights, or the computation.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Fields that must have one of these values, if present."""
OFF = frozenset(
    {
        *("rank_pattern", "alpha_pattern", "megatron_config", "trainable_token_indices", "velora_config"),
        *("alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication", "lora_bias"),
        *("target_parameters", "use_bdlora", "arrow_config", "kasa_config"),
    }
)
"""Fields that change the computation and are not supported: they must be empty."""
FIELDS = COMPARED | NAMED | UNUSED | ALLOWED.keys() | OFF


@dataclass(frozen=True)
class Fault:
    """Reason why a peft folder cannot be read as plain LoRA or DoRA."""

    reason: str
    fix: str


def fault_of(settings: Mapping[str, Any]) -> Fault | None:
    """Fault of the first unknown or unsupported field of ``adapter_config.json``, or None."""
    kind = settings.get("peft_type")
    if kind not in ALLOWED["peft_type"]:
        return Fault(f"its peft_type is {kind!r}", "merge it with the peft package")
    for name, value in settings.items():
        usable = any(value is allowed or value == allowed for allowed in ALLOWED.get(name, (value,)))
        if not usable or (name in OFF and not _is_empty(value)):
            fix = "convert it to plain LoRA with the peft package" if name == "init_lora_weights" else None
            return Fault(f"its {name} is {_short(value)}", fix or "merge it with the peft package")
        if name not in FIELDS and not _is_empty(value):
            fix = "merge it with the version of peft that wrote it"
            return Fault(f"its {name}, which is {_short(value)}, is not known", fix)
    return None


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ({}, [])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


PREFIX = "base_model.model."
"""Prefix of parameter names in peft."""
ADAPTER_SETTINGS, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEYS = (("r", "r", 8), ("alpha", "lora_alpha", 8), ("rslora", "use_rslora", False))
"""Our field, peft's field, and peft's default."""
FACTOR, NUMBER = ".lora_A.", re.compile(r"\.\d+\.")
"""Part of a tensor's name after its layer's, and a block's number in that."""
TYING = "ensure_weight_tying"
"""Field that makes peft use a trained embedding for its tied head too."""


def name_in_peft(name: str) -> str:
    """Name of a parameter in a peft folder."""
    ending = {A: ".weight", B: ".weight", MAGNITUDE: "_vector"}.get(name.rpartition(".")[2], "")
    return f"{PREFIX}{name}{ending}"


def magnitude_layer(name: str) -> str | None:
    """Layer of a magnitude, else None. peft's value includes the 2-norms of the layer's rows, ours does not."""
    layer, _, attribute = name.rpartition(".")
    return layer if attribute == MAGNITUDE else None


def lengths(model: nn.Module, layer: str, weight: torch.Tensor | None = None) -> torch.Tensor:
    """2-norms of the frozen rows of ``layer``, or of ``weight`` instead."""
    module = model.get_submodule(layer)
    assert isinstance(module.weight, torch.Tensor)
    whole = module.weight if weight is None else weight
    return row_norms(as_rows(module, whole)).float()


def other_names(model: nn.Module) -> dict[str, list[str]]:
    """Other names of each tied parameter, by its first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def first_adapters(keys: PeftConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Values of the folder ``keys.init_from`` for the trained parameters of ``model``, fp32; none without a folder.

    They are peft's values, see :func:`magnitude_layer`.

    Args:
        model: unsharded; it may be on the meta device.

    Raises:
        ConfigError: no such folder, or adapters of other sizes or layers than configured.
    """
    if keys.init_from is None:
        return
    from safetensors import safe_open

    folder, tied = expand_home(keys.init_from), other_names(model)
    check_peft_folder(keys, model)
    with safe_open(str(folder / ADAPTER_WEIGHTS), "pt") as file:
        stored = set(file.keys())
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            value = file.get_tensor(name_in_peft(name))
            for other in tied.get(name, ()):
                theirs = name_in_peft(other)
                if theirs in stored and not torch.equal(file.get_tensor(theirs), value):
                    reason = f"its {theirs} and {name_in_peft(name)} differ, and the model ties {other} to {name}"
                    raise _refusal(keys, "use model.config.tie_word_embeddings=false", reason)
            yield name, value.float()


def check_peft_folder(keys: PeftConfig, model: nn.Module, adapters_alone: bool = False) -> None:
    """Checks that the folder ``keys.init_from`` has the adapters of ``model``.

    Args:
        model: unsharded; it may be on the meta device.
        adapters_alone: compare only shapes of adapters, not of other trained parameters (the data may add rows).

    Raises:
        ConfigError: the folder cannot be read, or has other kinds, sizes or layers.
    """
    folder = expand_home(str(keys.init_from))
    try:
        check_folder(folder)
        settings = parse_json(read_bytes(folder / ADAPTER_SETTINGS, MAX_CONFIG_BYTES), folder / ADAPTER_SETTINGS)
        header = read_header(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise _refusal(keys, f"give a folder with {ADAPTER_SETTINGS} and {ADAPTER_WEIGHTS}", reason) from error
    if not isinstance(settings, dict):
        raise _refusal(
            keys, f"give a folder whose {ADAPTER_SETTINGS} is peft's", f"{ADAPTER_SETTINGS} is no JSON object"
        )
    _check_settings(keys, folder, settings)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tied = {name: others for name, others in other_names(model).items() if name in trained}
    known = set()
    for name, parameter in trained.items():
        theirs = name_in_peft(name)
        if theirs not in header:
            fix = f"use peft.targets={_adapted_targets(settings, header, model)}, and peft.train_also as it was"
            raise _refusal(keys, fix, f"it has no {theirs}, and the run trains {name}")
        others = [name_in_peft(other) for other in tied.get(name, ())]
        lacking = next((other for other in others if other not in header), None)
        if lacking is not None and settings.get(TYING) is not True:
            reason = f"it has no {lacking}: peft leaves it as the base has it, and the model ties it to {name}"
            raise _refusal(keys, "use model.config.tie_word_embeddings=false", reason)
        for entry in (theirs, *(other for other in others if other in header)):
            known.add(entry)
            stored, shape = tuple(header[entry]["shape"]), tuple(parameter.shape)
            if stored != shape and (_is_adapter(name) or not adapters_alone):
                raise _refusal(keys, "give the model that it was trained on", f"{entry} is {stored}, {name} {shape}")
    left = sorted(set(header) - known)
    if left:
        fix = f"use peft.targets={_adapted_targets(settings, header, model)}, or name it in peft.train_also"
        raise _refusal(keys, fix, f"it holds {left[0]}, which the run does not train")


def _check_settings(keys: PeftConfig, folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that the adapter of ``folder`` is of the kind and sizes of ``keys``."""
    refused = fault_of(settings)
    if refused is not None:
        raise _refusal(keys, refused.fix, refused.reason)
    dora = bool(settings.get("use_dora"))
    if dora != (keys.name == "dora"):
        kind = "dora" if dora else "lora"
        raise ConfigError("peft", keys.name, f"use peft={kind}", f"the adapter of {folder} is one of {kind}")
    for name, theirs, usual in KEYS:
        value = settings.get(theirs, usual)
        if value != getattr(keys, name):
            raise ConfigError(
                f"peft.{name}", getattr(keys, name), f"use {value}", f"the adapter of {folder} has {value}"
            )


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in (A, B, MAGNITUDE)


def _adapted_targets(settings: Mapping[str, Any], header: Iterable[str], model: nn.Module) -> str:
    """Value of ``peft.targets`` for the adapted layers of a folder: peft's names, or patterns where other fields or a
    regular expression choose among them."""
    names = [name for name, _ in model.named_modules()]
    entries = [entry.removeprefix(PREFIX).partition(FACTOR) for entry in header]
    layers = {layer for layer, factor, _ in entries if factor}
    listed = settings.get("target_modules")
    if isinstance(listed, list) and _matching(listed, names) == layers:
        return f"[{','.join(sorted(map(str, listed)))}]"  # peft writes a set in arbitrary order
    numbered = {layer: NUMBER.sub(".*.", layer) for layer in layers}
    exact = {pattern for pattern in numbered.values() if _matching([pattern], names) <= layers}
    return f"[{','.join(sorted({pattern if pattern in exact else layer for layer, pattern in numbered.items()}))}]"


def _matching(patterns: Iterable[str], names: Iterable[str]) -> set[str]:
    """The names that ``peft.targets`` matches by ``patterns``."""
    return {name for name in names if any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns)}


def _refusal(keys: PeftConfig, fix: str, reason: str) -> ConfigError:
    return ConfigError("peft.init_from", keys.init_from, fix, reason)
