"""``python -m mgpu_pipe.inference.check_export FOLDER`` checks that the folder gives the logits of the probe on stdin.

It runs in a fresh process, so that it sees only transformers and the files.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import torch
import transformers
from safetensors.torch import load
from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor

from mgpu_pipe.errors import print_line
from mgpu_pipe.inference.accuracy import relative_difference
from mgpu_pipe.inference.processor_files import PICTURE, PREPARED, RATE, WAVE
from mgpu_pipe.inference.streamed_weights import compute_logits
from mgpu_pipe.models.fields import builder_of, class_of

PREPARED_TOLERANCE = 1e-4
"""Largest difference of a prepared value, relative to the largest or to 1: a level of a pixel is 1/255."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest difference of a logit, relative to the largest logit: rounding of that type over a model's depth."""


def main(folder: str) -> int:
    inputs = load(sys.stdin.buffer.read())
    expected = inputs.pop("logits")
    problem = _prepare(folder, inputs)
    if problem:
        print_line(problem, file=sys.stderr)
        return 1
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    loaded: Any = getattr(transformers, builder_of(config.model_type, class_of(config.architectures))).from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype="auto",
        output_loading_info=True,
    )
    model, info = loaded
    mismatches = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if mismatches:
        print_line(f"tensors do not match the configuration: {mismatches[:3]}", file=sys.stderr)
        return 1
    with torch.no_grad():
        cast = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        logits = compute_logits(model.eval(), cast).float()
    error = relative_difference(logits, expected)
    if not error <= TOLERANCE[model.dtype]:
        print_line(f"logits differ by {error:.1e} of the largest", file=sys.stderr)
        return 1
    return 0


def _prepare(folder: str, inputs: dict[str, torch.Tensor]) -> str:
    """Replace the run's prepared inputs by those of the folder's processor; returns the problem, or an empty string."""
    files = {name: inputs.pop(name) for name in (PICTURE, WAVE, RATE) if name in inputs}
    prepared = {name: inputs.pop(name) for name in list(inputs) if name.startswith(PREPARED)}
    if PICTURE in files:
        from PIL import Image

        image = Image.open(io.BytesIO(files[PICTURE].numpy().tobytes()))
        processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        output = processor(image, return_tensors="pt")
    elif WAVE in files:
        extractor: Any = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        output = extractor([files[WAVE].numpy()], sampling_rate=int(files[RATE]), return_tensors="pt")
    for key, of_run in prepared.items():
        name = key.removeprefix(PREPARED)
        of_folder = output[name].reshape(of_run.shape) if output[name].numel() == of_run.numel() else None
        tolerance = PREPARED_TOLERANCE * max(1.0, float(of_run.abs().max()))
        if of_folder is None or not (of_folder - of_run).abs().max() <= tolerance:
            shapes = f"{tuple(output[name].shape)} for {tuple(of_run.shape)}"
            difference = shapes if of_folder is None else f"off by {(of_folder - of_run).abs().max():.1e}"
            return f"the processor makes other {name} of a file than the run ({difference})"
        if name in inputs and torch.equal(inputs[name][:1], of_run):
            inputs[name] = of_folder.expand_as(inputs[name])
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
