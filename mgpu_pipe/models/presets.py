"""Names of the shipped models and of families, as a user may type them."""

from __future__ import annotations

from pathlib import Path

import yaml

from mgpu_pipe.architectures.config_source import auto_mapping
from mgpu_pipe.system.conf_folders import conf_dir


def family_named(name: str) -> str | None:
    """Model type of the shipped model or of the family of this name; None for any other name."""
    preset = _presets().get(name)
    if preset is not None:
        return _type_in(preset)
    return name if name in auto_mapping("CONFIG_MAPPING_NAMES") else None


def choice_of(name: str) -> str:
    """Overrides that choose the shipped model of this name, the first of this family, or else a new one of it."""
    named = (preset for preset, file in _presets().items() if name in (preset, _type_in(file)))
    preset = next(named, None)
    return f"model=hf model.type={name}" if preset is None else f"model={preset}"


def _presets() -> dict[str, Path]:
    return {file.stem: file for file in sorted((conf_dir() / "model").glob("*.yaml"))}


def _type_in(preset: Path) -> str | None:
    model_type = yaml.safe_load(preset.read_text(encoding="utf-8")).get("type")
    return None if model_type is None else str(model_type)
