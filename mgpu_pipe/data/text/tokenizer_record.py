"""Checks the types in a tokenizer folder's JSON files: a valid JSON file may not be a tokenizer's.

Only entries that this program and its libraries need are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import ModelFolderError

LARGEST_ID = 2**31 - 1
"""The libraries keep ids in 32 bits."""
REPLACE = "; put a whole copy of the file in its place"
Test = Callable[[object], bool]


def _id(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_ID


def _number(value: object) -> bool:
    return (type(value) is int and abs(value) < 1 << 100) or (isinstance(value, float) and math.isfinite(value))


def _text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _truth(value: object) -> bool:
    return isinstance(value, bool)


def _none_or(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _token(value: object) -> bool:
    """A special token: its text, or an object with it."""
    return _text(value) or (isinstance(value, dict) and _text(value.get("content")))


def _tokens(value: object) -> bool:
    return isinstance(value, list) and all(map(_token, value))


def _named_tokens(value: object) -> bool:
    return _tokens(value) or (isinstance(value, dict) and all(map(_token, value.values())))


def _vocabulary(value: object) -> bool:
    """Ids by text, each once; or pairs of a text and a score, in order (Unigram)."""
    if isinstance(value, dict):
        ids = value.values()
        return all(map(_id, ids)) and len(set(ids)) == len(ids) and all(map(_text, value))
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and _text(pair[0]) and _number(pair[1]) for pair in value
    )


def _merges(value: object) -> bool:
    return isinstance(value, list) and all(
        _text(pair) or (isinstance(pair, list) and len(pair) == 2 and all(map(_text, pair))) for pair in value
    )


def _is_added(value: object) -> bool:
    """Tokens added to the vocabulary, each with an id and a text."""
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    if not isinstance(value, list):
        return False
    texts: dict[int, str] = {}
    for entry in value:
        if not (isinstance(entry, dict) and _id(entry.get("id")) and _text(entry.get("content")) and entry["content"]):
            return False
        if any(flag in entry and not _truth(entry[flag]) for flag in flags):
            return False
        if texts.setdefault(entry["id"], entry["content"]) != entry["content"]:
            return False
    return True


def _added_by_id(value: object) -> bool:
    return isinstance(value, dict) and all(
        number.isascii() and number.isdigit() and len(number) < 11 and _id(int(number)) and isinstance(token, dict)
        and _token(token)
        for number, token in value.items()
    )  # fmt: skip


def _template(value: object) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(entry, dict) and _text(entry.get("name")) and _text(entry.get("template")) for entry in value
        )
    return _text(value)


def _object(value: object) -> bool:
    return isinstance(value, dict)


Fields = Mapping[str, tuple[Test, str]]
_ID = f"an id from 0 to {LARGEST_ID}"
_TOKENIZER: Fields = {
    "model": (_object, "an object"),
    "added_tokens": (_none_or(_is_added), "a list of objects, each with its own id and a text as content"),
    **dict.fromkeys(
        ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"),
        (_none_or(_object), "an object or null"),
    ),
}
_MODEL: Fields = {
    "vocab": (_none_or(_vocabulary), f"an object that gives each text {_ID}, or a list of pairs of text and number"),
    "merges": (_none_or(_merges), "a list of pairs of texts"),
    "unk_token": (_none_or(_text), "a text or null"),
    "unk_id": (_none_or(_id), f"{_ID}, or null"),
    "type": (_none_or(_text), "a text"),
}
_SETTINGS: Fields = {
    "chat_template": (_none_or(_template), "a text, or a list of objects with a name and a template"),
    "added_tokens_decoder": (_none_or(_added_by_id), "an object that gives ids objects with a text as content"),
    "additional_special_tokens": (_none_or(_named_tokens), "a list of texts"),
    "extra_special_tokens": (_none_or(_named_tokens), "a list or an object of texts"),
    "model_max_length": (_none_or(_number), "a number"),
    **dict.fromkeys(("tokenizer_class", "padding_side", "truncation_side"), (_none_or(_text), "a text")),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space"), (_none_or(_truth), "true or false")),
}
_SPECIAL = "_token"
_RECORDS: dict[str, Fields] = {
    "tokenizer.json": _TOKENIZER,
    "tokenizer_config.json": _SETTINGS,
    "special_tokens_map.json": {"additional_special_tokens": _SETTINGS["additional_special_tokens"]},
    "chat_template.json": {"chat_template": _SETTINGS["chat_template"]},
}


def check_record(path: Path, value: Mapping[str, Any], file: str) -> None:
    """Refuses the first wrong entry in a tokenizer's ``file`` by ModelFolderError; ignores other names."""
    if file in ("added_tokens.json", "vocab.json"):
        for text, number in value.items():
            if not _id(number):
                raise _wrong(path, text, _ID)
        return
    for name, (fits, kind) in _RECORDS.get(file, {}).items():
        if name in value and not fits(value[name]):
            raise _wrong(path, name, kind)
    if file == "tokenizer.json":
        _check_model(path, value)
    elif file in _RECORDS:
        for name, token in value.items():
            if name.endswith(_SPECIAL) and not name.startswith("add_") and not _none_or(_token)(token):
                raise _wrong(path, name, "a text, or an object with a text as content")


def _check_model(path: Path, value: Mapping[str, Any]) -> None:
    model = value.get("model")
    if not isinstance(model, dict):
        raise _wrong(path, "model", "an object")
    for name, (fits, kind) in _MODEL.items():
        if name in model and not fits(model[name]):
            raise _wrong(path, f"model.{name}", kind)
    vocabulary, unknown = model.get("vocab") or {}, model.get("unk_id")
    if isinstance(vocabulary, list) and unknown is not None and unknown >= len(vocabulary):
        raise _wrong(path, "model.unk_id", "an id of its vocabulary")


def _wrong(path: Path, name: str, kind: str) -> ModelFolderError:
    return ModelFolderError(f"{path}: {name!r} has to be {kind}{REPLACE}")
