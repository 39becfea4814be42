"""Reads the weights of other programs' checkpoints: a Lightning or plain torch file, or DeepSpeed's ZeRO folder.

Both are pickles. A file is read by torch's restricted unpickler alone, which builds tensors and plain values and runs
nothing of the file's own; what it refuses is refused. DeepSpeed's own converter unpickles without that restriction:
it runs only where the user trusts the folder, in a process of its own, and its result is read like any file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mgpu_pipe.child import bound
from mgpu_pipe.errors import BadInputError, MgpuError

LATEST = "latest"
STATES = "*_optim_states.pt"
CONVERTED = "pytorch_model.bin"


def read_weights(source: Path, trust: bool, scratch: Path) -> dict[str, torch.Tensor]:
    """The tensors of a foreign checkpoint by its own names; memory-mapped where the file allows.

    Args:
        trust: whether code that a DeepSpeed folder brings may run.
        scratch: an empty folder for what DeepSpeed converts.

    Raises:
        BadInputError: no such file or folder, one of another kind, or one that could run code.
        MgpuError: DeepSpeed's converter failed.
    """
    if source.is_file():
        return _read_file(source)
    if not source.is_dir():
        raise BadInputError(f"--from={source}: no such file or folder")
    for name, advice in (
        ("config.json", "a Hugging Face folder, which needs no import: use model=hf model.path"),
        ("manifest.json", "a checkpoint of this program, which needs no import: use checkpoint.init_from"),
        ("checkpoints", "a run of this program, which needs no import: use checkpoint.init_from"),
    ):
        if (source / name).exists():
            raise BadInputError(f"--from={source}: is {advice}={source}")
    if (source / LATEST).is_file() or any(source.glob(STATES)):
        return _read_deepspeed(source, trust, scratch)
    raise BadInputError(
        f"--from={source}: neither a Lightning or torch file nor a DeepSpeed folder (with a file {LATEST!r})"
    )


def _read_file(file: Path) -> dict[str, torch.Tensor]:
    loaded: Any
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be memory-mapped
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInputError(
            f"--from={file}: holds more than tensors and plain values ({_reason(error)}), and reading that could run "
            "code of its maker; where you trust it, save its tensors alone: torch.save(checkpoint['state_dict'], ...)"
        ) from error
    except Exception as error:  # the unpickler meets a damaged file's bytes as instructions: it may fail in any way
        raise BadInputError(f"--from={file}: cannot be read as a torch checkpoint ({_reason(error)})") from error
    state = loaded.get("state_dict", loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping) or not state:
        raise BadInputError(f"--from={file}: holds no state_dict")
    strange = [
        name
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta
    ]
    if strange:
        raise BadInputError(f"--from={file}: {strange[0]!r} of its state_dict is no plain tensor")
    return {str(name): tensor for name, tensor in state.items()}


def _read_deepspeed(source: Path, trust: bool, scratch: Path) -> dict[str, torch.Tensor]:
    if not trust:
        raise BadInputError(
            f"--from={source}: a DeepSpeed checkpoint is made of pickles, and DeepSpeed's converter runs whatever code "
            "they bring; if you trust who wrote it, repeat with --trust"
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise BadInputError(f"--from={source}: converting it needs DeepSpeed; pip install deepspeed")
    folder, tag = (source, []) if (source / LATEST).is_file() else (source.parent, ["--tag", source.name])
    # Never the zero_to_fp32.py that lies in the folder: the installed package's own.
    command = [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(folder.absolute()), str(scratch), *tag]
    done = subprocess.run(
        bound(command),
        capture_output=True,
        text=True,
        cwd=scratch,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise MgpuError(f"--from={source}: DeepSpeed's zero_to_fp32 failed: {_reason(done.stderr)}")
    index = scratch / f"{CONVERTED}.index.json"
    files = [CONVERTED]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in _read_file(scratch / Path(file).name).items()}


def _reason(error: object) -> str:
    """The last line of a library's message; of torch's restricted unpickler what it met, without how to lift it."""
    if isinstance(error, pickle.UnpicklingError):
        met = re.search(r"GLOBAL (\S+)", str(error))
        return f"it names {met[1]}" if met else "it is no file of tensors"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__
