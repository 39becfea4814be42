"""ONNX files, which onnxruntime reads: the parts of a model that become a file, and inputs that check a file."""

from __future__ import annotations

import importlib.util
from typing import Literal

from mgpu_pipe.errors import BadInputError

OnnxDtype = Literal["fp32", "fp16"]
FILE, TEXT_FILE, PICTURE_FILE = "model.onnx", "text_model.onnx", "vision_model.onnx"
"""Names of the file in an exported folder; a model of pictures and texts has one for each tower."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def require_packages() -> None:
    """Refuse ``--format onnx`` without its packages; BadInputError has the line that installs them."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInputError(f"--format=onnx: needs {', '.join(missing)}; pip install 'mgpu_pipe[onnx]'")
