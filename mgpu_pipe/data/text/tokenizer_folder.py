"""Reads Hugging Face tokenizer folders: ``tokenizer.json``, special tokens and the chat template."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.data_sources import makes_tokens
from mgpu_pipe.config.hub import NAMED_TEMPLATES, local_folder, template_files
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.text.conversations import joined_templates
from mgpu_pipe.data.text.tokenizer_record import check_record
from mgpu_pipe.errors import ConfigError, MgpuError, ModelFolderError
from mgpu_pipe.system.local_files import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    check_folder,
    exists,
    is_file,
    is_folder,
    parse_json,
    read_bytes,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mgpu_pipe.data.text.render_chat import ChatTemplate

TOKENIZER, CONFIG, SPECIAL_TOKENS, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MODEL_VOCABULARY = "model_vocab_size"
"""Key in CONFIG of a tokenizer that this program trained: the vocabulary size of its model."""
USUAL_MASKS = ("[MASK]", "<mask>")
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
"""Files of a tokenizer; the last three belong to older formats."""


OLDER = ("vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Tokenizer files of formats before ``tokenizer.json``."""


def existing_file(model: ModelConfig, data: DataConfig) -> Path | None:
    """The ``tokenizer.json`` to use, None where one is made; ConfigError or ModelFolderError if it is missing."""
    chosen = data.tokenizer
    if chosen != "auto":
        path = local_folder(chosen, "data.tokenizer")
        file = path / TOKENIZER if is_folder(path) else path
        if not is_file(file):
            reason, fix = without_file(path) if is_folder(path) else ("no such file or folder", None)
            raise ConfigError("data.tokenizer", chosen, fix or f"give a folder with a {TOKENIZER}, or auto", reason)
        return file
    if not model.path:
        return None
    file = local_folder(model.path) / TOKENIZER
    if is_file(file):
        return file
    if makes_tokens(data.source):
        return None
    problem, fix = without_file(file.parent)
    fix = fix or "set data.tokenizer to the model's tokenizer"
    raise ModelFolderError(f"model.path={model.path}: {problem}; {fix}")


def without_file(folder: Path) -> tuple[str, str | None]:
    """Problem of a folder without ``tokenizer.json``, and its fix where it has a tokenizer of an older format."""
    older = next((name for name in OLDER if is_file(folder / name)), None)
    if older is None:
        return f"the folder has no {TOKENIZER}", None
    fix = "write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    return f"the folder keeps its tokenizer as {older}, without a {TOKENIZER}", fix


def chat_template(folder: Path) -> str | None:
    """Reads the chat template of a tokenizer folder: as in transformers ``tool_use`` where a conversation has tools,
    else the default one."""
    templates = named_templates(folder)
    default, with_tools = templates.get("default"), templates.get("tool_use")
    return default if default is None or with_tools is None else joined_templates(with_tools, default)


def named_templates(folder: Path) -> dict[str, str]:
    """Reads the chat templates of a tokenizer folder by name, from any of transformers' four places."""
    named = {Path(name).stem: _template_in(folder, name) for name in template_files(folder)}
    if is_file(folder / TEMPLATE):
        return {"default": _template_in(folder, TEMPLATE), **named}
    for name in ("chat_template.json", CONFIG):
        if is_file(folder / name):
            template = json_file(folder / name).get("chat_template")
            if isinstance(template, list):
                listed = {entry["name"]: entry["template"] for entry in template}
            else:
                listed = {"default": template}
            if isinstance(listed.get("default"), str):
                return {**listed, **named}
    return named


def list_templates(folder: Path, settings: dict[str, Any]) -> None:
    """Moves the chat templates of a folder with :data:`NAMED_TEMPLATES` into ``settings``, so that it is flat."""
    if not is_folder(folder / NAMED_TEMPLATES):
        return
    templates = named_templates(folder)
    settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    shutil.rmtree(folder / NAMED_TEMPLATES)
    for name in (TEMPLATE, "chat_template.json"):
        (folder / name).unlink(missing_ok=True)


def _template_in(folder: Path, name: str) -> str:
    try:
        return read_bytes(folder / name, MAX_CONFIG_BYTES, folder).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{folder / name}: is no text in UTF-8; put a whole copy in its place") from error


