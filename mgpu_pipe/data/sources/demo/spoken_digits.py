"""Digits that espeak-ng and flite speak: three to five in a recording, a single digit, or questions about one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.speech_source import AudioConfig, LabelledAudioConfig, SpeechSource
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.images.image_keys import ChatRules, PictureChatSource
from mgpu_pipe.data.sources.labelled_recordings import check_recordings
from mgpu_pipe.data.sources.picture_sets import check_picture_chats
from mgpu_pipe.errors import check_all

if TYPE_CHECKING:
    from mgpu_pipe.data.images.demo_pictures import Question
    from mgpu_pipe.data.images.visual_inputs import VisualInput

QUESTIONED = 1800
"""Recordings of data=spoken_questions."""
ALONE = (
    ("What digit is said?", lambda digit, name: f"It is {name}."),
    ("Is it even or odd?", lambda digit, name: f"It is {name}, which is {'odd' if digit % 2 else 'even'}."),
    ("Say the digit.", lambda digit, name: f"It is {name}."),
)
"""Questions about one recording, and functions of their answers."""


@dataclass
class SpokenDigitsConfig(AudioConfig):
    recordings: int = field(default=2400, metadata={"at_least": 1})
    """Number of training recordings (spoken_digits)."""
    held_out: Literal["voices", "synthesiser"] = "voices"
    """Held-out voices: voices of espeak-ng that are not trained on, or flite, another synthesiser."""


@dataclass
class SpokenLabelsConfig(SpokenDigitsConfig, LabelledAudioConfig):
    """Keys of spoken digits that are classes."""


def check_programs(model: ModelConfig, data: DataConfig) -> None:
    """Checks recordings in general, and that the programs that speak are installed."""
    from mgpu_pipe.data.audio import synthesis

    assert isinstance(data, SpokenDigitsConfig)
    programs = [synthesis.ESPEAK, *((synthesis.FLITE,) if data.held_out == "synthesiser" else ())]
    check_all([lambda: check_recordings(model, data), *(partial(synthesis.program, program) for program in programs)])


def speak_digits(data: DataConfig, rate: int, cache: Path, progress: Progress) -> tuple[Path, Path]:
    from mgpu_pipe.data.audio.synthesis import DIGITS

    return spoken_folders(data, rate, cache, progress, DIGITS)


def speak_single_digits(data: DataConfig, rate: int, cache: Path, progress: Progress) -> tuple[Path, Path]:
    return spoken_folders(data, rate, cache, progress, (1, 1))


def spoken_folders(
    data: DataConfig, rate: int, cache: Path, progress: Progress, digits: tuple[int, int]
) -> tuple[Path, Path]:
    """Cache folders of the training and the held-out recordings, with ``digits`` at least and at most."""
    from mgpu_pipe.data.audio import synthesis
    from mgpu_pipe.data.audio.listen import keep_spoken

    assert isinstance(data, SpokenDigitsConfig)
    counts = {
        "heard": data.recordings,
        "voices": min(synthesis.UNHEARD_RECORDINGS, data.recordings),
        "synthesiser": min(synthesis.FLITE_RECORDINGS, data.recordings),
    }
    kinds: tuple[str, ...] = ("heard", data.held_out)
    trained, held_out = (keep_spoken(kind, counts[kind], rate, cache, progress, digits) for kind in kinds)
    return trained, held_out


def ask_about_speech(together: int) -> tuple[list[Question], list[VisualInput]]:
    """Questions about each recording alone, and about two recordings of a voice. A voice is held out as a whole."""
    from mgpu_pipe.data.audio.synthesis import HEARD, WORDS, drawn_recordings
    from mgpu_pipe.data.images.demo_pictures import question
    from mgpu_pipe.data.images.visual_inputs import SOUND, VisualInput
    from mgpu_pipe.data.text.conversations import AUDIO

    texts, voices, _ = drawn_recordings("heard", QUESTIONED, 0, (1, 1))
    questions = []
    for number, (name, voice) in enumerate(zip(texts, voices, strict=True)):
        turn, key, before = number // len(HEARD), voice.partition("+")[2], number - len(HEARD)
        text, answer = ALONE[turn % len(ALONE)]
        questions.append(question(f"{AUDIO}{text}", answer(WORDS.index(name), name), (number,), key))
        if turn % 2:
            same = "Yes." if texts[before] == name else f"No, {texts[before]} and {name}."
            questions.append(question(f"{AUDIO * 2}Are the two the same?", same, (before, number), key))
    return questions, [VisualInput((number,), clip=SOUND) for number in range(QUESTIONED)]


def speak_questioned(cache: Path, rate: int, progress: Progress) -> Path:
    from mgpu_pipe.data.audio.listen import keep_spoken

    return keep_spoken("heard", QUESTIONED, rate, cache, progress, (1, 1))


def check_questions(model: ModelConfig, data: DataConfig) -> None:
    """Checks that the model hears, and that the program that speaks is installed."""
    from mgpu_pipe.data.audio import synthesis
    from mgpu_pipe.data.audio.chat_sounds import hears_sounds

    takes_sounds = partial(hears_sounds, model, f"data.source={data.source}")
    check_all([partial(check_picture_chats, model, data), takes_sounds, partial(synthesis.program, synthesis.ESPEAK)])


spoken = partial(SpeechSource, reads_files=False, check=check_programs)
SOURCES = (
    spoken(name="spoken_digits", keys=SpokenDigitsConfig, reads=("tokenizer", "on_too_long"), speak=speak_digits),
    spoken(
        name="spoken_single_digits",
        says="class",
        samples="labelled_sounds",
        keys=SpokenLabelsConfig,
        reads=("classes",),
        speak=speak_single_digits,
    ),
    spoken(
        name="spoken_digit_tags",
        says="classes",
        samples="tagged_sounds",
        keys=SpokenLabelsConfig,
        reads=("classes",),
        speak=speak_digits,
    ),
    PictureChatSource(
        name="spoken_questions", check=check_questions, rules=ChatRules(ask_about_speech, build_sounds=speak_questioned)
    ),
)
