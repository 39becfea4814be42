"""``data=moving_shapes``: short clips of a moving shape, and the question which way it moves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.cache import build_once
from mgpu_pipe.data.images.picture_source import ChatRules, PictureChatSource
from mgpu_pipe.data.sources.picture_chats import check_picture_chats
from mgpu_pipe.errors import check_all

if TYPE_CHECKING:
    from mgpu_pipe.data.images.demo_pictures import Question
    from mgpu_pipe.data.images.visual_inputs import VisualInput


def ask_about_shapes(together: int) -> tuple[list[Question], list[VisualInput]]:
    from mgpu_pipe.data.images.demo_pictures import FRAMES, SECONDS, moving_shapes
    from mgpu_pipe.data.images.visual_inputs import VisualInput

    _, questions = moving_shapes()
    moments = tuple(number * SECONDS for number in range(FRAMES))
    firsts = range(0, len(questions) * FRAMES, FRAMES)
    visuals = [
        VisualInput(tuple(range(first, first + FRAMES)), together * SECONDS, moments=moments) for first in firsts
    ]
    return questions, visuals


def build_frames(cache: Path, identity: str) -> Path:
    folder = cache / "images" / identity
    build_once(folder, _write_frames)
    return folder


def _write_frames(out: Path) -> dict[str, Any]:
    import numpy as np

    from mgpu_pipe.data.images.demo_pictures import moving_shapes

    frames, _ = moving_shapes()
    np.save(out / "pixels.npy", frames)
    return {"pictures": len(frames), "bad": []}


def check_model(model: ModelConfig, data: DataConfig) -> None:
    """Checks that the model takes videos."""
    from mgpu_pipe.data.images.check_images import sees_videos

    check_all([lambda: check_picture_chats(model, data), lambda: sees_videos(model, f"data.source={SOURCE.name}")])


SOURCE = PictureChatSource(name="moving_shapes", check=check_model, rules=ChatRules(ask_about_shapes, build_frames))
