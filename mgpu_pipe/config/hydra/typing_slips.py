"""Finds what an editor, a web page, another language or a shell left in an override: characters that no key has."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata

from mgpu_pipe.errors import BadInputError, ConfigError

KEY = re.compile(r"[+~]*[A-Za-z_][\w./@:-]*", re.ASCII)
"""Words that may be meant as a key, with Hydra's prefixes."""
NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
DASHES = {chr(number): "-" for number in (*range(0x2010, 0x2016), 0x2212)}
TYPED = {
    **DASHES,
    **dict.fromkeys("\u2018\u2019\u201a\u201b\u2039\u203a", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"'),
}
"""Typographic marks and what the keyboard has for them."""


def typing_slip(argument: str) -> BadInputError | None:
    """Error of an override with typographic, wide or invisible characters, with JSON, or that is no override at all;
    None for any other. The value of a key keeps its letters."""
    key, equals, value = argument.partition("=")
    if equals and not (plain_key := _plain(key, is_key=True)).isascii():
        strange = next(letter for letter in plain_key if not letter.isascii())
        return BadInputError(f"{argument}: has {_name_letter(strange)} in its key; type the key again")
    plain = _plain(key if equals else argument, is_key=True) + (equals + _plain(value, is_key=False) if equals else "")
    if plain != argument:
        changed = (letter for letter in argument if _normalise(letter) != letter and letter not in plain)
        strange = next(changed, None) or next(letter for letter in argument if letter.isspace())
        fix = f"type {plain}" if plain.isascii() else "type it again on a keyboard"
        if (quoted := _quote(value)) and _normalise(key) == key:
            word = shlex.quote(f"{key}={quoted}")
            fix = f"quote the value, {word}" + ("" if "'" in plain or not plain.isascii() else f", or {fix}")
        problem = f"has {_name_letter(strange)}"
        return ConfigError(key, value, fix, problem) if equals else BadInputError(f"{argument}: {problem}; {fix}")
    if argument.startswith("{") or value.startswith(('{"', "{'")):
        fields = _json_object(value if not argument.startswith("{") else argument)
        if argument.startswith("{"):
            fix = " ".join(f"{name}={_override_text(entry)}" for name, entry in fields.items())
        else:
            fix = f"{key}={_override_text(fields)}"
        return BadInputError(
            f"{argument}: is JSON, and an override is KEY=VALUE; write {fix if fields else 'KEY={name:value}'}"
        )
    if not equals and not KEY.fullmatch(argument):
        return BadInputError(f"{argument}: is no override, which is KEY=VALUE; leave it out")
    return None


def _name_letter(letter: str) -> str:
    return f"U+{ord(letter):04X} ({unicodedata.name(letter, 'a character without a name').lower()})"


def _quote(value: str) -> str:
    """A text, or a list of texts, with quotes around what has typographic marks inside; empty for other values."""
    is_list = value.startswith("[") and value.endswith("]")
    texts = [text.strip() for text in value[1:-1].split(",")] if is_list else [value]
    strange = [text for text in texts if not set(text).isdisjoint(TYPED)]
    if (
        not strange
        or len(_marks(value)) < len(value)
        or any(mark in value for mark in "'\"{}\\")
        or any(text[0] in TYPED for text in strange)
    ):
        return ""
    if all(NUMBER.fullmatch(_normalise(text)) for text in strange):
        return ""
    quoted = ",".join(f'"{text}"' if text in strange else text for text in texts)
    return f"[{quoted}]" if is_list else quoted


def _marks(text: str) -> str:
    """Text with the keyboard's marks for typographic ones, without invisible characters."""
    return "".join("" if unicodedata.category(letter) == "Cf" else TYPED.get(letter, letter) for letter in text)


def _normalise(text: str) -> str:
    return unicodedata.normalize("NFKC", _marks(text))


def _plain(text: str, is_key: bool) -> str:
    """Text as a keyboard types it; in a value letters of other scripts stay."""
    marks, wide = _marks(text), _normalise(text)
    return wide.strip() if is_key or wide.isascii() else marks


def _json_object(text: str) -> dict[str, object]:
    """A JSON object, or Python's form of one; empty for anything else."""
    for quoted in (text, text.replace("'", '"')):
        try:
            value = json.loads(quoted)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _override_text(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_override_text(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_override_text, value)) + "]"
    return value if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value) else json.dumps(value)
