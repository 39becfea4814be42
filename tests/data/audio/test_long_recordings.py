"""Recordings and transcripts that are too long follow ``data.on_too_long``; other bad ones do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mgpu_pipe.checks.preflight import preflight
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.errors import ConfigErrors, DataError
from tests.objectives.test_ctc import SPEECH
from tests.objectives.test_speech_seq2seq import WHISPER
from tests.support.needs import need_speech
from tests.support.sounds import tones, write_wav

KINDS = {
    "the file": ("long.wav,b a", SPEECH, ("data.max_seconds=2.5",), "lasts 3.0 s, longer than data.max_seconds=2.5"),
    "the frames": ("0.wav," + "ab" * 40, SPEECH, (), "has a text that needs 80 frames"),
    "the window": ("long.wav,b", WHISPER, (), "lasts 3.0 s; the model's window has 2 s"),
    "the decoder": ("0.wav," + "b a " * 40, WHISPER, (), "tokens; the model writes at most 64"),
}


def listed(folder: Path, kind: str, *overrides: str, others: str = "") -> RunConfig:
    """Eight tones and one sample that is too long."""
    line, objective, more, _ = KINDS[kind]
    write_wav(folder / "0.wav", tones("ab", 1))
    write_wav(folder / "long.wav", tones("ab" * 8, 1)[: 3 * 8000])
    (folder / "list.csv").write_text("path,text\n" + "0.wav,ab\n" * 8 + f"{line}\n{others}")
    given = (f"data.paths=[{folder / 'list.csv'}]", f"data.cache_dir={folder / 'cache'}", "data.speed=0")
    own = ("model.config.max_source_positions=100",) if objective is WHISPER else ("data.sampling_rate=8000",)
    sizes = ("data.validation_fraction=0", *own, *more)
    return compose([*objective, "data=audio_list", *given, *sizes, *overrides])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_long_is_refused_or_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    need_speech()
    said = re.escape(KINDS[kind][-1])
    with pytest.raises(DataError, match=f"data.on_too_long=refuse: .*{said}.*data.on_too_long=drop"):
        prepare(listed(tmp_path, kind, "data.on_too_long=refuse"))
    with pytest.raises(DataError, match=f"{said}.*data.on_bad_sample=skip"):
        prepare(listed(tmp_path, kind))
    config = listed(tmp_path, kind, "data.on_too_long=drop")
    left = prepare(config)
    assert isinstance(left, PreparedSpeech) and read_prepared(left.as_dict()) == left
    assert (left.train_samples, left.too_long_samples, left.bad_samples) == (8, 1, 0)
    assert left.too_long(config.data).startswith("1 recordings or their texts are longer than data.max_seconds=")
    assert left.digest == prepare(listed(tmp_path, kind, "data.on_bad_sample=skip")).digest


def test_other_bad_recordings_still_stop_the_run(tmp_path: Path) -> None:
    need_speech()
    with pytest.raises(DataError, match=r"has an empty text.*data\.on_bad_sample=skip"):
        prepare(listed(tmp_path, "the frames", "data.on_too_long=drop", others="0.wav,   \n"))
    both = ("data.on_too_long=drop", "data.on_bad_sample=skip")
    found = prepare(listed(tmp_path, "the frames", *both, others="0.wav,   \n"))
    assert (found.too_long_samples, found.bad_samples) == (1, 1)
    with pytest.raises(ConfigErrors, match=r"data.on_too_long=truncate: .*; use auto, refuse, drop"):
        preflight(listed(tmp_path, "the frames", "data.on_too_long=truncate"))
