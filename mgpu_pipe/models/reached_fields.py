"""Refuses fields that a user sets and transformers drops silently.

The oracle is the configuration that transformers builds. Its classes drop rotary fields of an older form where the
model has the newer one, and windows of attention that another field turns off. A folder's fields alone are not refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.field_types import KIND, PARAMETERS, PARTIAL, SCALING, THETA
from mgpu_pipe.models.fields import given_fields
from mgpu_pipe.models.weights.folder import read_config_json

FULL, SLIDING = "full_attention", "sliding_attention"
PLACES = {
    THETA: ("", THETA),
    PARTIAL: ("", PARTIAL),
    "rotary_emb_base": ("", THETA),
    "rotary_pct": ("", PARTIAL),
    "global_rope_theta": (FULL, THETA),
    "local_rope_theta": (SLIDING, THETA),
    "rope_local_base_freq": (SLIDING, THETA),
}
"""Type of layers and entry of ``rope_parameters`` that an older field sets; no type: full attention, or all layers."""
RENAMED = {"mrope": "default", "xdrope": "dynamic", "su": "longrope", "yarn": "longrope"}
"""Types of rotation that some classes write otherwise."""
ENTRIES: dict[str, str] = {"type": KIND[0], "xdrope_section": "mrope_section"}
"""Other names of entries."""
LENGTH = "original_max_position_embeddings"
WINDOW, USES_WINDOW = "sliding_window", "use_sliding_window"
ANY_MODEL = "hf"
"""Name of the preset without fields, whose type or folder the user gives."""


def check_reached(model: ModelConfig) -> None:
    """Raise for rotary fields and windows of ``model.config`` that transformers drops.

    It imports transformers, only where such fields are set and a preset's own do not answer.

    Raises:
        ConfigError: transformers refuses the configuration.
        ConfigErrors: dropped fields, with those that reach the model.
    """
    if not _may_be_dropped(model.config, model.path is not None or model.name == ANY_MODEL):
        return
    if errors := list(_dropped_beside_parameters(model)):
        raise ConfigErrors(errors)
    from mgpu_pipe.models.build import model_config

    folder = read_config_json(local_folder(model.path)) if model.path is not None else {}
    built = model_config(copy.deepcopy(model))  # transformers writes into its arguments
    errors = list(_dropped_in_parts(model.config, given_fields(model), folder, built, "model.config"))
    if errors:
        raise ConfigErrors(errors)


def _may_be_dropped(overrides: Mapping[str, Any], is_any_model: bool) -> bool:
    """Whether a class may drop some of these; ``rope_parameters`` of a preset alone are known to reach its model."""
    older = overrides.keys() & {SCALING, *PLACES} or overrides.get(WINDOW)
    return bool(older or (is_any_model and PARAMETERS in overrides)) or any(
        isinstance(part, Mapping) and name.endswith("_config") and _may_be_dropped(part, is_any_model)
        for name, part in overrides.items()
    )


def _dropped_beside_parameters(model: ModelConfig) -> Iterator[ConfigError]:
    """Errors of older fields whose entries a preset has: transformers keeps the entries. It needs no class."""
    parameters = model.config.get(PARAMETERS)
    older = model.config.keys() & {SCALING, *PLACES}
    is_preset = model.path is None and model.name != ANY_MODEL
    if is_preset and isinstance(parameters, Mapping) and older <= parameters.keys():
        built = SimpleNamespace(**{PARAMETERS: parameters})
        yield from _dropped_rotary(model.config, model.config, {}, built, "model.config")


def _dropped_in_parts(
    overrides: Mapping[str, Any], fields: Mapping[str, Any], folder: Mapping[str, Any], built: Any, within: str
) -> Iterator[ConfigError]:
    """Errors of a model, whose ``fields`` have the ``overrides`` of key ``within``, and of its parts."""
    yield from _dropped_rotary(overrides, fields, folder, built, within)
    if overrides.get(WINDOW) and getattr(built, WINDOW, 0) is None and getattr(built, USES_WINDOW, None) is False:
        fix = f"set {within}.{USES_WINDOW}=true too"
        yield ConfigError(f"{within}.{WINDOW}", overrides[WINDOW], fix, f"{USES_WINDOW} is false")
    parts = {name: value for name, value in overrides.items() if name.endswith("_config")}
    for name, value in parts.items():
        part, part_built = fields.get(name), getattr(built, name, None)
        if isinstance(value, Mapping) and isinstance(part, Mapping) and part_built:
            yield from _dropped_in_parts(value, part, folder.get(name) or {}, part_built, f"{within}.{name}")


def _dropped_rotary(
    overrides: Mapping[str, Any], fields: Mapping[str, Any], folder: Mapping[str, Any], built: Any, within: str
) -> Iterator[ConfigError]:
    """Errors of rotary fields that ``built.rope_parameters`` does not have; arguments as in _dropped_in_parts."""
    parameters = getattr(built, PARAMETERS, None)
    if not isinstance(parameters, Mapping) or not parameters:
        return
    layers = {name: entry for name, entry in parameters.items() if isinstance(entry, Mapping)} or {"": parameters}
    homes = [FULL] if FULL in layers else list(layers)
    declared = getattr(built, "__dataclass_fields__", {})
    wanted: dict[tuple[str, str], tuple[str, Any]] = {}
    for name, place, entry, value in _settings(overrides, fields, folder, layers, built):
        for home in [] if place else homes:
            wanted.pop((home, entry), None)
        wanted[place, entry] = name, value
    dropped: dict[str, list[str]] = {}
    for (place, entry), (name, value) in wanted.items():
        present = [layers.get(layer, {}).get(entry) for layer in ([place] if place else homes)]
        is_renamed = entry == KIND[0] and RENAMED.get(value) in present
        is_attribute = name in declared and name != PARAMETERS and present == [None] * len(present)
        if value not in present and not is_renamed and not is_attribute:
            dropped.setdefault(name, []).append(entry)
    holder = SCALING if folder.get(SCALING) and "" in layers else PARAMETERS
    for name, entries in dropped.items():
        value = overrides[name]
        fix = (
            f"use {within}.{LENGTH}={value[LENGTH]}"
            if entries == [LENGTH] and LENGTH in value and hasattr(built, LENGTH)
            else ""
        )
        fix = fix or _fix(name, value, f"{within}.{holder}", homes, built)
        printed = dict(value) if isinstance(value, Mapping) else value
        lost = f"the model's {entries[0]} with it" if name == SCALING and entries[0] in (THETA, PARTIAL) else "it"
        yield ConfigError(f"{within}.{name}", printed, fix, f"transformers would drop {lost} without a word")


def _fix(name: str, value: Any, holder: str, homes: list[str], built: Any) -> str:
    """Overrides that reach the model instead; ``homes`` are the types of layers, "" where they are the same for all."""
    settings = [setting for setting in _settings_of_field(name, value, built) if name in PLACES or not setting[1]]
    if not settings or (value and holder.endswith(f".{name}") and "" in homes):
        return "leave it out"
    paths = [f"{holder}.{home}".rstrip(".") for home in ([settings[0][1]] if settings[0][1] else homes)]
    if isinstance(value, Mapping) and value:
        text = ",".join(f"{entry}:{wish}" for _, _, entry, wish in settings)
        return "use " + " ".join(f"{path}={{{text}}}" for path in paths)
    return "use " + " ".join(f"{path}.{entry}={wish}" for path in paths for _, _, entry, wish in settings)


def _settings(
    overrides: Mapping[str, Any],
    fields: Mapping[str, Any],
    folder: Mapping[str, Any],
    layers: Mapping[str, Any],
    built: Any,
) -> Iterator[tuple[str, str, str, Any]]:
    """Field, type of layers, entry and value of rotary settings, those that transformers prefers last.

    Scaling replaces all other rotary settings of a model but its bases and rotated parts, which have to stay.
    """
    scaling = overrides.get(SCALING)
    if not scaling:
        yield from _settings_of_field(PARAMETERS, overrides.get(PARAMETERS), built)
    elif not folder.get(SCALING):
        for _, place, entry, value in _settings_of_field(PARAMETERS, fields.get(PARAMETERS), built):
            if place in layers and entry in (THETA, PARTIAL):
                yield SCALING, place, entry, value
    is_replaced = bool(folder) and KIND[0] in (overrides.get(PARAMETERS) or {})
    if SCALING in overrides and (scaling or not is_replaced):
        yield from _settings_of_field(SCALING, scaling, built)
    for name in PLACES:
        yield from _settings_of_field(name, overrides.get(name), built)


def _settings_of_field(name: str, value: Any, built: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Settings that one field makes; see :func:`_settings`."""
    if name in PLACES and value is not None:
        yield name, *PLACES[name], value
    elif name == SCALING and not value:
        yield name, "", KIND[0], getattr(built, "default_rope_type", "default")
    elif isinstance(value, Mapping):
        for entry, setting in value.items():
            if isinstance(setting, Mapping):
                yield from (
                    (name, entry, inner, number) for _, _, inner, number in _settings_of_field(name, setting, built)
                )
            elif setting is not None:
                yield name, "", ENTRIES.get(str(entry), str(entry)), setting
