"""``python -m mgpu_pipe.inference.check_onnx FOLDER DTYPE`` checks that ONNX files give what the run computes.

The batches come on stdin. This runs in a fresh process without torch, and prints the largest difference and the
perplexity of the held-out texts as one JSON object.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load

from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import print_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Text = tuple[NDArray[Any], NDArray[Any]]

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}
"""Largest difference from the run in fp32, relative to the largest value: other kernels; rounding over the depth."""
TEXTS = "texts"


def main(folder: Path, dtype: str) -> int:
    cases = _cases(load(sys.stdin.buffer.read()))
    texts = cases.pop(TEXTS, [])
    worst, session = 0.0, None
    for file, listed in cases.items():
        session = _open(folder / file)
        for inputs in listed:
            expected = inputs.pop("expected")
            difference = _difference(session.run(None, inputs)[0], expected)
            shape = ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())
            if not difference <= TOLERANCE[dtype]:
                print_line(f"{file} differs by {difference:.1e} of the largest value ({shape})", file=sys.stderr)
                return 1
            worst = max(worst, difference)
    of_texts = None
    if texts:
        of_texts = perplexity(lambda ids: _logits(session, ids), ((text["ids"], text["labels"]) for text in texts))
    print_line(json.dumps({"error": worst, "perplexity": of_texts}))
    return 0


def _open(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _cases(packed: dict[str, NDArray[Any]]) -> dict[str, list[dict[str, NDArray[Any]]]]:
    """Batches by file, in order."""
    cases: dict[str, dict[int, dict[str, NDArray[Any]]]] = {}
    for key, value in packed.items():
        file, number, name = key.split("/")
        cases.setdefault(file, {}).setdefault(int(number), {})[name] = value
    return {file: [numbered[number] for number in sorted(numbered)] for file, numbered in cases.items()}


def _difference(values: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference, relative to the largest expected value; infinite for another shape."""
    if values.shape != expected.shape:
        return math.inf
    inside = ~np.isnan(expected)
    off = np.abs(values[inside].astype(np.float64) - expected[inside]).max()
    return float(off / max(float(np.abs(expected[inside]).max()), 1e-12))


def _logits(session: Any, ids: NDArray[Any]) -> NDArray[Any]:
    """Logits of one text, (tokens, vocabulary)."""
    rows = ids[None]
    logits: NDArray[Any] = session.run(None, {"input_ids": rows, "attention_mask": np.ones_like(rows)})[0][0]
    return logits


def perplexity(logits: Callable[[NDArray[Any]], NDArray[Any]], texts: Iterable[Text]) -> float:
    """Exponential of the mean loss of the valid tokens.

    Args:
        logits: gives those of a text's token ids, (tokens, vocabulary).
        texts: token ids and labels of each.
    """
    total, tokens = 0.0, 0
    for ids, labels in texts:
        valid = labels != IGNORE_INDEX
        rows = logits(ids)[valid].astype(np.float64)
        most = rows.max(1, initial=-np.inf)
        total += float(
            (np.log(np.exp(rows - most[:, None]).sum(1)) + most - rows[np.arange(len(rows)), labels[valid]]).sum()
        )
        tokens += int(valid.sum())
    return math.exp(total / tokens) if tokens else math.nan


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
