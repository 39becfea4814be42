"""Opens models of other programs: pickled checkpoints and GGUF files.

Pickled are Lightning or torch files, Hugging Face folders from before safetensors, and DeepSpeed's ZeRO folders. Only
torch's restricted unpickler reads a file: it builds tensors and plain values and runs no code of the file. DeepSpeed's
converter unpickles without that restriction. It runs in its own process and only if the user trusts the folder; its
result is read like any file. Weights of a GGUF file are read on demand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.text.tokenizer_folder import json_file
from mgpu_pipe.errors import BadInputError, MgpuError
from mgpu_pipe.import_path import python_module
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.open import ReadTensor, StoredModel, read_from
from mgpu_pipe.models.weights.folder import INDEX, WEIGHTS
from mgpu_pipe.system.child_process import bind_command
from mgpu_pipe.system.local_files import exists, is_file, is_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


LATEST = "latest"
STATES = "*_optim_states.pt"
CONVERTED = "pytorch_model.bin"
ZIP, PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of a torch file: a zip archive, or before torch 1.6 a pickle."""
TORCH_NUMBER = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
"""The number at the start of a pickle that torch wrote."""
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Fields of a checkpoint that hold its weights (Lightning, torch's tutorials, nanoGPT and torchtitan, DeepSpeed)."""
TO_FILE = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
OTHERS = (
    (".metadata", f"a checkpoint of torch.distributed; make it one file: {TO_FILE} {{0}} weights.pt"),
    (
        "latest_checkpointed_iteration.txt",
        "Megatron's checkpoint; convert it to a Hugging Face folder by Megatron-Bridge",
    ),
)
"""Files that only folders of other programs have."""
LAYOUTS = (
    ("tok_embeddings.weight", "Meta's names of Llama", "transformers' convert_llama_weights_to_hf.py"),
    (".attn.qkv.weight", "LitGPT's names", "litgpt convert_from_litgpt"),
)
"""Ends of names in layouts of weights that another program converts."""


def weight_files(source: Path, trust: bool) -> list[Path] | None:
    """The weight files of ``source``; None for a DeepSpeed folder, which needs a conversion.

    Args:
        trust: whether code in a DeepSpeed folder may run.

    Raises:
        BadInputError: ``source`` does not exist, is of another kind, or is not trusted.
    """
    if is_file(source):
        _check_signature(source)
        return [source]
    if not is_folder(source):
        raise BadInputError(f"--from={source}: no such file or folder; correct the path")
    has_weights = (source / WEIGHTS).is_file() or (source / INDEX).is_file()
    if (source / "config.json").is_file() and not has_weights and (pickled := _pickled_files(source)):
        return pickled
    for name, advice in (
        (
            WEIGHTS if (source / WEIGHTS).is_file() else INDEX,
            "a Hugging Face folder, which needs no import: use model=hf model.path",
        ),
        ("manifest.json", "a checkpoint of this program, which needs no import: use checkpoint.init_from"),
        ("checkpoints", "a run of this program, which needs no import: use checkpoint.init_from"),
    ):
        if exists(source / name):
            raise BadInputError(f"--from={source}: is {advice}={source}")
    if is_file(source / LATEST) or any(source.glob(STATES)):
        _check_deepspeed(source, trust)
        return None
    for mark, what in OTHERS:
        if any(source.glob(mark)) or any(source.glob(f"*/{mark}")):
            raise BadInputError(f"--from={source}: is {what.format(source)}")
    files = sorted(path.name for path in source.iterdir() if path.suffix in (".bin", ".ckpt", ".gguf", ".pt", ".pth"))
    fix = f"name a file of it: {', '.join(files[:LISTED])}" if files else "give one"
    raise BadInputError(
        f"--from={source}: neither a Lightning or torch file nor a DeepSpeed folder (with a file {LATEST!r}); {fix}"
    )


def _check_signature(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(64)
    if not start.startswith(ZIP) and not (start.startswith(PICKLE) and TORCH_NUMBER in start):
        is_pickle = start.startswith(PICKLE)
        reason = "is a pickle of another program" if is_pickle else "begins neither as a zip archive nor as a pickle"
        reason = reason if start else "is empty"
        raise BadInputError(
            f"--from={file}: cannot be read as a torch checkpoint ({reason}); give a .ckpt, .pt or .bin"
        )


def _pickled_files(folder: Path) -> list[Path]:
    """The weights of a Hugging Face folder from before safetensors: one file, or the shards of its index."""
    index = folder / f"{CONVERTED}.index.json"
    if not index.is_file():
        return [folder / CONVERTED] if (folder / CONVERTED).is_file() else []
    shards = json_file(index).get("weight_map")
    names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise BadInputError(f"--from={folder}: its {index.name} names no files of this folder; copy it again")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise BadInputError(f"--from={folder}: {missing[0]} is missing, which {index.name} names; copy it again")
    return [folder / name for name in names]


def _check_deepspeed(source: Path, trust: bool) -> None:
    if not trust:
        raise BadInputError(
            f"--from={source}: a DeepSpeed checkpoint is made of pickles, and DeepSpeed's converter runs whatever code "
            "they bring; if you trust who wrote it, repeat with --trust"
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise BadInputError(f"--from={source}: converting it needs DeepSpeed; pip install deepspeed")


def read_weights(source: Path, trust: bool, scratch: Path) -> dict[str, torch.Tensor]:
    """The tensors of a foreign checkpoint by its names; memory-mapped where the file allows.

    Args:
        trust: whether code in a DeepSpeed folder may run.
        scratch: an empty folder for DeepSpeed's converted files.

    Raises:
        BadInputError: ``source`` does not exist, is of another kind, or could run code.
        MgpuError: DeepSpeed's converter failed.
    """
    files = weight_files(source, trust)
    if files is None:
        return _read_deepspeed(source, scratch)
    return {name: tensor for file in files for name, tensor in _read_state_dict(file).items()}


def _read_state_dict(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a torch checkpoint by name, read without running its pickle's code.

    Raises:
        BadInputError: the file needs such code, is damaged, or has no state_dict of plain tensors.
    """
    import torch

    loaded: Any
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: a file that cannot be read raises
            try:
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format before torch 1.6 cannot be memory-mapped
                loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadInputError(
            f"--from={file}: holds more than tensors and plain values ({_reason(error)}), and reading that could run "
            "code of its maker; where you trust it, save its tensors alone: torch.save(checkpoint['state_dict'], ...)"
        ) from error
    except Exception as error:  # the unpickler runs a damaged file's bytes as instructions, which can fail in any way
        raise BadInputError(
            f"--from={file}: cannot be read as a torch checkpoint ({_reason(error)}); give another"
        ) from error
    state = loaded if isinstance(loaded, Mapping) else None
    if state and (wrapper := next((name for name in WRAPPERS if isinstance(state.get(name), Mapping)), None)):
        state = state[wrapper]
    if not isinstance(state, Mapping) or not state:
        raise BadInputError(f"--from={file}: holds no state_dict; give a checkpoint that has weights")
    not_tensors = [
        name
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta
    ]
    if not_tensors:
        raise BadInputError(
            f"--from={file}: {not_tensors[0]!r} of its state_dict is not a plain tensor; save it as one"
        )
    return {str(name): tensor for name, tensor in state.items()}


def _read_deepspeed(source: Path, scratch: Path) -> dict[str, torch.Tensor]:
    folder, tag = (source, []) if is_file(source / LATEST) else (source.parent, ["--tag", source.name])
    # Run the converter of the installed package, never the zero_to_fp32.py in the folder.
    command = python_module("deepspeed.utils.zero_to_fp32", str(folder.absolute()), str(scratch), *tag)
    done = subprocess.run(
        bind_command(command),
        capture_output=True,
        text=True,
        cwd=scratch,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise MgpuError(f"--from={source}: DeepSpeed's zero_to_fp32 failed: {_reason(done.stderr)}")
    index = scratch / f"{CONVERTED}.index.json"
    files = [CONVERTED]
    if is_file(index):
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in _read_state_dict(scratch / Path(file).name).items()}


def _reason(error: object) -> str:
    """The last line of a library's message; for torch's restricted unpickler, the class that it refused."""
    if isinstance(error, pickle.UnpicklingError):
        refused = re.search(r"GLOBAL (\S+)", str(error))
        return f"it names {refused[1]}" if refused else "it is no file of tensors"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


LISTED = 8
"""Most names of each kind in an error."""


def fill_from_external(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    source: Path,
    prefix: str = "",
    ignore: Sequence[str] = (),
    tokenizer: Path | None = None,
) -> StoredModel:
    """The model of ``config`` with all foreign ``weights``, named like Hugging Face's or modules after ``prefix``, none
    that ``ignore`` matches; BadInputError lists what is missing, unexpected or of another shape."""
    from mgpu_pipe.models.build import build_meta, materialise_empty, tied_sources
    from mgpu_pipe.models.weights.pretrained import UNTIED, drop_harmless, stored_buffers
    from mgpu_pipe.models.weights.slices import read_tensors

    named, unexpected = _without_prefix(weights, prefix, ignore)
    twin = build_meta(replace(config, freeze=[]))
    named = _as_conv1d(named, twin)
    state = twin.state_dict()
    model = materialise_empty(build_meta(replace(config, freeze=[])), "cpu")
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def take(name: str, tensor: torch.Tensor) -> None:
        parameters[name].data.copy_(tensor)

    readers = {name: partial(_identity, tensor) for name, tensor in named.items()}
    shapes_of_model = {name: tuple(p.shape) for name, p in parameters.items()}
    filled = read_tensors(twin, readers, parameters, shapes_of_model, take, buffers=stored_buffers(model))
    if untied := min(filled[UNTIED], default=None):
        tie = f"the model ties {untied} to {tied_sources(twin)[untied]}, and the tensors hold other values for each"
        raise BadInputError(f"--from={source}: {tie}; import with model.config.tie_word_embeddings=false")
    shapes_of_weights = {name: tuple(tensor.shape) for name, tensor in named.items()}
    missing, not_used = drop_harmless(twin, filled["missing_keys"], filled["unexpected_keys"], shapes_of_weights)
    unexpected |= {prefix + name for name in not_used}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    mismatched = [
        f"{name} {list(named[name].shape)} for {list(shapes[name])}" if name in named else name
        for name in sorted(filled["mismatched_keys"])
    ]
    if listed := _misfits(sorted(missing), sorted(unexpected), mismatched):
        raise BadInputError(
            f"--from={source}: the tensors do not fit the model {config.name}: {'; '.join(listed)}; "
            + _advice(list(state), list(weights), prefix)
        )
    maker = None if config.path is None else local_folder(config.path)
    return StoredModel(model.eval(), read_from(model), source, tokenizer, None, None, maker is None, maker)


def _as_conv1d(named: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Transposes weights of linear layers where GPT-2's model has transposed ones (nanoGPT, llm.c)."""
    layers = [f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]
    shapes = {name: tuple(model.get_parameter(name).shape) for name in layers if name in named}
    wide = {name: shape for name, shape in shapes.items() if shape[0] != shape[-1]}
    if not wide or any(tuple(named[name].shape) != shape[::-1] for name, shape in wide.items()):
        return named
    return {name: tensor.T.contiguous() if name in shapes else tensor for name, tensor in named.items()}


def _without_prefix(
    weights: Mapping[str, torch.Tensor], prefix: str, ignore: Sequence[str]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The weights by their names after ``prefix``, and the names that lack it; ignored ones are in neither."""
    ignored = {name for name in weights if any(fnmatchcase(name, pattern) for pattern in ignore)}
    candidates = {name: tensor for name, tensor in weights.items() if name not in ignored}
    named = {name.removeprefix(prefix): tensor for name, tensor in candidates.items() if name.startswith(prefix)}
    return named, {name for name in candidates if not name.startswith(prefix)}


def _misfits(missing: list[str], unexpected: list[str], mismatched: list[str]) -> list[str]:
    """Each kind of tensor that does not fit, with its first names."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
    return [
        f"{len(names)} {kind}: {', '.join(names[:LISTED])}{', ...' if len(names) > LISTED else ''}"
        for kind, names in kinds
        if names
    ]


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _advice(expected: Sequence[str], foreign: Sequence[str], prefix: str) -> str:
    """The fix for names that do not fit: another prefix where one fits, else another model."""
    probe = max(expected, key=len)
    fitting = sorted({name.removesuffix(probe) for name in foreign if name.endswith(probe)} - {prefix})
    if fitting:
        return f"the names begin with {fitting[0]!r}: use --prefix {fitting[0]}" if fitting[0] else "leave out --prefix"
    for end, layout, converter in LAYOUTS:
        if any(name.endswith(end) for name in foreign):
            return f"these are {layout}: convert them by {converter} first"
    return "give the model it was trained with (model=..., model.config.*), --prefix or --ignore PATTERN"


def open_gguf(source: Path, scratch: Path) -> StoredModel:
    """The model of a GGUF file. The weights are dequantised one at a time.

    Args:
        scratch: an empty folder, which gets the tokenizer.

    Raises:
        BadInputError: the file is damaged, of another format, or of a family without a table.
    """
    from mgpu_pipe.inference.gguf.gguf_tokenizer import write_tokenizer_folder
    from mgpu_pipe.inference.gguf.model_metadata import model_type_of, settings_of
    from mgpu_pipe.models.build import build_meta, materialise_buffers, recipe_of

    file = GgufFile(source)
    model_type = model_type_of(file)
    model = build_meta(ModelConfig(name=model_type, type=model_type, config=settings_of(file, model_type)))
    read = _reader(file, model, model_type)
    write_tokenizer_folder(file, scratch)
    materialise_buffers(model, recipe_of(model), "cpu")
    return StoredModel(model.eval(), read, source, scratch, None, None, adopts_special_tokens=True)


def _reader(file: GgufFile, model: PreTrainedModel, model_type: str) -> ReadTensor:
    """The function that reads a weight of ``model``; BadInputError where tensors and model do not match."""
    import torch

    from mgpu_pipe.inference.gguf.layouts import GGUF_FAMILIES, find_place, from_file, to_file
    from mgpu_pipe.inference.gguf.model_metadata import FREQUENCIES
    from mgpu_pipe.models.build import tied_sources

    family, tied = GGUF_FAMILIES[model_type], tied_sources(model)
    places = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = tied.get(name, name)
        entry = find_place(family, name)
        if entry is None:
            raise BadInputError(f"--from={file.path}: the weight {name} has no place in such a file; give another file")
        place, stored = entry
        expected = to_file(place, torch.empty(parameter.shape, device="meta"), model.config)
        for part, tensor in zip(stored, expected, strict=True):
            shape = file.tensors[part].shape if part in file.tensors else None
            if shape != tuple(tensor.shape):
                problem = "is missing" if shape is None else f"has the shape {list(shape)} for {list(tensor.shape)}"
                raise BadInputError(f"--from={file.path}: {part} {problem}; copy the file again, or give another")
        places[name] = entry
    used = {part for _, stored in places.values() for part in stored}
    rotations = getattr(model.config, "rope_parameters", None) or {}
    if rotations.get("rope_type") == "llama3":
        used.add(FREQUENCIES)  # the settings hold it
    unused = [name for name in file.tensors if name not in used]
    if unused:
        raise BadInputError(
            f"--from={file.path}: {len(unused)} tensors have no place in {model_type}: {', '.join(unused[:3])}; "
            "give another file"
        )
    buffers = dict(model.named_buffers())

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in buffers:
            return buffers[name].to(dtype)
        place, stored = places[tied.get(name, name)]
        return from_file(place, [file.read(part) for part in stored], model.config).contiguous().to(dtype)

    return read
