"""An answer on the terminal while it is written."""

from __future__ import annotations

import sys

from transformers import PreTrainedTokenizerBase, TextStreamer

from mgpu_pipe.inference.generation import without_controls


class Spoken(TextStreamer):
    """Prints each word of an answer as it is whole, without the prompt and special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        shown = without_controls(text) if sys.stdout.isatty() else text
        print(shown, flush=True, end="\n" if stream_end else "")
