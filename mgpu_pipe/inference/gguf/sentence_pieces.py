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
MAX_PIECE, MAX_CHARACTERS = 1024, 1 << 26
"""Most characters of a piece, and of all pairs together; those of the largest vocabularies take about 1 << 23."""
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
    """The pairs that make each piece, the piece with the highest score first.

    Raises:
        ValueError: a piece, or all pairs together, are longer than any tokenizer's.
    """
    numbers = {text: number for number, text in enumerate(texts) if kinds[number] == NORMAL}
    pieces = sorted((-scores[number], number, text) for text, number in numbers.items() if len(text) > 1)
    longest = max((len(text) for _, _, text in pieces), default=0)
    if longest > MAX_PIECE:
        raise ValueError(f"has a piece of {longest} characters, and {MAX_PIECE} are the most")
    merges: list[list[str]] = []
    characters = 0
    for _, _, text in pieces:
        known = []
        for cut in range(1, len(text)):
            left, right = numbers.get(text[:cut]), numbers.get(text[cut:])
            if left is not None and right is not None:
                known.append((left, right))
        merges += [[texts[left], texts[right]] for left, right in sorted(known)]
        characters += len(text) * len(known)
        if characters > MAX_CHARACTERS:
            raise ValueError(f"has pieces whose pairs take more than {MAX_CHARACTERS} characters")
    return merges


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
