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
MODULES = "modules.json"
KNOWN = ("Transformer", "Pooling", "Normalize")
LIBRARY = "sentence_transformers."
"""Prefix of the types of sentence-transformers' modules. Modules of other types bring their maker's code."""
SHAPES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files of the longest text, in the order in which sentence-transformers looks for them."""
TRUNCATED = "truncate_dim"


def save_anew(folder: Path) -> str | None:
    """The fix for a folder without ``config.json`` whose modules put the model below; None for any other folder."""
    if not is_file(folder / MODULES):
        return None
    return f"save its modules anew: SentenceTransformer('{folder}').save_pretrained('<new folder>')"


@dataclass(frozen=True)
class SentenceModules:
    """How a folder makes a vector of a text.

    Attributes:
        pooling, normalize: see ``objective.pooling`` and ``objective.normalize``.
        prompts: text before every text, by kind.
        default_prompt: kind of the prompt where none is named; None for no prompt.
        max_tokens: tokens of a text, without the rest; None for as many as tokenizer and model allow.
        lower_case: whether texts are written small first.
        similarity: sentence-transformers' name of what compares two vectors.
    """

    pooling: str
    normalize: bool
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    similarity: str = "cosine"


def require_cosine_or_dot(modules: SentenceModules, folder: Path) -> None:
    """Raise BadInputError where the model of ``folder`` compares vectors neither by cosine nor by dot product."""
    if modules.similarity not in ("cosine", "dot"):
        reason = f"compares vectors by {modules.similarity}, not by cosine or dot product"
        raise BadInputError(f"{folder}: {reason}; use sentence-transformers")


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Settings of ``folder``; None where it has no list of modules.

    Raises:
        BadInputError: a file is damaged, or text_embedding has no such module or pooling.
    """
    place = folder / MODULES
    if not is_file(place):
        return None
    try:
        types = {str(entry["type"]): str(entry["path"]) for entry in _json(place)}
        paths = {kind.rpartition(".")[2]: path for kind, path in types.items()}
        strange = [kind for kind in types if not kind.startswith(LIBRARY)] or sorted(paths.keys() - set(KNOWN))
        settings: dict[str, Any] = {}
        if "Pooling" in paths:
            place = folder / Path(paths["Pooling"]).name / "config.json"
            settings = _json(place)
        pooling = _pooling(settings)
        place = folder / "config_sentence_transformers.json"
        texts = _json(place) if is_file(place) else {}
        prompts, default = dict(texts.get("prompts") or {}), texts.get("default_prompt_name")
        width, similarity = texts.get(TRUNCATED), str(texts.get("similarity_fn_name") or "cosine")
        place = next((folder / name for name in SHAPES if is_file(folder / name)), folder / SHAPES[0])
        shape = _json(place) if is_file(place) else {}
        longest, lower_case = shape.get("max_seq_length"), bool(shape.get("do_lower_case"))
        max_tokens = None if longest is None else int(longest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInputError(
            f"{place}: does not describe pooling or prompts; write it by sentence-transformers"
        ) from error
    strange = strange or ["folder without Pooling"] * ("Pooling" not in paths)
    strange = strange or [pooling] * (pooling not in POOLING.values())
    if any(prompts.values()) and settings.get("include_prompt") is False:
        strange.append("pooling without the prompt")
    if strange:
        fix = "measure it with sentence-transformers"
        raise BadInputError(f"{folder}: objective=text_embedding has no {strange[0]}; {fix}")
    if width is not None:
        fix = f"remove it from config_sentence_transformers.json, and encode by --size {width}"
        raise BadInputError(f"{folder}: {TRUNCATED}={width} is not read; {fix}")
    return SentenceModules(
        pooling,
        "Normalize" in paths,
        {str(kind): str(text) for kind, text in prompts.items()},
        None if default is None else str(default),
        max_tokens,
        lower_case,
        similarity,
    )


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _pooling(settings: dict[str, Any]) -> str:
    """The name of the pooling, the mean by default; several of them are joined by a plus sign."""
    start = "pooling_mode_"
    modes = [key.removeprefix(start) for key, value in settings.items() if key.startswith(start) and value is True]
    named = settings.get("pooling_mode") or modes or "mean"
    named = named if isinstance(named, str) else "+".join(map(str, named))
    return POOLING.get(named, named)
