"""Checks patterns of parameter and layer names against the source of the model's family.

Building a model takes seconds, so a name that is nowhere in the source of its modules is refused at once. Names in the
source are checked against the built model afterwards (:func:`mgpu_pipe.checks.check_model.check_built`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.architectures.config_source import ConfigClass, config_class, modeling_source
from mgpu_pipe.architectures.family import PARTS, parts_in
from mgpu_pipe.config.group_keys import ALL_LINEAR, PeftConfig
from mgpu_pipe.config.schema import ModelConfig, OptimizerConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import given_fields, part_type

WORD = re.compile(r"[A-Za-z_]\w*")
ATTRIBUTE = re.compile(r"\bself\.(\w+)\s*(?::[^=\n]+)?=(?!=)")
LINEAR = re.compile(r"\bself\.(\w+)\s*=\s*(?:nn\.Linear|Conv1D)\(")
PARAMETER = re.compile(
    r"\bself\.(\w+)\s*(?::[^=\n]+)?=\s*(?:torch\.)?nn\.Parameter\b|register_parameter\(\s*[\"'](\w+)"
)
GLOB = re.compile(r"\[[^\]]*\]|[*?]")
EXPERTS = "experts"
TARGETS, TRAINED = "peft.targets", "peft.train_also"
SHOWN = 8
"""Most names in a fix."""
SHORTEST_PIECE = 3
"""Fewest letters of a piece of a name that is searched for."""
TORCH_NAMES = ("weight", "bias", "parametrizations", "original0", "original1", "in_proj_weight", "in_proj_bias")
"""Parameter names in torch's modules."""
NOT_PARTS = ("quantization_config", "generation_config", "per_layer_config")
"""Fields of nested configurations that are no parts of a model."""


def name_errors(model: ModelConfig, optimizer: OptimizerConfig, peft: PeftConfig) -> list[BadInputError]:
    """An error for each pattern with a name that the model's source lacks; none if a part's source is elsewhere."""
    fields = given_fields(model)
    known = config_class(str(fields.get("model_type", model.type)))
    parts, possible = parts_in(fields), PARTS if known is None or _names_of_parts(known) else ()
    patterns = [
        (key, pattern)
        for key, pattern in _patterns(model, optimizer, peft)
        if pattern not in (parts if key in (TARGETS, TRAINED) else possible)
    ]
    sources = _source(model) if patterns else None
    if sources is None:
        return []
    family_source, source = "\n".join(text for text, _ in sources), "\n".join(text for pair in sources for text in pair)
    linear = sorted(set(LINEAR.findall(family_source)))
    names = {*ATTRIBUTE.findall(family_source), *TORCH_NAMES}
    parameter_names = {name for pair in PARAMETER.findall(source) for name in pair if name}.union(TORCH_NAMES)
    errors: list[BadInputError] = []
    for key, pattern in patterns:
        unknown = next((word for word in _unknown_words(pattern, source)), None)
        reason = "matches nothing in the model" if key == TARGETS else "matches no parameter of the model"
        fix = f"use names such as {', '.join(linear[:SHOWN])}; or [{ALL_LINEAR}]"
        if key != TARGETS:
            fix = "use patterns of parameter names, such as *norm*"
            last = pattern.rpartition(".")[2]
            if pattern in PARTS:  # of a model of one piece
                unknown = pattern
            elif unknown is None and WORD.fullmatch(last) and last not in parameter_names:
                fix = f"did you mean *{pattern}*?"
                reason = f"{last} is not a parameter name"
                errors.append(ConfigError(key, pattern, fix, reason))
                continue
        if unknown is not None:
            close = nearest(unknown, linear if key == TARGETS else sorted(names))
            meant = f"did you mean {pattern.replace(unknown, close)}? or " if close else ""
            errors.append(ConfigError(key, pattern, f"{meant}{fix}", reason))
    return errors


def _unknown_words(pattern: str, source: str) -> Iterator[str]:
    """The words of a pattern that are not in ``source``; a word next to ``*``, ``?`` or ``[...]`` may be incomplete."""
    for piece in pattern.split("."):
        fragments = [piece] if not GLOB.search(piece) else GLOB.split(piece)
        for fragment in fragments:
            stem = fragment.rstrip("0123456789")  # numbered names are created at run time
            if stem in TORCH_NAMES or len(stem) < (1 if fragment == piece else SHORTEST_PIECE):
                continue
            whole = fragment == piece == stem
            if not (re.search(rf"\b{re.escape(stem)}\b", source) if whole else stem in source or _is_torch_name(stem)):
                yield fragment


def _is_torch_name(fragment: str) -> bool:
    return any(fragment in name for name in TORCH_NAMES)


def _patterns(model: ModelConfig, optimizer: OptimizerConfig, peft: PeftConfig) -> Iterator[tuple[str, str]]:
    """Every pattern of names in the configuration, with its key."""
    for pattern in model.freeze:
        yield "model.freeze", pattern
    for name, group in optimizer.groups.items():
        for pattern in group.parameters:
            yield f"optimizer.groups.{name}.parameters", pattern
    if peft.name != "none":
        for pattern in peft.targets:
            if pattern not in (ALL_LINEAR, EXPERTS):
                yield TARGETS, pattern
        for pattern in peft.train_also:
            yield TRAINED, pattern


def _source(model: ModelConfig) -> list[tuple[str, str]] | None:
    """For each family of the model's parts, its source and its imports' source; None if one is missing."""
    fields = given_fields(model)
    return _source_of(str(fields.get("model_type", model.type)), fields)


def _names_of_parts(known: ConfigClass) -> list[str]:
    """Fields of a class that configure parts of a model."""
    return sorted(name for name in known.names if name.endswith("_config") and name not in NOT_PARTS)


def _source_of(model_type: str, fields: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    family_source, known = modeling_source(model_type), config_class(model_type)
    if family_source is None or known is None:
        return None
    sources = [family_source]
    for name in _names_of_parts(known):
        part = fields.get(name)
        sources_of_part = _source_of(part_type(model_type, name, part), part) if isinstance(part, Mapping) else None
        if sources_of_part is None:
            return None
        sources += sources_of_part
    return sources
