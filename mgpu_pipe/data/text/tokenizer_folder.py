"""What a Hugging Face tokenizer folder says besides its ``tokenizer.json``: special tokens and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, MAX_JSON_BYTES, check_folder, parse_json, read_bytes
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import ConfigError, ModelFolderError

if TYPE_CHECKING:
    from mgpu_pipe.data.text.chat import ChatTemplate

TOKENIZER, CONFIG, SPECIAL_TOKENS, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MODEL_VOCABULARY = "model_vocab_size"
"""In CONFIG, of a tokenizer that this program trained: the vocabulary of the model that it was trained for."""
FILES = (
    TOKENIZER,
    CONFIG,
    SPECIAL_TOKENS,
    TEMPLATE,
    "chat_template.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files that belong to a tokenizer; the last three are what older ones were kept in."""


def existing_file(config: RunConfig) -> Path | None:
    """The ``tokenizer.json`` to use, or None where one is to be made.

    Raises:
        ConfigError, ModelFolderError: it is missing.
    """
    chosen = config.data.tokenizer
    if chosen != "auto":
        path = local_folder(chosen, "data.tokenizer")
        file = path / TOKENIZER if path.is_dir() else path
        if not file.is_file():
            reason = f"the folder has no {TOKENIZER}" if path.is_dir() else "no such file or folder"
            raise ConfigError("data.tokenizer", chosen, f"give a folder with a {TOKENIZER}, or auto", reason)
        return file
    if not config.model.path:
        return None
    file = local_folder(config.model.path) / TOKENIZER
    if file.is_file():
        return file
    if config.data.source == "synthetic":
        return None
    raise ModelFolderError(
        f"model.path={config.model.path}: the folder has no {TOKENIZER}; set data.tokenizer to the model's tokenizer"
    )


def chat_template(folder: Path) -> str | None:
    """The chat template of a tokenizer folder, in any of the three places where transformers keeps it."""
    if (folder / TEMPLATE).is_file():
        return read_bytes(folder / TEMPLATE, MAX_CONFIG_BYTES).decode("utf-8")
    for name in ("chat_template.json", CONFIG):
        if (folder / name).is_file():
            found = json_file(folder / name).get("chat_template")
            if isinstance(found, list):
                found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
            if isinstance(found, str):
                return found
    return None


def chat_of(folder: Path) -> ChatTemplate | None:
    """The compiled chat template of a tokenizer folder, where it has one.

    Raises:
        ModelFolderError: it cannot be used.
    """
    source = chat_template(folder)
    if source is None:
        return None
    from jinja2 import TemplateError

    from mgpu_pipe.data.text.chat import ChatTemplate
    from mgpu_pipe.data.text.template_limits import reason

    try:
        return ChatTemplate(source, special_tokens(folder), stop_tokens(folder))
    except TemplateError as error:
        raise ModelFolderError(f"{folder}: its chat template cannot be used: {reason(error)}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and the like, as a tokenizer folder names them."""
    found: dict[str, str] = {}
    for name in (SPECIAL_TOKENS, CONFIG):
        settings = json_file(folder / name) if (folder / name).is_file() else {}
        for key, value in settings.items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def stop_tokens(folder: Path) -> tuple[str, ...]:
    """The texts of the special tokens, any of which may end a turn."""
    added = json_file(folder / TOKENIZER).get("added_tokens") or []
    return tuple(entry["content"] for entry in added if entry.get("special"))


def token_differences(one: Path, other: Path | None) -> list[str]:
    """Ids that stand for different tokens in two tokenizer folders; none where either keeps no tokenizer.json.

    A tokenizer that only adds tokens to another gives no difference.
    """
    if other is None or not all((folder / TOKENIZER).is_file() for folder in (one, other)):
        return []
    a, b = _tokens(one), _tokens(other)
    return [
        f"{number} is {a[number]!r} there and {b[number]!r} here"
        for number in sorted(a.keys() & b.keys())
        if a[number] != b[number]
    ]


def _tokens(folder: Path) -> dict[int, str]:
    """The token of every id; a Unigram model lists them in order."""
    content = json_file(folder / TOKENIZER)
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        found = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    else:
        found = {int(number): token for token, number in vocabulary.items()}
    return {**found, **{int(entry["id"]): entry["content"] for entry in content.get("added_tokens") or []}}


def json_file(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ModelFolderError: it cannot be read, or is something else.
    """
    try:
        value = parse_json(read_bytes(path, MAX_JSON_BYTES), path)
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: is not a JSON object")
    return value


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder that holds a link or a pipe, or JSON that cannot be read.

    Raises:
        NotPlainError: something in it is no plain file of its own.
        ModelFolderError: one of :data:`FILES` cannot be read.
    """
    check_folder(folder)
    for name in FILES:
        if name.endswith(".json") and (folder / name).is_file():
            json_file(folder / name)


def end_texts(folder: Path) -> None:
    """Let the tokenizer of ``folder`` end each text with its end-of-text token, as the texts in training were ended."""
    from tokenizers import Tokenizer, processors

    file = folder / TOKENIZER
    tokenizer, end = Tokenizer.from_file(str(file)), special_tokens(folder).get("eos_token")
    number = None if end is None else tokenizer.token_to_id(end)
    if number is None or tokenizer.encode("a").ids[-1:] == [number]:
        return
    ending = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, number)])
    before = tokenizer.post_processor
    tokenizer.post_processor = ending if before is None else processors.Sequence([before, ending])
    tokenizer.save(str(file))
