"""The chat template of a run: a shipped one by name, a Jinja file, or the tokenizer's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mgpu_pipe.architectures.find import family_of, recordings_of, sight_of
from mgpu_pipe.architectures.pictures import (
    BEGIN,
    END,
    IMAGE_BREAK,
    IMAGE_CLOSE,
    IMAGE_OPEN,
    IMAGE_STOP,
    PLACED,
    SOUND_CLOSE,
    SOUND_OPEN,
)
from mgpu_pipe.architectures.tiles import (
    CANVAS_BEGIN,
    CANVAS_END,
    CANVAS_WHOLE,
    IMAGE_BEGIN,
    IMAGE_END,
    NEXT_ROW,
    NEXT_TILE,
)
from mgpu_pipe.config.data_sources import samples_of
from mgpu_pipe.config.hub import DATA
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.data import files
from mgpu_pipe.data.bad_samples import OR_SKIP, Fault, rows_of_files, unusable_files
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.tables import LOOKED_AT, row_lines
from mgpu_pipe.data.text import tokenizer_train
from mgpu_pipe.data.text.conversations import AUDIO, EVERY_PLACE, PLACE, VIDEO
from mgpu_pipe.data.text.render_chat import ChatTemplate
from mgpu_pipe.data.text.template_limits import TemplateLimit, reason
from mgpu_pipe.data.text.tokenizer_folder import chat_template, existing_file, special_tokens, stop_tokens
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.system.local_files import exists, expand_home, is_file

LARGEST_TEMPLATE = 1 << 20
"""Largest template in bytes; real ones have some thousand."""
SPECIAL: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "deepseek": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    "paligemma": (),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "plain": (),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
"""Shipped templates and the tokens that each writes around a turn; the run's tokenizer gets these as single tokens."""

PICTURE_TOKENS: dict[str, tuple[str, ...]] = {
    "parts": PLACED,
    "tiles": (IMAGE_BEGIN, IMAGE_END),
    "canvas": (CANVAS_BEGIN, CANVAS_WHOLE, NEXT_TILE, NEXT_ROW, CANVAS_END),
    "rows": (IMAGE_BREAK, IMAGE_STOP),
    "pooled": (IMAGE_OPEN, IMAGE_CLOSE),
}
VIDEO_TOKENS: dict[str, tuple[str, ...]] = {"": (), "axis": (VIDEO,), "text": (VIDEO, BEGIN, END)}
"""Tokens next to the placeholder of pictures, see :class:`mgpu_pipe.architectures.family.Sight`."""


def places_taken(model_type: str, encoder: object) -> tuple[str, ...]:
    """Places of the kinds of files that a vision-language or hearing model takes in conversations.

    Args:
        encoder: see :func:`mgpu_pipe.architectures.find.recordings_of`.
    """
    family, sight, recordings = family_of(model_type), sight_of(model_type), recordings_of(model_type, encoder)
    seen = (PLACE,) if family.sight or not recordings else ()
    return (*seen, *((VIDEO,) if sight.videos else ()), *((AUDIO,) if recordings else ()))


@dataclass(frozen=True)
class ChosenTemplate:
    """A template that ``data.chat_template`` names: the Jinja text, and the tokens that the tokenizer gets for it."""

    text: str
    special: tuple[str, ...] = ()


def chosen_template(model: ModelConfig, data: DataConfig) -> ChosenTemplate | None:
    """Reads and compiles the template of ``data.chat_template``, None without; ConfigError if it is none."""
    chosen = data.chat_template
    if chosen is None:
        return None
    place: tuple[str, ...] = ()
    if samples_of(data.source) == "picture_chats":
        sight = sight_of(str(model.type))
        taken = places_taken(str(model.type), model_field(model, "audio_config"))
        around = (SOUND_OPEN, SOUND_CLOSE) if sight.pictures == "pooled" and AUDIO in taken else ()
        place = tuple(place for place in taken if place != VIDEO)
        place = (*place, *PICTURE_TOKENS.get(sight.pictures, ()), *VIDEO_TOKENS[sight.videos], *around)
    if chosen in SPECIAL:
        path = Path(__file__).with_name("templates") / f"{chosen}.jinja"
        return ChosenTemplate(path.read_text(encoding="utf-8"), (*SPECIAL[chosen], *place))
    path = expand_home(chosen)
    close = nearest(chosen, list(SPECIAL))
    fix = f"did you mean {close}?" if close else f"give a Jinja file, or one of {', '.join(SPECIAL)}"
    try:
        if exists(path) and not is_file(path):
            raise ConfigError("data.chat_template", chosen, fix, "is no plain file")
        with open(path, "rb") as file:
            raw = file.read(LARGEST_TEMPLATE + 1)
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("data.chat_template", chosen, fix, f"cannot be read: {error}") from error
    if len(raw) > LARGEST_TEMPLATE:
        raise ConfigError("data.chat_template", chosen, "give a chat template", "is larger than 1 MiB")
    compile_template(data, text)
    return ChosenTemplate(text, place)


