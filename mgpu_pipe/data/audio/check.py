"""What can be known to be wrong with recordings before any is listened to. No torch."""

from __future__ import annotations

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio import spoken_digits
from mgpu_pipe.data.audio.decode import soundfile
from mgpu_pipe.data.audio.keys import AudioConfig, SpokenDigitsConfig
from mgpu_pipe.data.audio.listen import listed
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.read import Sound
from mgpu_pipe.errors import BadInputError, ConfigErrors


def check_recordings(config: RunConfig) -> None:
    """The packages and programs are there, lists name files, and the model takes such recordings.

    Raises:
        ConfigErrors: the errors found.
    """
    data, errors = config.data, list[BadInputError]()
    assert isinstance(data, AudioConfig)
    checks = [soundfile, lambda: LogMel.of(config.model, Sound.of(data, config.model).rate)]
    if isinstance(data, SpokenDigitsConfig):
        checks.append(lambda: spoken_digits.program(spoken_digits.ESPEAK))
        if data.held_out == "synthesiser":
            checks.append(lambda: spoken_digits.program(spoken_digits.FLITE))
    else:
        checks.append(lambda: listed(data, data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: listed(data, data.validation_paths, "data.validation_paths"))
    for check in checks:
        try:
            check()
        except BadInputError as error:
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)
