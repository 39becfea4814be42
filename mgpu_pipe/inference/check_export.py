"""``python -m mgpu_pipe.inference.check_export FOLDER``: does the folder give the logits of the probe on stdin?

Run in a process of its own, so that nothing of the exporting one can help: only transformers and the files.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from safetensors.torch import load
from transformers import AutoConfig

from mgpu_pipe.inference.streaming import answer
from mgpu_pipe.models.fields import class_of, maker_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference of a logit, relative to the largest logit: rounding of that type over a model's depth."""


def main(folder: str) -> int:
    inputs = load(sys.stdin.buffer.read())
    expected = inputs.pop("logits")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    loaded: Any = getattr(transformers, maker_of(config.model_type, class_of(config.architectures))).from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype="auto",
        output_loading_info=True,
    )
    model, info = loaded
    amiss = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if amiss:
        print(f"tensors do not match the configuration: {amiss[:3]}", file=sys.stderr)
        return 1
    with torch.no_grad():
        cast = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        logits = answer(model.eval(), cast).float()
    error = ((logits - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
    if not error <= TOLERANCE[model.dtype]:
        print(f"logits differ by {error:.1e} of the largest", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
