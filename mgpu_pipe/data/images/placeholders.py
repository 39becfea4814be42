"""Tokens that stand for pictures and videos in the texts of a model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mgpu_pipe.architectures.find import sight_of
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.text.conversations import AUDIO, PLACE, VIDEO
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.errors import ConfigError


def placeholder_tokens(
    model: ModelConfig, data: DataConfig, tokenizer: TokenizerInfo, has_videos: bool
) -> tuple[int, int | None]:
    """Ids of the placeholder tokens of pictures and of videos; None where no conversation shows a video.

    Raises:
        ConfigError: the tokenizer has none, or the model knows another one.
    """
    image = _token(model, data, tokenizer, PLACE, "image_token_index", "image_token_id")
    return image, _token(model, data, tokenizer, VIDEO, "video_token_id") if has_videos else None


def audio_token(model: ModelConfig, data: DataConfig, tokenizer: TokenizerInfo) -> int:
    """Id of the placeholder token of recordings.

    Raises:
        ConfigError: as :func:`placeholder_tokens`.
    """
    return _token(model, data, tokenizer, AUDIO, "audio_token_index", "audio_token_id")


def opener_of(tokenizer: Path, model_type: str, field: Callable[[str], Any]) -> int | None:
    """Id of the token that the model's chat template writes for a picture, where that is not the placeholder.

    Args:
        tokenizer: its folder.
        field: gives a field of the model, None where it has none.
    """
    from tokenizers import Tokenizer

    name = sight_of(model_type).opener
    opener = field(name) if name else None
    if opener is None:
        return None
    read = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    knows = read.token_to_id(PLACE) is None and read.id_to_token(opener) is not None
    return int(opener) if knows else None


def _token(model: ModelConfig, data: DataConfig, tokenizer: TokenizerInfo, place: str, *fields: str) -> int:
    """Id of the placeholder token of pictures or of videos.

    Args:
        fields: of the model's configuration, where it says it.

    Raises:
        ConfigError: the tokenizer has none, or the model knows another one.
    """
    from tokenizers import Tokenizer

    tokens = (model_field(model, name) for name in fields)
    known = next((token for token in tokens if token is not None), None)
    read = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    number: int | None = read.token_to_id(place)
    if number is None and model.path is not None and known is not None and read.id_to_token(known) is not None:
        return int(known)  # the model's chat template writes another token
    if number is None:
        fix = "name a chat template by data.chat_template, with which it gets the token"
        raise ConfigError("data.tokenizer", data.tokenizer, fix, f"it has no token {place}")
    if model.path is not None and known != number:
        reason = f"its token {place} is {number}, and the model's {fields[0]} {known}"
        raise ConfigError("data.tokenizer", data.tokenizer, "use the model's own tokenizer", reason)
    return number
