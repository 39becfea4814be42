"""Memory in which one document of 200 MB is prepared.

The text is the library sources of the running Python again and again, in one text file or in one row of JSON lines;
with an emoji a str takes four bytes a character. A tokenizer is trained on it, or one that takes the whole text for one
word (as Llama's does) is given. Each case is a new program; its memory and its processes' are added up every 50 ms.
``python -m benchmarks.memory.long_text_memory [megabytes]``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from tokenizers import Tokenizer, models, normalizers, trainers

from benchmarks.support import finish
from mgpu_pipe.data.files import stdlib_files
from mgpu_pipe.data.text.tokenizer_train import train_bpe

CASES = (
    ("text file with an emoji", "trained on it", 1.0),
    ("row of JSON", "byte-level", 1.0),
    ("text file", "byte-level", 1.0),
    ("text file", "trained on it", 1.0),
    ("text file", "whole text is one word", 0.1),
)
"""A document, its tokenizer, and its share of the size: one word of 200 MB takes an hour."""
FORMS = {
    "text file": ("text_files", "text.txt"),
    "text file with an emoji": ("text_files", "emoji.txt"),
    "row of JSON": ("jsonl", "text.jsonl"),
}
"""Data source and file of a form of document."""
_PREPARE = """
import sys
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.text.prepare_text import prepare
run = RunConfig()
run.model.config = {"vocab_size": 8192}
run.data.source, run.data.paths, run.data.tokenizer, run.data.cache_dir = sys.argv[1], [sys.argv[2]], *sys.argv[3:]
run.data.validation_fraction = 0.0
print(prepare(run).num_tokens)
"""


def write_texts(folder: Path, size: int) -> str:
    """A text file and a row of JSON of about ``size`` bytes each; returns some of the text."""
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files()]
    written, text = 0, list[str]()
    while written < size:
        one = texts[len(text) % len(texts)]
        text.append(one)
        written += len(one.encode())
    (folder / "text.txt").write_text("".join(text), encoding="utf-8")
    (folder / "emoji.txt").write_text("".join([*text, "\U0001f6a8"]), encoding="utf-8")
    (folder / "text.jsonl").write_text(json.dumps({"text": "".join(text)}) + "\n", encoding="utf-8")
    return "".join(texts[:100])


def write_tokenizers(folder: Path, text: str) -> None:
    """A byte-level tokenizer, and one whose only word is the whole text."""
    train_bpe([text], 8192, _made(folder / "byte-level"))
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["</s>"], max_token_length=12, limit_alphabet=500, show_progress=False
    )
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    tokenizer.save(str(_made(folder / "whole text is one word") / "tokenizer.json"))


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def measured(folder: Path, form: str, tokenizer: str) -> tuple[int, float, int]:
    """Bytes at the peak, seconds, and tokens of one case."""
    source, name = FORMS[form]
    chosen = "auto" if tokenizer == "trained on it" else str(folder / tokenizer)
    begun, peak = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", _PREPARE, source, str(folder / name), chosen, cache]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            while program.poll() is None:
                peak = max(peak, _resident(psutil.Process(program.pid)))
                time.sleep(0.05)
            assert program.returncode == 0, f"{form}, {tokenizer}"
            assert program.stdout is not None
            return peak, time.monotonic() - begun, int(program.stdout.read())


def _resident(process: psutil.Process) -> int:
    found = 0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            found += one.memory_info().rss
    return found


def main() -> None:
    megabytes = int(sys.argv[1]) if sys.argv[1:] else 200
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        for form, tokenizer, share in CASES:
            text = write_texts(folder, int(megabytes * share * 1_000_000))
            write_tokenizers(folder, text)
            peak, seconds, tokens = measured(folder, form, tokenizer)
            rows.append([form, tokenizer, megabytes * share, peak / 1e9, seconds, tokens])
            finish(
                "long_text_memory",
                f"Preparation of one document of {megabytes} MB",
                ["document", "tokenizer", "megabytes", "peak GB", "seconds", "tokens"],
                rows,
                "Peak of the resident memory of the program and its tokenising processes together.",
            )


if __name__ == "__main__":
    main()
