"""Sequences of spoken digits, three to five or others, synthesised by espeak-ng and flite.

espeak-ng's voices are variants of a few accents; eight of them are held out. flite's four voices, of another synthesis
method, are never trained on. A fixed seed draws texts and voices, so every run gets the same recordings.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mgpu_pipe.data.audio.decode_audio import Wave, decode
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.system.hardware import cpu_cores

SOURCE = "spoken_digits"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = (3, 5)
"""Fewest and most digits of a recording."""
ESPEAK, FLITE = "espeak-ng", "flite"
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp")
HEARD = (
    *("f1", "f2", "f3", "f5", "m1", "m2", "m3", "m4", "m6", "m7", "m8", "Alex", "Alicia", "Andy", "belinda"),
    *("benjamin", "boris", "caleb", "david", "ed", "edward", "Gene", "Henrique", "linda", "Marco", "Mario"),
    *("Michael", "pablo", "paul", "steph"),
)
UNHEARD = ("f4", "m5", "Andrea", "Adam", "max", "rob", "john", "quincy")
FLITE_VOICES = ("kal16", "awb", "rms", "slt")
UNHEARD_RECORDINGS, FLITE_RECORDINGS = 240, 120
WORDS_A_MINUTE, PITCHES, STRETCHES = (130, 190), (30, 71), (0.9, 1.2)
"""Ranges of espeak-ng's rate and pitch, and of flite's stretch of durations."""
SEEDS = {"heard": 1, "voices": 2, "synthesiser": 3}
_SECONDS = 60.0
"""Seconds that a program has for one recording."""


def program(name: str) -> str:
    """Finds a synthesiser on the path; ConfigError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        fix = f"install it: apt-get install {name}"
        raise ConfigError("data.source", SOURCE, fix, f"the digits are spoken by {name}, which is not installed")
    return path


def version(kind: str) -> str:
    """Version of the program that synthesises a kind of recordings, one of :data:`SEEDS`."""
    name, option = (FLITE, "-version") if kind == "synthesiser" else (ESPEAK, "--version")
    done = subprocess.run([program(name), option], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.stdout.decode(errors="replace").partition("Data at")[0].strip()


def synthesise(
    kind: str, count: int, rate: int, progress: Progress, lengths: tuple[int, int] = DIGITS
) -> tuple[list[Wave], list[str], list[str]]:
    """Synthesises a kind of recordings; returns waves, transcripts and voices.

    Args:
        lengths: fewest and most digits of a recording.

    Raises:
        ConfigError: its program is not installed.
        DataError: the program failed.
    """
    texts, voices, speak = drawn_recordings(kind, count, rate, lengths)
    waves: list[Wave] = []
    with ThreadPoolExecutor(cpu_cores()) as pool:
        for wave in pool.map(lambda job: job(), speak):
            waves.append(wave)
            progress("speak", len(waves), count)
    return waves, texts, voices


def drawn_recordings(
    kind: str, count: int, rate: int, lengths: tuple[int, int]
) -> tuple[list[str], list[str], list[Callable[[], Wave]]]:
    """Texts and voices of a kind of recordings, and functions that speak them; arguments and ConfigError of
    :func:`synthesise`."""
    random = np.random.default_rng(SEEDS[kind])
    voices = {"heard": HEARD, "voices": UNHEARD, "synthesiser": FLITE_VOICES}[kind]
    texts, spoken_by, speak = list[str](), list[str](), list[Callable[[], Wave]]()
    for number in range(count):
        digits = random.integers(0, 10, int(random.integers(lengths[0], lengths[1] + 1)))
        text, voice = " ".join(WORDS[digit] for digit in digits), voices[number % len(voices)]
        if kind == "synthesiser":
            speak.append(_flite(text, voice, float(random.uniform(*STRETCHES)), rate))
        else:
            voice = f"{ACCENTS[random.integers(len(ACCENTS))]}+{voice}"
            speed, pitch = (int(random.integers(*limits)) for limits in (WORDS_A_MINUTE, PITCHES))
            speak.append(_espeak(text, voice, speed, pitch, rate))
        texts.append(text)
        spoken_by.append(voice)
    return texts, spoken_by, speak


def _espeak(text: str, voice: str, rate: int, pitch: int, sampling_rate: int) -> Callable[[], Wave]:
    command = [program(ESPEAK), "-v", voice, "-s", str(rate), "-p", str(pitch)]
    return lambda: _run_speaker([*command, "-w", "{}", text], sampling_rate)


def _flite(text: str, voice: str, stretch: float, sampling_rate: int) -> Callable[[], Wave]:
    command = [program(FLITE), "-voice", voice, "--setf", f"duration_stretch={stretch:.2f}", "-t", text, "-o", "{}"]
    return lambda: _run_speaker(command, sampling_rate)


def _run_speaker(command: list[str], sampling_rate: int) -> Wave:
    """Runs a program; returns the sound that it writes to the file named ``{}``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spoken.wav"
        filled = [str(file) if part == "{}" else part for part in command]
        try:
            subprocess.run(filled, check=True, capture_output=True, timeout=_SECONDS)  # the program ends by itself
            return decode(file.read_bytes(), sampling_rate, _SECONDS)
        except (OSError, subprocess.SubprocessError, BadSampleError) as error:
            said = " ".join(str(error).split())[:200]
            raise DataError(f"{command[0]} cannot say {filled[-1]!r} ({said}); reinstall it") from error
