"""Settings of the vectors of a folder that sentence-transformers wrote, or an export for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_pipe.errors import BadInputError
from mgpu_pipe.system.local_files import is_file

POOLING = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last_token"}
"""Names of ``objective.pooling`` by sentence-transformers' own."""
KNOWN = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class SentenceModules:
    """How a folder makes a vector of a text.

    Attributes:
        pooling, normalize: see ``objective.pooling`` and ``objective.normalize``.
        prompts: text before every text, by kind.
        default_prompt: kind of the prompt where none is named; None for no prompt.
        max_tokens: tokens of a text, without the rest; None for as many as tokenizer and model allow.
        lower_case: whether texts are written small first.
    """

    pooling: str
    normalize: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Settings of ``folder``; None where it has no list of modules.

    Raises:
        BadInputError: a file is damaged, or text_embedding has no such module or pooling.
    """
    if not is_file(folder / "modules.json"):
        return None
    place = folder / "modules.json"
    try:
        paths = {str(entry["type"]).rpartition(".")[2]: str(entry["path"]) for entry in _json(place)}
        place = folder / Path(paths["Pooling"]).name / "config.json"
        settings = _json(place)
        pooling = _pooling(settings)
        place = folder / "config_sentence_transformers.json"
        texts = _json(place) if is_file(place) else {}
        prompts, default = dict(texts.get("prompts") or {}), texts.get("default_prompt_name")
        place = folder / "sentence_bert_config.json"
        shape = _json(place) if is_file(place) else {}
        longest, lower_case = shape.get("max_seq_length"), bool(shape.get("do_lower_case"))
        max_tokens = None if longest is None else int(longest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInputError(
            f"{place}: does not describe pooling or prompts; write it by sentence-transformers"
        ) from error
    strange = sorted(paths.keys() - set(KNOWN)) or [pooling] * (pooling not in POOLING.values())
    if any(prompts.values()) and settings.get("include_prompt") is False:
        strange.append("pooling without the prompt")
    if strange:
        fix = "measure it with sentence-transformers"
        raise BadInputError(f"{folder}: objective=text_embedding has no {strange[0]}; {fix}")
    return SentenceModules(
        pooling,
        "Normalize" in paths,
        {str(kind): str(text) for kind, text in prompts.items()},
        None if default is None else str(default),
        max_tokens,
        lower_case,
    )


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _pooling(settings: dict[str, Any]) -> str:
    """The name of the pooling; several of them are joined by a plus sign."""
    start = "pooling_mode_"
    modes = [key.removeprefix(start) for key, value in settings.items() if key.startswith(start) and value is True]
    named = str(settings.get("pooling_mode") or "+".join(modes))
    return POOLING.get(named, named)
