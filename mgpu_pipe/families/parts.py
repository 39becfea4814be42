"""The parts of a model of several kinds of input, by names that hold for all families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIGS = {"vision": "vision_config", "audio": "audio_config", "language": "text_config"}
"""Parts with a configuration of their own in the model's, and its field."""
PROJECTOR = "projector"
"""All that lies between them."""
PARTS = (*CONFIGS, PROJECTOR)


def parts_in(fields: Mapping[str, Any]) -> list[str]:
    """The parts of a model of these configuration fields; none where it is of one piece."""
    found = [part for part, name in CONFIGS.items() if isinstance(fields.get(name), Mapping)]
    return [*found[:-1], PROJECTOR, found[-1]] if len(found) > 1 else []
