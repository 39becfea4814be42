"""What a model's own configuration says of its mathematics, as a checkpoint records it and a resume compares it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.fields import ALPHABET, LABELS, TEXT, config_fields, model_types

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
PICTURE = ("image_token_index", "image_seq_length", "image_token_id", "video_token_id")
"""The token of a picture in a text, and how many of them one takes; that of a video."""
LISTED = 8


def model_settings(config: PretrainedConfig) -> dict[str, Any]:
    """The configuration's fields, in values that JSON holds."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False), parse_constant=str)
    return {name: value for name, value in sorted(fields.items()) if name not in NOT_MATHEMATICS}


def recorded_model(saved: object, folder: Path) -> ModelConfig:
    """The model that a checkpoint records, without the folder that its configuration named.

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
    """``model`` with what the data decided, as a checkpoint records it: names of classes, the end of a text, the token
    of a picture, an alphabet."""
    if not isinstance(saved, Mapping):
        return model
    decided: dict[str, Any] = {name: saved[name] for name in LABELS if name in saved}
    if model.path is None:
        decided.update({name: saved[name] for name in PICTURE if name in saved})
    written = next((names for kind, names in ALPHABET.items() if saved.get("model_type") in model_types(kind)), ())
    decided.update({name: saved[name] for name in written if name in saved})
    own, recorded = model.config.get(TEXT), saved.get(TEXT)
    if model.path is None and isinstance(own, Mapping) and isinstance(recorded, Mapping):
        decided[TEXT] = {**own, **{name: recorded[name] for name in ("eos_token_id",) if name in recorded}}
    return replace(model, config={**model.config, **decided})


def _number(value: object) -> object:
    """JSON has no infinity: :func:`model_settings` writes it as a text."""
    return float(value) if value in ("Infinity", "-Infinity", "NaN") else value


def require_model_settings(saved: object, live: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with a model whose tensors may fit and whose mathematics differs, e.g. another rotary base.

    Args:
        saved: of the checkpoint; anything but a mapping is of a format that did not record them.

    Raises:
        CheckpointError: the fields that differ, listed. Fields that one version of transformers alone knows do not
            count.
    """
    if not isinstance(saved, Mapping):
        return
    apart = [
        f"{name}={live[name]} (saved with {saved[name]})"
        for name in live
        if name in saved and saved[name] != live[name]
    ]
    if apart:
        more = f"; and {len(apart) - LISTED} more" if len(apart) > LISTED else ""
        raise CheckpointError(
            f"{folder}: is a checkpoint of another model: {'; '.join(apart[:LISTED])}{more}; use the model it was "
            "saved with, or checkpoint.init_from for its weights alone"
        )
