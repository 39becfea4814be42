"""Writes a run's weights as a plain Hugging Face folder and checks that they load before the final rename."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgpu_pipe.config.objective import description
from mgpu_pipe.data.cache import write_json
from mgpu_pipe.data.text.pair_template import adapt_to_pairs
from mgpu_pipe.data.text.tokenizer_folder import CONFIG as TOKENIZER_CONFIG
from mgpu_pipe.data.text.tokenizer_folder import chat_of, end_texts, follows_file, json_file
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.inference.model_card import write_card
from mgpu_pipe.inference.open import StoredModel
from mgpu_pipe.models.fields import has_two_towers
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.local_files import exists, is_file, is_folder

if TYPE_CHECKING:
    import torch

Dtype = Literal["fp32", "bf16", "fp16"]
SHARED_FILES = ("config.json", TOKENIZER_CONFIG)
"""Files to which an objective adds entries."""


def export_folder(
    stored: StoredModel,
    out: Path,
    dtype: Dtype = "fp32",
    force: bool = False,
    max_shard_bytes: int | None = None,
    adapter: bool = False,
) -> Path:
    """Write ``out``; an existing folder stays until the new one passes its check.

    This process never holds the model: it copies a few tensors at a time from the checkpoint to the shards and
    computes the expected logits block by block. The process that checks the folder loads it whole.

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

    from mgpu_pipe.inference.model_folder import MAX_SHARD_BYTES, merge_stored, write_adapter, write_model_folder

    check_target(out, force)
    with working_folder(out) as partial:
        check_target(out, force)  # working_folder has undone the half replacement of a killed export
        try:
            weights_type = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
            limit = max_shard_bytes or MAX_SHARD_BYTES
            if adapter:
                write_adapter(stored, partial, weights_type)
                copy_tokenizer(stored, partial, adapter)
            else:
                stored = merge_stored(stored)
                write_model_folder(stored.model, stored.read, partial, weights_type, limit, stored.maker)
                write_files_beside(stored, partial)
                _check_loads(stored, weights_type, partial)
            write_card(stored, partial, out.name, dtype, "peft" if adapter else "hf")
            put_in_place(partial, out)
        except OSError as error:
            raise MgpuError(f"--out={out}: writing failed ({error}); free some space and try again") from error
    return out


def write_files_beside(stored: StoredModel, folder: Path) -> None:
    """Write what a whole model needs besides configuration and weights: tokenizer, the objective's files, and those
    that prepare pictures and sound."""
    from mgpu_pipe.inference.processor_files import write_processor
    from mgpu_pipe.models.weights.model_files import copy_sentence_modules

    if stored.maker is not None and not _joins_texts(stored):  # they make vectors of texts
        copy_sentence_modules(stored.maker, folder)
    copy_tokenizer(stored, folder)
    write_objective_files(stored, folder)
    write_processor(stored, folder)  # replaces files that the tokenizer's folder may bring


def write_objective_files(stored: StoredModel, folder: Path) -> None:
    """Write the files that other programs need for the objective's model; replaces those of the first folder, and adds
    to those of model and tokenizer."""
    if stored.config is None:
        return
    width = getattr(stored.model.config.get_text_config(), "hidden_size", 0)
    for name, content in stored.config.objective.folder_files(stored.config.data, width).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if name in SHARED_FILES:
            content = {**json.loads(file.read_text(encoding="utf-8")), **content}
        write_json(file, content)


def _joins_texts(stored: StoredModel) -> bool:
    return stored.config is not None and description(stored.config.objective.name).joins_texts


def copy_tokenizer(stored: StoredModel, folder: Path, adapter: bool = False) -> None:
    """Write the model's tokenizer, if it has one, with the end tokens that generation needs."""
    from mgpu_pipe.models.weights.model_files import write_tokenizer

    if stored.tokenizer_folder is None:
        return
    write_tokenizer(stored.tokenizer_folder, folder, stored.adopts_special_tokens and not adapter)
    _keep_ids(folder)
    if stored.config is not None and stored.config.data.holds_conversations():
        stop_at_turns(folder)
    if has_two_towers(stored.model):
        end_texts(folder)
    if _joins_texts(stored):
        adapt_to_pairs(folder, getattr(stored.model.config, "type_vocab_size", 0) > 1)


