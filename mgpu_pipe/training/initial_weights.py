"""Where a run's first weights come from: drawn, a Hugging Face folder, or a checkpoint's weights alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mgpu_pipe.checkpoint.exchange import exchange_json, rank_and_size
from mgpu_pipe.checkpoint.left_out import LeftOut
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.select import resolve_source
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.resolve import leaves_out_frozen_weights
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.kernels.packed_attention import use_packed_attention
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.peft_folder import first_adapters, lengths, measures
from mgpu_pipe.models.build import draw_adapters, materialise, run_model
from mgpu_pipe.models.fields import LABELS
from mgpu_pipe.models.hub_folder import whole_folder
from mgpu_pipe.models.pretrained import load_pretrained
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.models.slices import FolderWeights
from mgpu_pipe.topology import ParallelDims

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LONG_ROW = 512
"""Tokens of a row from which attention by documents is faster on the CPU than a mask."""


def reads_slices(config: RunConfig, dims: ParallelDims) -> bool:
    """Whether each rank reads its own parts of a folder's weights, or bytes of them, and none the whole."""
    if config.strategy.engine == "deepspeed":
        return config.strategy.deepspeed.stage == 3
    cuts = dims.cuts_the_model or config.strategy.offload == "cpu" or config.peft.name == "qlora"
    return config.strategy.engine == "mesh" and cuts


def build_model(
    config: RunConfig, device: torch.device, sharded: bool
) -> tuple[PreTrainedModel, Callable[[PreTrainedModel, torch.device], None] | None]:
    """The model, without a key-value cache, and what fills it where it is still on the meta device."""
    model, fill = _model_and_filler(config, device, sharded)
    model.config.use_cache = False
    fix_rotary_length(model, config.data.seq_len)
    long_rows = device.type == "cuda" or config.data.seq_len >= LONG_ROW
    if long_rows and config.model.attn_implementation == "auto":
        # Of a model that sees, the part that writes has the rows.
        seeing = isinstance(config.data, PictureChatConfig) and config.data.packing != "none"
        use_packed_attention(model.get_decoder() if seeing else model)
    return model, fill


def _model_and_filler(
    config: RunConfig, device: torch.device, sharded: bool
) -> tuple[PreTrainedModel, Callable[[PreTrainedModel, torch.device], None] | None]:
    source = config.model
    if starts_from_folder(config):
        classes = {name: config.model.config[name] for name in LABELS if name in config.model.config}
        source = replace(config.model, type=None, path=config.checkpoint.init_from, config=classes)
    if source.path is not None and not sharded:
        model_class = description(config.objective.name).model_class
        model = load_pretrained(source, device, config.model, model_class, config.seed)
        add_adapters(model, config.peft)
        draw_adapters(model, config.seed)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, value in first_adapters(config.peft, {name: tuple(p.shape) for name, p in trained.items()}):
            layer = measures(name)
            trained[name].data.copy_(value if layer is None else value - lengths(model, layer))
        return model, None
    if source.path is not None:
        return run_model(config), FolderWeights(source, config.seed, config.peft)

    def fill(model: PreTrainedModel, device: torch.device) -> None:
        materialise(model, config.seed, device)

    return run_model(config), fill


def left_out_weights(config: RunConfig, model: PreTrainedModel, reader: CheckpointReader | None) -> LeftOut | None:
    """The frozen weights that this attempt's checkpoints leave out; None where they hold all. A collective call.

    Args:
        model: with the folder's weights, where the run has one.
        reader: the checkpoint that its weights come from.

    Raises:
        CheckpointError: ``reader``'s leaves out weights that the run's folder does not hold.
    """
    folder = config.checkpoint.init_from if starts_from_folder(config) else config.model.path
    before = reader.left_out if reader is not None else None
    cache = cache_folder(config.data.cache_dir)
    names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if reader is not None:
        # What a checkpoint holds may have been trained before it was frozen.
        names &= set(before.names) if before is not None else set()
    leaves_out = leaves_out_frozen_weights(config) and folder is not None and bool(names)

    def digest() -> LeftOut | None:
        if reader is not None and before is not None:
            before.require(None if folder is None else whole_folder(folder), cache, reader.folder)
        return LeftOut.of(folder, cache, sorted(names)) if leaves_out and folder is not None else None

    if before is None and not leaves_out:
        return None
    told = digest() if rank_and_size(None)[0] == 0 else None
    [first, *_] = exchange_json(None if told is None else told.as_state(), None)
    return None if first is None else LeftOut.from_state(first, Path(str(folder)))


def starts_from_folder(config: RunConfig) -> bool:
    """Whether ``checkpoint.init_from`` names a Hugging Face folder."""
    if config.checkpoint.init_from is None:
        return False
    source = Path(config.checkpoint.init_from).expanduser()
    return not (source / "manifest.json").exists() and (source / "config.json").exists()


def weights_reader(config: RunConfig) -> CheckpointReader:
    """A collective call: the run that the weights come from may be saving, and ranks that look by themselves would
    take different steps of it."""
    keep = config.checkpoint
    step = resolve_source(str(keep.init_from), keep.on_corruption, "size", key="checkpoint.init_from")
    return CheckpointReader(Path(exchange_json(str(step), None)[0]), keep.verify)
