"""Writes a run's weights as a GGUF file with a Modelfile, and checks the file before the final rename."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, load_tokenizer_file
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.inference.accuracy import Accuracy, measure_accuracies
from mgpu_pipe.inference.check_gguf import LIBRARY_VARIABLE, SAMPLE, find_library, quantise
from mgpu_pipe.inference.export_folder import check_target, copy_tokenizer, put_in_place, working_folder
from mgpu_pipe.inference.gguf import FILE
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.gguf_tokenizer import describe_tokenizer
from mgpu_pipe.inference.gguf.model_metadata import frequency_divisors, metadata_of
from mgpu_pipe.inference.gguf.modelfile import write_modelfile
from mgpu_pipe.inference.gguf.write import KINDS, GgufDtype, GgufLayout, file_bytes, lay_out, rounded_reader, write_gguf
from mgpu_pipe.inference.import_weights import open_gguf
from mgpu_pipe.inference.model_card import write_card
from mgpu_pipe.inference.model_folder import merge_stored
from mgpu_pipe.inference.open import ReadTensor, StoredModel
from mgpu_pipe.inference.streamed_weights import probe, streamed_logits
from mgpu_pipe.models.weights.model_files import write_configuration
from mgpu_pipe.system.child_process import bound


@dataclass(frozen=True)
class GgufReport:
    """Figures of a finished export.

    Attributes:
        nbytes: of the file.
        accuracies: of fp32 and the file's type, or of all types.
        readers: differences of the readers that were tried, by name, relative to the largest logit.
        note: about the Modelfile; may be empty.
    """

    nbytes: int
    accuracies: tuple[Accuracy, ...]
    readers: dict[str, float]
    note: str


def export_gguf(
    stored: StoredModel, out: Path, dtype: GgufDtype | Literal["q4_k"], force: bool = False, compare: bool = False
) -> GgufReport:
    """Write the folder ``out`` with a GGUF file and a Modelfile; an existing one stays until the new one is checked.

    This process holds one weight at a time, and computes the expected logits block by block. A fresh process reads the
    file and compares them, by transformers' reader and by llama.cpp's library where these can.

    Args:
        force: replace an existing model folder.
        compare: measure all types, and not only fp32 and ``dtype``.

    Raises:
        BadInputError: ``out`` must not be replaced, or the family or its tokenizer has no place in such a file.
        MgpuError: the file does not give the same logits, or cannot be written.
    """
    if dtype == "q4_k":
        _require_library()
    check_target(out, force)
    stored = merge_stored(stored)
    layout = lay_out(stored.model)
    metadata = metadata_of(stored.model.config)  # without a name: llama.cpp treats some names' tokens differently
    with working_folder(out) as partial, working_folder(out, ".tokenizer") as scratch:
        check_target(out, force)
        try:
            write_configuration(stored.model, scratch, torch.float32, stored.maker)
            copy_tokenizer(stored, scratch)
            tokens = describe_tokenizer(
                scratch if stored.tokenizer_folder is not None else None, stored.model.config.vocab_size
            )
            context = metadata[f"{layout.family.architecture}.context_length"]
            note = write_modelfile(scratch, FILE, partial, context, tokens["tokenizer.ggml.add_bos_token"])
            entries = {**metadata, **tokens}
            rounded = _write(stored, layout, dtype, partial / FILE, scratch, entries, frequency_divisors(stored.model))
            kinds: Iterable[GgufDtype] = KINDS if compare else ("fp32",)
            dtypes: dict[str, tuple[int, ReadTensor]] = {name: _rounded(stored, layout, name) for name in kinds}
            dtypes[dtype] = rounded
            readers = _check(stored, rounded[1], dtype, partial / FILE, scratch)
            accuracies = tuple(measure_accuracies(stored, dtypes))
            nbytes = (partial / FILE).stat().st_size
            write_card(stored, partial, out.name, dtype, "gguf")
            put_in_place(partial, out)
        except OSError as error:
            raise MgpuError(f"--out={out}: writing failed ({error}); free some space and try again") from error
    return GgufReport(nbytes, accuracies, readers, note)


def _require_library() -> Path:
    """The folder of llama.cpp's library.

    Raises:
        BadInputError: the library is not installed.
    """
    folder = find_library()
    if folder is None:
        fix = f"pip install llama-cpp-python, or name its folder by {LIBRARY_VARIABLE}; or run llama-quantize on fp16"
        raise BadInputError(f"--dtype=q4_k: needs llama.cpp's library; {fix}")
    return folder


def _rounded(stored: StoredModel, layout: GgufLayout, dtype: GgufDtype) -> tuple[int, ReadTensor]:
    """Bytes of all tensors of a file of ``dtype``, and a reader of the weights as it rounds them."""
    return file_bytes(layout, dtype), rounded_reader(layout, stored.read, dtype)


def _write(
    stored: StoredModel,
    layout: GgufLayout,
    dtype: GgufDtype | Literal["q4_k"],
    file: Path,
    scratch: Path,
    metadata: Mapping[str, Any],
    divisors: Mapping[str, torch.Tensor],
) -> tuple[int, ReadTensor]:
    """Write ``file``; returns the same as :func:`_rounded`. llama.cpp's library makes q4_k of a file in fp32."""
    if dtype != "q4_k":
        write_gguf(layout, stored.read, file, dtype, metadata, divisors)
        return _rounded(stored, layout, dtype)
    write_gguf(layout, stored.read, scratch / FILE, "fp32", metadata, divisors)
    quantise(_require_library(), scratch / FILE, file)
    again = scratch / "again"
    again.mkdir()
    return sum(entry.nbytes for entry in GgufFile(file).tensors.values()), open_gguf(file, again).read


def _check(stored: StoredModel, read: ReadTensor, dtype: str, file: Path, tokenizer: Path) -> dict[str, float]:
    """Read the file in a fresh process, compare logits and token ids with the run's; the differences by reader.

    Args:
        read: reads the weights as the file rounds them.
    """
    inputs = probe(stored.model)
    rounded = streamed_logits(stored.model, read, inputs, torch.float32)
    sample = torch.tensor(load_tokenizer_file(tokenizer / TOKENIZER).encode(SAMPLE).ids)
    done = subprocess.run(
        bound(python_module("mgpu_pipe.inference.check_gguf", str(file.absolute()), dtype)),
        input=save({"input_ids": inputs["input_ids"], "logits": rounded.contiguous(), "sample": sample}),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        problem = _problem(done.stderr.decode(errors="replace"), file)
        raise MgpuError(f"the GGUF file failed its check and was removed: {problem}")
    differences: dict[str, float] = json.loads(done.stdout.decode().splitlines()[-1])
    return differences


def _problem(messages: str, file: Path) -> str:
    """The last line of ``messages``; of an error about ``file`` without its name and its fix, which the user lacks."""
    last = (messages.strip().splitlines() or ["no message"])[-1]
    _, is_about_file, problem = last.partition(f"--from={file.absolute()}: ")
    return problem.rpartition("; ")[0] or problem if is_about_file else last
