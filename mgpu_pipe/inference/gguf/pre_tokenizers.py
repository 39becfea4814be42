"""Names of pre-tokenizers in GGUF files, and what stands in ``tokenizer.json`` for each.

Source: llama.cpp's ``src/llama-vocab.cpp``, which quotes the patterns of the tokenizers it follows.
"""

from __future__ import annotations

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
