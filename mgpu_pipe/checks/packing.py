"""Whether attention stays inside the documents of a packed sample. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.family import FLASH
from mgpu_pipe.families.find import document_isolation, family_of


def check_packing(fields: Mapping[str, Any], packing: str, attn_implementation: str = "auto") -> None:
    """Raise where documents of a packed sample would see each other.

    Args:
        fields: of the model's configuration, its ``model_type`` among them.

    Raises:
        ConfigError: ``data.packing`` packs, and the family (or its flash attention) cannot keep documents apart.
    """
    model_type = str(fields["model_type"])
    isolation = document_isolation(model_type, fields)
    if packing == "none" or isolation == "positions":
        return
    if isolation == "none":
        setting = family_of(model_type).unpacked_with
        having = f" with {setting}=true" if setting else ""
        raise ConfigError(
            "data.packing",
            packing,
            "use data.packing=none",
            f"attention of the {model_type} family{having} is not known to stay inside documents of a packed sample",
        )
    if attn_implementation in FLASH:
        reason = f"the {model_type} family needs a mask for packed samples, which flash attention does not take"
        raise ConfigError("model.attn_implementation", attn_implementation, "use sdpa, or data.packing=none", reason)
