"""What can be known to be wrong with pictures before any is looked at. No torch."""

from __future__ import annotations

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.decode import pillow
from mgpu_pipe.data.image.keys import ImageConfig
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.image.sources import DIGITS, digits_file, entries
from mgpu_pipe.errors import BadInputError, ConfigErrors


def check_pictures(config: RunConfig) -> None:
    """The packages are there, folders hold pictures, lists name files, and the model takes such pictures.

    Raises:
        ConfigErrors: the errors found.
    """
    data, errors = config.data, list[BadInputError]()
    assert isinstance(data, ImageConfig)
    checks = [pillow, lambda: Pixels.of(data, config.model)]
    if data.source in DIGITS:
        checks.append(digits_file)
    else:
        checks.append(lambda: entries(data, data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: entries(data, data.validation_paths, "data.validation_paths"))
    for check in checks:
        try:
            check()
        except BadInputError as error:
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)
