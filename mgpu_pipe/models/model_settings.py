"""Fields of a model's configuration that decide its mathematics; a checkpoint records and a resume compares them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.fields import ALPHABET, LABELS, PROBLEM, TEXT, config_fields, model_types
from mgpu_pipe.models.weights.folder import with_infinities

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NOT_MATHEMATICS = {
    "transformers_version",
    "architectures",
    "dtype",
    "use_cache",
    "_name_or_path",
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
}
PICTURE = (
    *("image_token_index", "image_seq_length", "image_token_id", "video_token_id"),
    *("audio_token_index", "audio_token_id"),
)
"""Fields of the tokens of pictures, videos and recordings, and of tokens per picture."""
TOWERS = ("vision_config", "audio_config")
LISTED = 8


def model_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Fields of ``config`` as JSON values."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False), parse_constant=str)
    return _mathematics(fields)


def _mathematics(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that decide the mathematics of a model and its parts, sorted."""
    return {
        name: _mathematics(value) if _is_part(name, value) else value
        for name, value in sorted(fields.items())
        if name not in NOT_MATHEMATICS
    }


def _is_part(name: str, value: object) -> bool:
    return name.endswith("_config") and isinstance(value, Mapping)


def recorded_model(saved: object, folder: Path) -> ModelConfig:
    """Model that a checkpoint records, without the folder of its configuration.

    Raises:
        CheckpointError: the checkpoint does not record its model.
    """
    settings = dict(saved) if isinstance(saved, Mapping) else {}
    kind = settings.pop("model_type", None)
    known = config_fields(kind) if isinstance(kind, str) else None
    if known is None:
        raise CheckpointError(
            f"{folder}: does not record its model, and the folder that its model.path names is not followed in "
            "somebody else's run; export the model where it was trained"
        )
    fields = {name: _number(value) for name, value in settings.items() if name in known}
    return ModelConfig(type=str(kind), config=fields)


def with_recorded_data(model: ModelConfig, saved: object) -> ModelConfig:
    """``model`` with fields that the data or the objective decided, from a checkpoint: class names and whether several
    are of one sample, end-of-text and picture tokens, alphabet."""
    if not isinstance(saved, Mapping):
        return model
    decided: dict[str, Any] = {name: saved[name] for name in LABELS if name in saved}
    if saved.get(PROBLEM) is not None:
        decided[PROBLEM] = saved[PROBLEM]
    if model.path is None:
        decided.update({name: saved[name] for name in PICTURE if name in saved})
        for part in TOWERS:  # Phi-4 multimodal keeps its tokens there
            recorded = saved.get(part) or {}
            if tokens := {name: recorded[name] for name in PICTURE if name in recorded}:
                decided[part] = {**model.config.get(part, {}), **tokens}
    written = next((names for kind, names in ALPHABET.items() if saved.get("model_type") in model_types(kind)), ())
    decided.update({name: saved[name] for name in written if name in saved})
    text, recorded_text = model.config.get(TEXT), saved.get(TEXT)
    known = model.path is not None or isinstance(text, Mapping)
    if known and isinstance(recorded_text, Mapping) and "eos_token_id" in recorded_text:
        decided[TEXT] = {**(text if isinstance(text, Mapping) else {}), "eos_token_id": recorded_text["eos_token_id"]}
    return replace(model, config={**model.config, **decided})


def _number(value: object) -> object:
    """Number that :func:`model_settings` may have written as text, since JSON has no infinity; also within a value."""
    if isinstance(value, list):
        return [_number(entry) for entry in value]
    if isinstance(value, Mapping):
        return with_infinities(dict(value))
    return float(value) if value in ("Infinity", "-Infinity", "NaN") else value


def require_model_settings(saved: object, live: Mapping[str, Any], folder: Path) -> None:
    """Refuses a model with fitting tensors but other mathematics, e.g. another rotary base.

    Args:
        saved: settings in the checkpoint; an old format without them is not a mapping.

    Raises:
        CheckpointError: lists the fields that differ. Fields that only one version of transformers knows do not count.
    """
    if not isinstance(saved, Mapping):
        return
    apart = list(_differences(live, _mathematics(saved)))
    if apart:
        more = f"; and {len(apart) - LISTED} more" if len(apart) > LISTED else ""
        raise CheckpointError(
            f"{folder}: is a checkpoint of another model: {'; '.join(apart[:LISTED])}{more}; use the model it was "
            "saved with, or checkpoint.init_from for its weights alone"
        )


def _differences(live: Mapping[str, Any], saved: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Common fields that differ, as text; those of parts by path."""
    for name in sorted(live.keys() & saved.keys()):
        now, before, path = live[name], saved[name], f"{within}{name}"
        if _is_part(name, now) and _is_part(name, before):
            yield from _differences(now, before, f"{path}.")
        elif now != before and not (name in LABELS and _are_numbers(before) and len(now) == len(before)):
            yield f"{path}={now} (saved with {before})"


def _are_numbers(classes: object) -> bool:
    """Whether classes have no names but their numbers, as earlier versions read them from tables of the datasets
    library; the data's digest guards the order."""
    return isinstance(classes, Mapping) and all(name == str(number) for name, number in classes.items())
