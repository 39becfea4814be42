"""``python -m mgpu_pipe.inference.check_gguf FILE DTYPE`` checks that a GGUF file gives the logits of the probe.

The probe comes on stdin. This runs in a fresh process and prints the difference by every reader that is there, as one
JSON object.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load

from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER, load_tokenizer_file
from mgpu_pipe.errors import MgpuError, print_line
from mgpu_pipe.inference.accuracy import relative_difference
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.gguf_tokenizer import write_tokenizer_folder
from mgpu_pipe.inference.gguf.model_metadata import FREQUENCIES, model_type_of
from mgpu_pipe.inference.import_weights import open_gguf
from mgpu_pipe.inference.model_arguments import silence_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


SAMPLE = "The year 2024 isn't over:\n\n\tx = [1, 22, 333]  # naïve — 日本\n"
"""Text whose token ids are compared."""
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


LIBRARY_VARIABLE = "MGPU_PIPE_LIBLLAMA"
"""Environment variable with the folder of ``libllama.so`` and ggml's libraries."""
_LLAMA, _GGML = "libllama.*so", "libggml.*so"
"""File names, in some packages with a version before the suffix."""
_F16_CACHE, _F32 = 1, 0
"""Numbers of ``ggml_type``: the default of both caches, and fp32."""
_AUTOMATIC = b"\xff" * 16
"""Four choices that are left to the library; the last is flash attention, which computes in fp16."""
_Q4_K_M = 15
"""Number of ``llama_ftype``."""
_POINTERS = b"\0" * 16
"""Two null pointers, which stand before the types of the caches and after them."""


def find_library() -> Path | None:
    """The folder with ``libllama*.so``: that of the environment variable, else llama-cpp-python's; None without one."""
    named = os.environ.get(LIBRARY_VARIABLE)
    package = importlib.util.find_spec("llama_cpp")
    places = [Path(named)] if named else []
    if package is not None and package.submodule_search_locations:
        places += [Path(place) / "lib" for place in package.submodule_search_locations]
    return next((place for place in places if any(place.glob(_LLAMA))), None)


class _Parameters(ctypes.Structure):
    """A structure that is passed by value, at least as large as the library's."""

    _fields_ = (("raw", ctypes.c_byte * 512),)


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LogCallback
def _drop_log(level: int, text: bytes, data: object) -> None:
    """Drops what the library logs."""


def load_library(folder: Path) -> ctypes.CDLL:
    """llama.cpp's library, which logs nothing."""
    ggml, library = (ctypes.CDLL(str(min(folder.glob(pattern))), ctypes.RTLD_GLOBAL) for pattern in (_GGML, _LLAMA))
    _declare(library)
    library.llama_log_set(_drop_log, None)
    if hasattr(ggml, "ggml_backend_load_all_from_path"):
        ggml.ggml_backend_load_all_from_path(ctypes.c_char_p(os.fsencode(folder)))
    library.llama_backend_init()
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, number, by_value = ctypes.c_void_p, ctypes.c_int32, _Parameters
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_log_set": (None, [_LogCallback, pointer]),
        "llama_model_default_params": (by_value, []),
        "llama_context_default_params": (by_value, []),
        "llama_model_quantize_default_params": (by_value, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, by_value]),
        "llama_model_quantize": (ctypes.c_uint32, [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(by_value)]),
        "llama_init_from_model": (pointer, [pointer, by_value]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_free": (None, [pointer]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_batch_get_one": (by_value, [ctypes.POINTER(number), number]),
        "llama_decode": (number, [pointer, by_value]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, number]),
        "llama_tokenize": (
            number,
            [pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number, ctypes.c_bool, ctypes.c_bool],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def quantise(folder: Path, source: Path, out: Path) -> None:
    """Write a file in fp32 as Q4_K_M by llama.cpp's library in ``folder``, other types for incomplete blocks; or
    MgpuError."""
    library = load_library(folder)
    parameters = library.llama_model_quantize_default_params()
    struct.pack_into("<i", parameters.raw, 4, _Q4_K_M)  # ftype, the second field
    if library.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(parameters)):
        raise MgpuError("--dtype=q4_k: llama.cpp cannot quantise the model; use --dtype q8_0")


class LlamaLibrary:
    """A GGUF file that llama.cpp's own library has loaded, on the CPU, with a cache in fp32.

    Only functions that take few plain values are called. Parameters are passed as the library fills them. One field is
    changed by its place, which its neighbours' defaults show, so that the binding serves several versions.
    Source: llama.cpp's ``include/llama.h``.
    """

    def __init__(self, folder: Path, file: Path) -> None:
        """Load the library and the file.

        Raises:
            RuntimeError: the library refuses the file, or its parameters are unknown.
        """
        self._library = load_library(folder)
        self._model = self._library.llama_model_load_from_file(
            os.fsencode(file), self._library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file")
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def _context(self, tokens: int) -> int:
        parameters = self._library.llama_context_default_params()
        raw = bytearray(bytes(parameters.raw))
        struct.pack_into("<I", raw, 0, tokens)  # n_ctx, the first field
        caches = struct.pack("<II", _F16_CACHE, _F16_CACHE)
        place = raw.find(_POINTERS + caches + _POINTERS)
        if place < 0:
            raise RuntimeError("this version of llama.cpp has unknown parameters")
        struct.pack_into("<II", raw, place + len(_POINTERS), _F32, _F32)
        struct.pack_into("<i", raw, raw.find(_AUTOMATIC) + len(_AUTOMATIC) - 4, 0)
        ctypes.memmove(parameters.raw, bytes(raw), len(raw))
        context: int | None = self._library.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._library.llama_set_n_threads(context, 1, 1)  # its threads spin, which costs minutes on a busy machine
        return context

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of rows of token ids, (rows, tokens) to (rows, tokens, vocabulary), a token at a time by the cache.

        Raises:
            RuntimeError: the library fails.
        """
        size = self._library.llama_vocab_n_tokens(self._vocabulary)
        rows = []
        for row in ids.tolist():
            context = self._context(max(64, len(row)))
            try:
                rows.append([self._next(context, token, size) for token in row])
            finally:
                self._library.llama_free(context)
        return torch.tensor(rows)

    def _next(self, context: int, token: int, size: int) -> list[float]:
        batch = self._library.llama_batch_get_one((ctypes.c_int32 * 1)(token), 1)
        if self._library.llama_decode(context, batch):
            raise RuntimeError("llama.cpp cannot decode a token")
        return list(self._library.llama_get_logits_ith(context, -1)[:size])

    def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of ``text``, with the first token that the file asks for; special tokens are recognised."""
        raw = text.encode("utf-8")
        room = len(raw) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._vocabulary, raw, len(raw), ids, room, True, True)
        return list(ids[:count])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