def _keep_ids(folder: Path) -> None:
    """Names a plain class of tokenizers where the folder's own gives other ids than its ``tokenizer.json``."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception:  # the libraries raise nothing narrower; such a folder stays as it was trained with
        return
    if not follows_file(loaded, folder):
        settings = json_file(folder / TOKENIZER_CONFIG)
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": loaded.model_input_names}
        write_json(folder / TOKENIZER_CONFIG, settings)


@contextmanager
def working_folder(out: Path, kind: str = "") -> Iterator[Path]:
    """An empty folder next to ``out``, removed at the end. It first removes the leftovers of a killed process.

    Args:
        kind: distinguishes the working folders of one ``out``.

    Raises:
        BadInputError: the folder cannot be made, or another process is working in it.
    """
    partial = out.with_name(f"{out.name}{kind}.partial")
    with ExitStack() as stack:
        try:
            if exists(partial):
                stack.enter_context(_lock(partial, out))
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            stack.enter_context(_lock(partial, out))
            _undo_half_a_replacement(out)
        except OSError as error:
            raise BadInputError(f"--out={out}: cannot be written ({error.strerror}); choose another folder") from error
        yield partial


@contextmanager
def _lock(folder: Path, out: Path) -> Iterator[None]:
    """Lock ``folder``; the kernel releases the lock when this process is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(f"--out={out}: another process is writing it; wait for it, or end it") from None
        yield
    finally:
        os.close(handle)


def _replaced_path(out: Path) -> Path:
    """The temporary name of a folder during its replacement."""
    return out.with_name(out.name + ".replaced.partial")


def _undo_half_a_replacement(out: Path) -> None:
    """Clean up after a killed replacement: restore the old folder, or remove it if the new one is in place."""
    old = _replaced_path(out)
    if not exists(old):
        return
    if exists(out):
        shutil.rmtree(old)
    else:
        old.rename(out)


def check_target(out: Path, force: bool) -> None:
    """Refuse an ``out`` that must not be replaced.

    Raises:
        BadInputError: it exists and is not a model folder, or ``force`` is off.
    """
    if not exists(out):
        return
    written = ("config.json", "adapter_config.json", "Modelfile")
    if not is_folder(out) or (any(out.iterdir()) and not any(is_file(out / name) for name in written)):
        raise BadInputError(f"--out={out}: exists and is not a model folder; choose another folder")
    if any(out.iterdir()) and not force:
        raise BadInputError(f"--out={out}: exists already; choose another folder, or replace it with --force")


def _check_loads(stored: StoredModel, dtype: torch.dtype, folder: Path) -> None:
    """Load the folder in a fresh process and compare its logits with the model's, starting from a picture's or
    recording's file."""
    import torch
    from safetensors.torch import save

    from mgpu_pipe.inference.processor_files import PREPARED, probe_files
    from mgpu_pipe.inference.streamed_weights import probe, streamed_logits

    inputs = probe(stored.model)
    files = probe_files(stored)
    if files.of_one_size:
        inputs.update({name: torch.cat([value] * len(inputs[name])) for name, value in files.prepared.items()})
    logits = streamed_logits(stored.model, stored.read, inputs, dtype).float().contiguous()
    expected = {f"{PREPARED}{name}": value for name, value in files.prepared.items()}
    done = subprocess.run(
        bind_command(python_module("mgpu_pipe.inference.check_export", str(folder.absolute()))),
        input=save({**inputs, **files.content, **expected, "logits": logits}),
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise MgpuError(f"the exported folder failed its check and was removed: {last}")


def put_in_place(partial: Path, out: Path) -> None:
    """Rename the finished folder ``partial`` to ``out``, whose old content stays until then."""
    if not exists(out):
        partial.rename(out)
        return
    old = _replaced_path(out)
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)


def stop_at_turns(folder: Path) -> None:
    """Write the chat template's end of turn into the folder's generation settings, where transformers stops."""
    from mgpu_pipe.inference.generation import end_tokens, load_tokenizer
    from mgpu_pipe.models.weights.model_files import GENERATION

    file = folder / GENERATION
    chat = chat_of(folder)
    if chat is None or not is_file(file):
        return
    content = json_file(file)
    content["eos_token_id"] = end_tokens(load_tokenizer(folder), chat)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
