"""Writes a run's weights as a plain Hugging Face folder, and shows that they load before giving it its name."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgpu_pipe.child import bound
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.inference.load import ReadTensor, StoredModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Dtype = Literal["fp32", "bf16"]


def export_folder(
    stored: StoredModel,
    out: Path,
    dtype: Dtype = "fp32",
    force: bool = False,
    max_shard_bytes: int | None = None,
    adapter: bool = False,
) -> Path:
    """Write ``out``; what was there before stays until the new folder is proved.

    Weights go from the checkpoint to the shards a few tensors at a time, and the logits that the folder is held
    against are computed a block at a time: this process never holds the model. The process that proves it does.

    Args:
        force: replace an existing model folder.
        max_shard_bytes: of a weight file; None takes the Hub's 5 GB.
        adapter: write the adapters alone, as a folder of the peft package; otherwise they are merged.

    Raises:
        BadInputError: ``out`` exists (without ``force``, or is no model folder), or cannot be written; of its kinds,
            CheckpointError for a damaged step.
        MgpuError: the folder written does not give the same logits.
    """
    import torch

    from mgpu_pipe.data.text.tokenizer_folder import end_texts
    from mgpu_pipe.inference.adapters import merged, write_adapter
    from mgpu_pipe.inference.generation import stop_at_turns
    from mgpu_pipe.inference.model_folder import MAX_SHARD_BYTES, write_model_folder
    from mgpu_pipe.inference.processor_files import write_processor
    from mgpu_pipe.models.save import write_tokenizer

    check_target(out, force)
    with working_folder(out) as partial:
        check_target(out, force)  # a killed export's half of a replacement is undone by now
        try:
            weights_type = torch.float32 if dtype == "fp32" else torch.bfloat16
            limit = max_shard_bytes or MAX_SHARD_BYTES
            if adapter:
                write_adapter(stored, partial, weights_type)
            else:
                stored = merged(stored)
                write_model_folder(stored.model, stored.read, partial, weights_type, limit, stored.maker)
                write_processor(stored, partial)
            if stored.tokenizer_folder is not None:
                adopts = stored.adopts_special_tokens and not adapter
                write_tokenizer(stored.tokenizer_folder, partial, adopts)
                if stored.config is not None and stored.config.data.holds_conversations():
                    stop_at_turns(partial)
                if hasattr(stored.model, "logit_scale"):
                    end_texts(partial)
            if not adapter:
                _prove(stored.model, stored.read, weights_type, partial)
            _put_in_place(partial, out)
        except OSError as error:
            raise MgpuError(f"--out={out}: writing failed ({error}); free some space and try again") from error
    return out


@contextmanager
def working_folder(out: Path, kind: str = "") -> Iterator[Path]:
    """An empty folder beside ``out`` to work in; it goes at the end, and what a killed process left of one goes now.

    Args:
        kind: tells working folders of one ``out`` apart.

    Raises:
        BadInputError: the folder cannot be made, or another process is working in it.
    """
    partial = out.with_name(f"{out.name}{kind}.partial")
    with ExitStack() as stack:
        try:
            if partial.exists():
                stack.enter_context(_locked(partial, out))
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            stack.enter_context(_locked(partial, out))
            _undo_half_a_replacement(out)
        except OSError as error:
            raise BadInputError(f"--out={out}: cannot be written ({error.strerror}); choose another folder") from error
        yield partial


@contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """Hold ``folder``; the kernel lets go of it when this process is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(f"--out={out}: another process is writing it; wait for it, or end it") from None
        yield
    finally:
        os.close(handle)


def _replaced(out: Path) -> Path:
    """Where a folder that is being replaced waits."""
    return out.with_name(out.name + ".replaced.partial")


def _undo_half_a_replacement(out: Path) -> None:
    """After a kill between its two renames the old folder gets its name back; after both it goes."""
    old = _replaced(out)
    if not old.exists():
        return
    if out.exists():
        shutil.rmtree(old)
    else:
        old.rename(out)


def check_target(out: Path, force: bool) -> None:
    """Refuse an ``out`` that must not be replaced.

    Raises:
        BadInputError: it exists, and is no model folder or ``force`` is off.
    """
    if not out.exists():
        return
    written = ("config.json", "adapter_config.json")
    if not out.is_dir() or (any(out.iterdir()) and not any((out / name).is_file() for name in written)):
        raise BadInputError(f"--out={out}: exists and is no model folder; choose another folder")
    if any(out.iterdir()) and not force:
        raise BadInputError(f"--out={out}: exists already; choose another folder, or replace it with --force")


def _prove(model: PreTrainedModel, read: ReadTensor, dtype: torch.dtype, folder: Path) -> None:
    """Have a fresh process load the folder and compare its logits with the model's."""
    from safetensors.torch import save

    from mgpu_pipe.inference.streaming import probe, streamed_logits

    inputs = probe(model)
    logits = streamed_logits(model, read, inputs, dtype).float().contiguous()
    package = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        bound([sys.executable, "-m", "mgpu_pipe.inference.check_export", str(folder.absolute())]),
        cwd=folder,  # python -m imports from the working folder first, and that may be somebody else's
        input=save({**inputs, "logits": logits}),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise MgpuError(f"the exported folder failed its check and was removed: {last}")


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    old = _replaced(out)
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
