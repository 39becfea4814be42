"""Kinds of tokenizers in GGUF files: pre-tokenizers of byte-level BPE by name, and the SentencePiece kind.

Llama 2, Mistral, Gemma and Phi-3 have the latter. A GGUF file gives each piece a score, and llama.cpp joins the pair
whose piece has the highest; ``tokenizer.json`` lists the pairs in the order in which they are joined. Source of names
and patterns: llama.cpp's ``src/llama-vocab.cpp``, which quotes the tokenizers that it follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Steps that cut a text into words before byte-pair merges.

    Attributes:
        digits: whether each digit is a word.
        pattern: regular expression of a word; None: GPT-2's, which ByteLevel brings.
        ignores_merges: whether a word of the vocabulary is one token without merges.
    """

    digits: bool = False
    pattern: str | None = None
    ignores_merges: bool = False

    def steps(self) -> list[dict[str, Any]]:
        """The steps as ``tokenizer.json`` has them."""
        listed: list[dict[str, Any]] = []
        if self.digits:
            listed.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            listed.append(
                {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
            )
        use_regex = self.pattern is None
        return [*listed, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}]


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(pattern=_LLAMA3, ignores_merges=True),
    "smaug-bpe": PreTokenizer(pattern=_LLAMA3),
    "qwen2": PreTokenizer(pattern=_QWEN2),
    "tekken": PreTokenizer(pattern=_TEKKEN, ignores_merges=True),
}
"""By the value of ``tokenizer.ggml.pre``."""
OTHER_NAMES = {
    **dict.fromkeys(("phi-2", "olmo", "mpt", "jais"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    **dict.fromkeys(("dbrx",), "smaug-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), "qwen2"),
}


def same_steps(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two lists of steps cut every text alike; ``trim_offsets`` moves offsets only."""

    def without_offsets(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]

    return without_offsets(first) == without_offsets(second)


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
