"""How many places in a text a picture takes in a vision-language model."""

from __future__ import annotations

WITHOUT_SUMMARY = ("siglip_vision_model",)
"""Towers whose first vector is a patch of the picture, not a summary of all."""


def picture_places(tower: str, size: int, patch: int, select: str) -> int:
    """Vectors of a picture that the language model gets.

    Args:
        tower: ``model_type`` of what sees.
        size, patch: pixels across a picture, and a patch.
        select: ``vision_feature_select_strategy``; ``default`` leaves the first vector out.
    """
    return (size // patch) ** 2 + (tower not in WITHOUT_SUMMARY) - (select == "default")
