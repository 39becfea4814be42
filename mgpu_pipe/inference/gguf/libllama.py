"""Runs a GGUF file by llama.cpp's own library, where one is installed.

Only functions that take few plain values are called. Parameters are passed as the library fills them; one field is
changed by its place, and one ids by its defaults, so that one binding serves several versions.
Source: llama.cpp's ``include/llama.h``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

LIBRARY_VARIABLE = "MGPU_PIPE_LIBLLAMA"
"""Environment variable with the folder of ``libllama.so`` and ggml's libraries."""
_LLAMA, _GGML = "libllama.*so", "libggml.*so"
"""File names, in some packages with a version before the suffix."""
_F16_CACHE, _F32 = 1, 0
"""Numbers of ``ggml_type``: the default of both caches, and fp32."""
_AUTOMATIC = b"\xff" * 16
"""Four choices that are left to the library; the last is flash attention, which computes in fp16."""
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


class LlamaLibrary:
    """A GGUF file that llama.cpp has loaded, on the CPU, with a cache in fp32."""

    def __init__(self, folder: Path, file: Path) -> None:
        """Load the library and the file.

        Raises:
            RuntimeError: the library refuses the file, or its parameters are unknown.
        """
        ggml, self._library = (
            ctypes.CDLL(str(min(folder.glob(pattern))), ctypes.RTLD_GLOBAL) for pattern in (_GGML, _LLAMA)
        )
        self._declare()
        self._library.llama_log_set(_drop_log, None)
        if hasattr(ggml, "ggml_backend_load_all_from_path"):
            ggml.ggml_backend_load_all_from_path(ctypes.c_char_p(os.fsencode(folder)))
        self._library.llama_backend_init()
        self._model = self._library.llama_model_load_from_file(
            os.fsencode(file), self._library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file")
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def _declare(self) -> None:
        pointer, number, by_value = ctypes.c_void_p, ctypes.c_int32, _Parameters
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "llama_log_set": (None, [_LogCallback, pointer]),
            "llama_model_default_params": (by_value, []),
            "llama_context_default_params": (by_value, []),
            "llama_model_load_from_file": (pointer, [ctypes.c_char_p, by_value]),
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
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

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