def chat_of(folder: Path, places: tuple[str, ...] | None = None) -> ChatTemplate | None:
    """Compiles the chat template of a tokenizer folder; None without one.

    Args:
        places: of the pictures, videos and recordings that the model takes; None for a place of each kind.

    Raises:
        ModelFolderError: it cannot be used.
    """
    source = chat_template(folder)
    if source is None:
        return None
    from jinja2 import TemplateError

    from mgpu_pipe.data.text.conversations import EVERY_PLACE
    from mgpu_pipe.data.text.render_chat import ChatTemplate
    from mgpu_pipe.data.text.template_limits import reason

    try:
        taken = EVERY_PLACE if places is None else places
        return ChatTemplate(source, special_tokens(folder), stop_tokens(folder), taken)
    except TemplateError as error:
        raise ModelFolderError(f"{folder}: its chat template cannot be used: {reason(error)}") from error


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens that a tokenizer folder names: ``bos_token``, ``eos_token`` and so on."""
    tokens: dict[str, str] = {}
    for name in (SPECIAL_TOKENS, CONFIG):
        settings = json_file(folder / name) if is_file(folder / name) else {}
        for key, value in settings.items():
            if isinstance(value, dict):
                value = value.get("content")
            if key.endswith("_token") and isinstance(value, str):
                tokens[key] = value
    return tokens


def mask_token_id(folder: Path) -> int | None:
    """Id of the mask token; None where the tokenizer has none."""
    named = special_tokens(folder).get("mask_token")
    ids = {token: number for number, token in token_texts(folder / TOKENIZER).items()}
    return next((ids[name] for name in ([named] if named else USUAL_MASKS) if name in ids), None)


def made_here(folder: Path) -> bool:
    """Whether this program trained the tokenizer of ``folder``."""
    return (folder / CONFIG).is_file() and MODEL_VOCABULARY in json_file(folder / CONFIG)


def stop_tokens(folder: Path) -> tuple[str, ...]:
    """Texts of the special tokens, any of which may end a turn."""
    added = json_file(folder / TOKENIZER).get("added_tokens") or []
    return tuple(entry["content"] for entry in added if entry.get("special"))


def token_differences(ours: Path, theirs: Path | None) -> list[str]:
    """Ids of different tokens of two folders, but for tokens that one adds; empty without a tokenizer.json."""
    if theirs is None or not all(is_file(folder / TOKENIZER) for folder in (ours, theirs)):
        return []
    a, b = token_texts(ours / TOKENIZER), token_texts(theirs / TOKENIZER)
    return [
        f"{number} is {a[number]!r} there and {b[number]!r} here"
        for number in sorted(a.keys() & b.keys())
        if a[number] != b[number]
    ]


def token_texts(file: Path) -> dict[int, str]:
    """Token of every id in a ``tokenizer.json``; a Unigram model lists them in order."""
    content = json_file(file, TOKENIZER)
    vocabulary = content["model"].get("vocab") or {}
    if isinstance(vocabulary, list):
        texts = {number: entry[0] for number, entry in enumerate(vocabulary)}
    else:
        texts = {number: token for token, number in vocabulary.items()}
    return {**texts, **{entry["id"]: entry["content"] for entry in content.get("added_tokens") or []}}


_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


def spare_tokens(file: Path, rows: int | None, template: str | None) -> dict[int, str]:
    """Added tokens of a ``tokenizer.json``, by id, that no text needs and for which a model of ``rows`` has no row.

    Published folders have some: Gemma 3's ``<image_soft_token>`` next to a model of text, padding tokens of
    fine-tunings. None is spare where the chat template or a sentence needs one that has no row.
    """
    texts, added = token_texts(file), json_file(file, TOKENIZER).get("added_tokens") or []
    beyond = {number: text for number, text in texts.items() if rows is not None and number >= rows}
    needed = {text for role, text in special_tokens(file.parent).items() if role in _ROLES}
    needed |= {text for text in beyond.values() if text in (template or "")}
    is_spare = beyond.keys() <= {entry["id"] for entry in added} and needed.isdisjoint(beyond.values())
    return beyond if is_spare else {}


def json_file(path: Path, name: str | None = None) -> dict[str, Any]:
    """Reads the JSON object in ``path``, of the kind ``name`` in :data:`FILES`; ModelFolderError if it is none."""
    try:
        raw = read_bytes(path, MAX_JSON_BYTES)
    except OSError as error:
        raise ModelFolderError(f"{path}: is not readable JSON: {error}") from error
    return json_object(raw, path, name)


def json_object(raw: bytes, path: Path, name: str | None = None) -> dict[str, Any]:
    """Parses ``raw``, the content of ``path``, for :func:`json_file`."""
    try:
        value = parse_json(raw, path)
    except ValueError as error:
        raise ModelFolderError(f"{path}: is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: is not a JSON object")
    check_record(path, value, name or path.name)
    return value


def load_tokenizer_file(file: Path) -> Tokenizer:
    """Loads a ``tokenizer.json`` of any name; ModelFolderError if it is no tokenizer."""
    from tokenizers import Tokenizer

    if not exists(file):
        problem, fix = without_file(file.parent)
        raise ModelFolderError(f"{file.parent}: {problem}; {fix or 'copy it from the model'}")
    json_file(file, TOKENIZER)
    with refuse_library_errors(f"{file}: is not a tokenizer"):
        return Tokenizer.from_file(str(file))


def plain_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a folder without padding and truncation; raises like :func:`load_tokenizer_file`."""
    tokenizer = load_tokenizer_file(folder / TOKENIZER)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@contextmanager