def compile_template(
    data: DataConfig, text: str, folder: Path | None = None, places: Sequence[str] = EVERY_PLACE
) -> ChatTemplate:
    """Compiles a template (of the tokenizer's ``folder``), if valid and small; ``places`` are of the model's
    visuals."""
    from jinja2 import TemplateError

    try:
        if folder is None:
            end = tokenizer_train.END_OF_TEXT
            stops = SPECIAL.get(str(data.chat_template), ())
            return ChatTemplate(text, {"bos_token": end, "eos_token": end, "pad_token": end}, stops, places)
        return ChatTemplate(text, special_tokens(folder), stop_tokens(folder), places)
    except TemplateError as error:
        if data.chat_template is not None:
            raise ConfigError(
                "data.chat_template", data.chat_template, "correct the template", reason(error)
            ) from error
        raise ConfigError(
            "data.tokenizer",
            data.tokenizer,
            "give another chat template by data.chat_template",
            f"its chat template cannot be used: {reason(error)}",
        ) from error


def no_template(data: DataConfig) -> ConfigError:
    return ConfigError(
        "data.chat_template",
        data.chat_template,
        f"give one of {', '.join(SPECIAL)}, or a Jinja file",
        f"data.source={data.source} needs a chat template and the tokenizer has none",
    )


def check_chat(model: ModelConfig, data: DataConfig, first: Sequence[tuple[str, str]] | None = None) -> None:
    """Refuses a chat template that is missing, broken, or cannot render the first conversation within its limits.

    With ``data.on_bad_sample=skip`` it has to render one of the first conversations.

    Args:
        first: the first conversations as lines of JSON, each with its origin; None for the first lines of
            ``data.paths``.

    Raises:
        ConfigError, DataError, ModelFolderError: what is wrong.
    """
    chosen, tokenizer_file = chosen_template(model, data), existing_file(model, data)
    text = None if chosen is None else chosen.text
    if text is None and tokenizer_file is not None:
        text = chat_template(tokenizer_file.parent)
    if text is None:
        raise no_template(data)
    template = compile_template(data, text, tokenizer_file.parent if tokenizer_file is not None else None)
    if first is None and data.paths[0].startswith(DATA):
        return  # checked after the download
    samples = samples_of(data.source)
    refused: DataError | None = None
    for line, origin in first if first is not None else _first_rows(data):
        try:
            if samples == "preferences":
                template.preference(line, origin, data.messages_column)
            elif samples == "unpaired":
                template.with_label(line, origin, data.messages_column)
            else:
                template.conversation(line, origin, data.messages_column, data.format)
            return
        except DataError as error:
            if data.on_bad_sample == "stop":
                raise DataError(f"{error}{OR_SKIP}") from error
            if isinstance(error.__cause__, TemplateLimit):
                raise  # each further row may take as long as the first
            refused = refused or error
    if refused is not None:
        raise refused


def _first_rows(data: DataConfig) -> Iterator[tuple[str, str]]:
    """First rows of ``data.paths`` with their origins, without those of unusable files."""
    paths = files.expand_paths(data.paths, "data.paths")
    unusable = unusable_files(paths) if data.on_bad_sample == "skip" else {}

    def read(path: Path) -> Iterator[tuple[str, str, int]]:
        return row_lines(path, nested=True)

    def make(line: str, origin: str, size: int) -> tuple[str, str]:
        return line, origin

    for row in islice(rows_of_files(paths, unusable, read, make), LOOKED_AT):
        if not isinstance(row, Fault):
            yield row
        elif data.on_bad_sample == "stop":
            raise DataError(f"{row.message}{OR_SKIP}")
