"""``python -m mgpu_pipe.inference.check_gguf FILE DTYPE`` checks that a GGUF file gives the logits of the probe.

The probe comes on stdin. This runs in a fresh process and prints the difference by every reader that is there, as one
JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load

from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, load_tokenizer_file
from mgpu_pipe.errors import print_line
from mgpu_pipe.inference.accuracy import relative_difference
from mgpu_pipe.inference.export_gguf import SAMPLE
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.libllama import LlamaLibrary, find_library
from mgpu_pipe.inference.gguf.model_metadata import FREQUENCIES, model_type_of
from mgpu_pipe.inference.gguf.read_tokenizer import write_tokenizer_folder
from mgpu_pipe.inference.import_gguf import open_gguf
from mgpu_pipe.inference.model_arguments import silence_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOLERANCE = 1e-5
"""Largest difference between two programs that compute in fp32 with the same values, relative to the largest logit."""
LLAMA_CPP_TOLERANCE = 1e-4
"""The same for llama.cpp and a file in fp32."""
TABLE_TOLERANCE = 5e-3
"""The same where llama.cpp looks its activation function up in a table of fp16: gpt2 and gemma3."""
Result = tuple[str, torch.Tensor, float]


def main(file: Path, dtype: str) -> int:
    inputs = load(sys.stdin.buffer.read())
    silence_transformers()
    differences = {}
    with tempfile.TemporaryDirectory() as scratch:
        problem = _compare_tokens(file, Path(scratch), inputs["sample"].tolist())
        if problem:
            print_line(problem, file=sys.stderr)
            return 1
        for reader, logits, tolerance in _results(file, Path(scratch), inputs["input_ids"], dtype):
            difference = relative_difference(logits, inputs["logits"])
            if not difference <= tolerance:
                print_line(f"logits by {reader} differ by {difference:.1e} of the largest", file=sys.stderr)
                return 1
            differences[reader] = difference
    print_line(json.dumps(differences))
    return 0


def _results(file: Path, scratch: Path, ids: torch.Tensor, dtype: str) -> Iterator[Result]:
    """Name of a reader, its logits, and the largest difference; one reader's model is in memory at a time."""
    logits, config = _read_here(file, scratch, ids)
    yield "this program", logits, TOLERANCE
    header = GgufFile(file)
    if transformers_reads(header):
        yield "transformers", _read_by_transformers(file, config, ids), TOLERANCE
    library = find_library()
    if library is not None:
        architecture = header.metadata["general.architecture"]
        tolerance = TABLE_TOLERANCE if architecture in ("gpt2", "gemma3") else LLAMA_CPP_TOLERANCE
        if dtype != "fp32":  # it rounds activations too, which is reported and not judged
            tolerance = float("inf")
        yield "llama.cpp", LlamaLibrary(library, file).logits(ids), tolerance


@torch.no_grad()
def _read_here(file: Path, scratch: Path, ids: torch.Tensor) -> tuple[torch.Tensor, PretrainedConfig]:
    """Logits by this program's reader, and the settings that it reads."""
    from mgpu_pipe.models.build import materialise_empty

    stored = open_gguf(file, scratch)
    model: Any = materialise_empty(stored.model, "cpu")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(stored.read(name, torch.float32))
    return model.eval()(ids, use_cache=False).logits, model.config


@torch.no_grad()
def _read_by_transformers(file: Path, config: PretrainedConfig, ids: torch.Tensor) -> torch.Tensor:
    """Logits by transformers' reader of tensors; its reader of settings leaves out some that are not their defaults."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, config=config, dtype=torch.float32, local_files_only=True
    )
    logits: torch.Tensor = model.eval()(ids, use_cache=False).logits
    return logits


def transformers_reads(file: GgufFile) -> bool:
    """Whether transformers' reader of GGUF knows all that the file uses: no mixture as llama, no scaled rotations."""
    scales = any(key.endswith("rope.scaling.type") for key in file.metadata)
    return model_type_of(file) != "mixtral" and FREQUENCIES not in file.tensors and not scales


def _compare_tokens(file: Path, scratch: Path, expected: list[int]) -> str:
    """Compare the token ids of the sample; returns the problem, or an empty string."""
    write_tokenizer_folder(GgufFile(file), scratch)
    ids = {"this program": load_tokenizer_file(scratch / TOKENIZER).encode(SAMPLE).ids}
    library = find_library()
    if library is not None:
        ids["llama.cpp"] = list(LlamaLibrary(library, file).tokenize(SAMPLE))
    different = [reader for reader, listed in ids.items() if listed != expected]
    return f"{different[0]} cuts the text {SAMPLE!r} into other tokens" if different else ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