def refuse_library_errors(what: str) -> Iterator[None]:
    """Turns any error of the tokenizers library, also its BaseException, into a ModelFolderError that begins with
    ``what``."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, MgpuError | MemoryError):
            raise
        raise ModelFolderError(f"{what}: {' '.join(str(error).split())}") from error


_PROBE = "a  b\n\n 12345 it's{special}[c] D\u00e9j\u00e0 \u65e5\u672c{special} e\t{special}f"
"""A text of what tokenizers disagree on: spaces, line breaks, numbers, accents, and words next to special tokens."""


def follows_file(tokenizer: Any, folder: Path) -> bool:
    """Whether a class of transformers gives the file's ids; some (LlamaTokenizer) replace its rules."""
    if not is_file(folder / TOKENIZER):
        return True
    file = load_tokenizer_file(folder / TOKENIZER)
    file.no_padding()  # which transformers leaves out too, unless a call asks for it
    file.no_truncation()
    probes = [_PROBE.format(special=text) for text in {"", *special_tokens(folder).values()}]
    return all(
        tokenizer(text, add_special_tokens=False).input_ids == file.encode(text, add_special_tokens=False).ids
        for text in probes
    )


def check_tokenizer(folder: Path) -> None:
    """Refuses a folder with entries that are no plain files (NotPlainError) or unreadable JSON (ModelFolderError)."""
    check_folder(folder)
    for name in FILES:
        if name.endswith(".json") and is_file(folder / name):
            json_file(folder / name)


def end_texts(folder: Path) -> None:
    """Makes the tokenizer of ``folder`` add its end-of-text token to each text, as in training."""
    from tokenizers import processors

    file = folder / TOKENIZER
    tokenizer, end = load_tokenizer_file(file), special_tokens(folder).get("eos_token")
    number = None if end is None else tokenizer.token_to_id(end)
    if number is None or tokenizer.encode("a").ids[-1:] == [number]:
        return
    ending = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, number)])
    before = tokenizer.post_processor
    tokenizer.post_processor = ending if before is None else processors.Sequence([before, ending])
    tokenizer.save(str(file))


def token_bytes(folder: Path, vocab_size: int) -> list[int] | None:
    """Bytes of each token's text, 0 for special tokens; None where the tokenizer is not byte-level.

    A byte-level token has a character for each byte; see ``bytes_to_unicode`` of GPT-2's encoder.

    Args:
        folder: of a ``tokenizer.json``.
    """
    file = folder / "tokenizer.json"
    recorded = json_file(file)
    if "ByteLevel" not in _types(recorded.get("decoder")):
        return None
    added = {token["id"]: token for token in recorded.get("added_tokens") or ()}
    lengths = [0] * vocab_size
    for number, text in token_texts(file).items():
        if number in added:
            lengths[number] = 0 if added[number].get("special") else len(text.encode())
        elif number < vocab_size:
            lengths[number] = len(text)
    return lengths


def _types(part: Any) -> list[str]:
    """Types of a part of ``tokenizer.json``, and of the parts of a sequence."""
    if not isinstance(part, dict):
        return []
    return [str(part.get("type")), *(name for inner in part.get("decoders") or () for name in _types(inner))]
