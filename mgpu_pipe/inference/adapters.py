"""A run's adapters on their way out: merged into the weights beside them, or as a folder of the peft package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.pytorch_utils import Conv1D

from mgpu_pipe.checkpoint.host import dtype_name, host_bytes
from mgpu_pipe.checkpoint.tensor_file import Entry, write_tensor_file
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.adapters.lora import EXPERTS, adapter_of, is_adapter, lora_layers, merge_adapters
from mgpu_pipe.models.adapters.low_rank import as_rows
from mgpu_pipe.models.adapters.peft_folder import SETTINGS, WEIGHTS, lengths, measures, name_in_peft
from mgpu_pipe.models.fields import class_of

if TYPE_CHECKING:
    from mgpu_pipe.inference.load import StoredModel

TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


def has_adapters(stored: StoredModel) -> bool:
    return adapter_of(stored.model).name != "none"


def merged(stored: StoredModel) -> StoredModel:
    """``stored`` without adapters: each is merged into the weight beside it, in fp32, as it is read.

    ``stored``'s own model is changed.
    """
    weights = {
        f"{name}.{weight}": (layer, {one: f"{name}.{own}" for one, own in names.items()}, layer.merge)
        for name, layer in lora_layers(stored.model)
        for weight, names in layer.adapted().items()
    }
    scale = adapter_of(stored.model).scale
    merge_adapters(stored.model)

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in weights:
            return stored.read(name, dtype)
        layer, names, merge = weights[name]
        own = {one: stored.read(adapter, torch.float32) for one, adapter in names.items()}
        whole = merge(as_rows(layer, stored.read(name, torch.float32)), scale, own)
        return as_rows(layer, whole).to(dtype)

    return replace(stored, read=read)


def write_adapter(stored: StoredModel, out: Path, dtype: torch.dtype) -> None:
    """Write the adapters of ``stored`` into the existing folder ``out`` as peft does: configuration and weights.

    Raises:
        BadInputError: weights are trained besides that a peft folder has no place for.
        OSError: it cannot be written.
    """
    model, keys = stored.model, adapter_of(stored.model)
    layers = lora_layers(model)
    if EXPERTS in keys.targets:
        raise BadInputError("--adapter: peft names adapters of packed experts by their order; use --merge")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    modules = sorted({name.rpartition(".")[0] for name in trained if not is_adapter(name)})
    whole = {f"{name}.{one}" for name in modules for one, _ in model.get_submodule(name).named_parameters()}
    if not whole <= set(trained):
        missing = sorted(whole - set(trained))[0]
        raise BadInputError(f"--adapter: peft saves whole modules, and {missing} is not trained; use --merge")
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(class_of([type(model).__name__])),
        "base_model_name_or_path": None if stored.maker is None else str(stored.maker),
        "r": keys.r,
        "lora_alpha": keys.alpha,
        "lora_dropout": keys.dropout,
        "use_rslora": keys.rslora,
        "use_dora": keys.name == "dora",
        "target_modules": [name for name, _ in layers],
        "fan_in_fan_out": isinstance(layers[0][1], Conv1D),
        "modules_to_save": modules or None,
        "bias": "none",
        "inference_mode": True,
    }
    (out / SETTINGS).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored_type = dtype_name(torch.empty(0, dtype=dtype))
    entries = [Entry(name_in_peft(name), stored_type, tuple(value.shape)) for name, value in trained.items()]
    parts = (part for name in trained for part in host_bytes(_as_in_peft(stored, name, dtype)))
    write_tensor_file(out / WEIGHTS, entries, {"format": "pt"}, parts)


def _as_in_peft(stored: StoredModel, name: str, dtype: torch.dtype) -> torch.Tensor:
    layer = measures(name)
    if layer is None:
        return stored.read(name, dtype)
    norms = lengths(stored.model, layer, stored.read(f"{layer}.weight", torch.float32))
    return (norms + stored.read(name, torch.float32)).to(dtype)
