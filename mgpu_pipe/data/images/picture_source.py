"""Shipped sources of pictures and of conversations about pictures. Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.data_source import DataSource, shipped_source
from mgpu_pipe.data.images.image_keys import ImageConfig, PictureChatConfig

if TYPE_CHECKING:
    from mgpu_pipe.data.images.demo_pictures import Question
    from mgpu_pipe.data.images.visual_inputs import VisualInput

Layout = Literal["digits", "folder", "list", "tar"]
"""Place of pictures: scikit-learn's digits, a folder for each class, files that a table names, or tar files."""


@dataclass(frozen=True, kw_only=True)
class PictureSource(DataSource):
    """A shipped source of pictures with classes or captions."""

    samples: str = "labelled_images"
    keys: type[Any] | None = ImageConfig
    reads_files: bool = True
    layout: Layout


def layout_of(data: DataConfig) -> Layout:
    """Place of the pictures of ``data.source``."""
    source = shipped_source(data.source)
    assert isinstance(source, PictureSource)
    return source.layout


@dataclass(frozen=True)
class ChatRules:
    """Rules that make conversations about pictures.

    Attributes:
        questions: makes the questions and their visual inputs, given the frames of a patch.
        build_pictures: builds or finds the folder of pictures, given the cache folder and the source's identity.
    """

    questions: Callable[[int], tuple[list[Question], list[VisualInput]]]
    build_pictures: Callable[[Path, str], Path]


@dataclass(frozen=True, kw_only=True)
class PictureChatSource(DataSource):
    """A shipped source of conversations with pictures; ``rules`` is None where files hold them."""

    samples: str = "picture_chats"
    documents: DocumentKind = "chat"
    reads: tuple[str, ...] = (*TEXT_KEYS, "messages_column")
    keys: type[Any] | None = PictureChatConfig
    rules: ChatRules | None = None


def chat_rules(data: DataConfig) -> ChatRules | None:
    """The rules of the conversations of ``data.source``; None where files hold them."""
    source = shipped_source(data.source)
    assert isinstance(source, PictureChatSource)
    return source.rules
