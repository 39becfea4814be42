"""Writes a run's weights as a plain Hugging Face folder, and shows that they load before giving it its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.inference.load import Read, StoredModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PROBE_ROWS, PROBE_TOKENS = 2, 32
Dtype = Literal["fp32", "bf16"]


def export_folder(
    stored: StoredModel, out: Path, dtype: Dtype = "fp32", force: bool = False, max_shard_bytes: int | None = None
) -> Path:
    """Write ``out``; what was there before stays until the new folder is proved.

    Weights go from the checkpoint to the shards a few tensors at a time, and the logits that the folder is held
    against are computed a block at a time: this process never holds the model. The process that proves it does.

    Args:
        force: replace an existing model folder.
        max_shard_bytes: of a weight file; None takes the Hub's 5 GB.

    Raises:
        BadInputError: ``out`` exists (without ``force``, or is no model folder), or cannot be written; of its kinds,
            CheckpointError for a damaged step.
        MgpuError: the folder written does not give the same logits.
    """
    import torch

    from mgpu_pipe.inference.model_folder import MAX_SHARD_BYTES, write_model_folder
    from mgpu_pipe.models.save import write_tokenizer

    check_target(out, force)
    partial = out.with_name(out.name + ".partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise BadInputError(f"--out={out}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        weights_type = torch.float32 if dtype == "fp32" else torch.bfloat16
        limit = max_shard_bytes or MAX_SHARD_BYTES
        write_model_folder(stored.model, stored.read, partial, weights_type, limit, stored.maker)
        if stored.tokenizer_folder is not None:
            write_tokenizer(stored.tokenizer_folder, partial, stored.adopts_special_tokens)
        _prove(stored.model, stored.read, weights_type, partial)
        _put_in_place(partial, out)
    except OSError as error:
        raise MgpuError(f"--out={out}: writing failed ({error}); free some space and try again") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def check_target(out: Path, force: bool) -> None:
    """Refuse an ``out`` that must not be replaced.

    Raises:
        BadInputError: it exists, and is no model folder or ``force`` is off.
    """
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").is_file()):
        raise BadInputError(f"--out={out}: exists and is no model folder; choose another folder")
    if any(out.iterdir()) and not force:
        raise BadInputError(f"--out={out}: exists already; choose another folder, or replace it with --force")


def _prove(model: PreTrainedModel, read: Read, dtype: torch.dtype, folder: Path) -> None:
    """Have a fresh process load the folder and compare its logits with the model's."""
    import torch
    from safetensors.torch import save_file

    from mgpu_pipe.inference.by_blocks import logits_by_blocks

    generator = torch.Generator().manual_seed(0)
    text = model.config.get_text_config()
    tokens = min(PROBE_TOKENS, getattr(text, "max_position_embeddings", None) or PROBE_TOKENS)
    ids = torch.randint(0, text.vocab_size, (PROBE_ROWS, tokens), generator=generator)
    logits = logits_by_blocks(model, read, ids, dtype).float().contiguous()
    package = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch) / "probe.safetensors"
        save_file({"input_ids": ids, "logits": logits}, probe)
        done = subprocess.run(
            [sys.executable, "-m", "mgpu_pipe.inference.check_export", str(folder), str(probe)],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MgpuError(f"the exported folder failed its check and was removed: {last}")


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(out.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
