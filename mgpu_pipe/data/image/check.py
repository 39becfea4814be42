"""What can be known to be wrong with pictures before any is looked at. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.chat_rows import QUESTIONS, first_rows
from mgpu_pipe.data.image.decode import pillow
from mgpu_pipe.data.image.grids import chat_pixels
from mgpu_pipe.data.image.keys import ImageConfig, PictureChatConfig
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.image.sources import DIGITS, digits_file, entries
from mgpu_pipe.data.image.tars import TARS, check_tars
from mgpu_pipe.data.text.chat_templates import check_chat
from mgpu_pipe.errors import BadInputError, ConfigErrors


def check_pictures(config: RunConfig) -> None:
    """The packages are there, folders hold pictures, lists name files, and the model takes such pictures.

    Raises:
        ConfigErrors: the errors found.
    """
    data = config.data
    assert isinstance(data, ImageConfig)
    checks: list[Callable[[], object]] = [pillow, lambda: Pixels.of(data, config.model)]
    if data.source in DIGITS:
        checks.append(digits_file)
    else:
        looked: Callable[[list[str], str], object] = check_tars if data.source in TARS else partial(entries, data)
        checks.append(lambda: looked(data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: looked(data.validation_paths, "data.validation_paths"))
    _raise_all(checks)


def check_picture_chats(config: RunConfig) -> None:
    """The same, and conversations have as many places as pictures, and the chat template takes them.

    Raises:
        ConfigErrors: the errors found.
    """
    data = config.data
    assert isinstance(data, PictureChatConfig)
    checks: list[Callable[[], object]] = [pillow, lambda: chat_pixels(data, config.model)]
    if data.source == QUESTIONS:
        checks.append(digits_file)
    elif data.paths:
        checks.append(lambda: check_chat(config, first_rows(data, data.paths, "data.paths")))
        if data.validation_paths:
            checks.append(lambda: first_rows(data, data.validation_paths, "data.validation_paths"))
    _raise_all(checks)


def _raise_all(checks: Sequence[Callable[[], object]]) -> None:
    errors = list[BadInputError]()
    for check in checks:
        try:
            check()
        except BadInputError as error:
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)
