"""Tokenizers of the SentencePiece kind, as Llama 2, Mistral, Gemma and Phi-3 have them.

A GGUF file gives each piece a score, and llama.cpp joins the pair whose piece has the highest; ``tokenizer.json`` lists
the pairs in the order in which they are joined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "\u2581"
"""Stands for a space in pieces."""
NORMAL, BYTE = 1, 6
"""Values of ``tokenizer.ggml.token_type``."""
NEVER = -1e9
"""Score of a piece that no pair makes."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def is_sentence_pieces(content: Mapping[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` is of this kind: pairs of characters, with bytes for characters that are unknown."""
    model = content["model"]
    return model.get("type", "BPE") == "BPE" and bool(model.get("byte_fallback"))


def begins_with_space(content: Mapping[str, Any]) -> bool | None:
    """Whether a space is put before a text; None where the tokenizer cuts texts as llama.cpp cannot."""
    normaliser, cutter = content.get("normalizer"), content.get("pre_tokenizer")
    steps = _steps(normaliser, "normalizers")
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if steps == [{"type": "Prepend", "prepend": SPACE}, marks] and cutter is None:
        return True
    if steps == [marks]:
        whole = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        return False if cutter in (None, whole) else None
    if not steps and cutter is not None and cutter.get("type") == "Metaspace" and cutter.get("replacement") == SPACE:
        scheme = cutter.get("prepend_scheme", "always")
        return None if cutter.get("split", True) else scheme in ("first", "always")
    return None


def _steps(step: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step[inside]) if step.get("type") == "Sequence" else [step]


def scores_of(texts: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """The score of each piece: minus the place of the first pair that makes it."""
    first: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        first.setdefault(left + right, place)
    return [-float(first[text]) if text in first else NEVER for text in texts]


def merges_of(texts: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[list[str]]:
    """The pairs that make each piece, the piece with the highest score first."""
    numbers = {text: number for number, text in enumerate(texts) if kinds[number] == NORMAL}
    pieces = sorted((-scores[number], number, text) for text, number in numbers.items() if len(text) > 1)
    merges = []
    for _, _, text in pieces:
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in numbers and pair[1] in numbers]
        merges += sorted(known, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    return [list(pair) for pair in merges]


def kind_of_piece(text: str, kind: int) -> int:
    """``kind``, or that of a byte."""
    return BYTE if kind == NORMAL and _BYTE.fullmatch(text) else kind


def tokenizer_parts(
    texts: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: str | None, prefix: bool
) -> dict[str, Any]:
    """Normaliser, decoder and model of the ``tokenizer.json``.

    Args:
        unknown: text of the unknown token.
        prefix: whether a space is put before a text.
    """
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, marks]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]},
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix")),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": merges_of(texts, scores, kinds),
        },
    }
