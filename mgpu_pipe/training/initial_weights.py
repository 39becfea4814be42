"""Sources of a run's first weights, and what an attempt starts from: random, a Hugging Face folder, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mgpu_pipe.checkpoint.left_out import LeftOut, weights_digest
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.selection import resolve_source
from mgpu_pipe.config.group_keys import PeftConfig, StrategyConfig
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.resolve import leaves_out_frozen_weights
from mgpu_pipe.config.schema import CheckpointConfig, ModelConfig, RunConfig
from mgpu_pipe.data.cache import digest_of, hash_blocks
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.errors import CheckpointError
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.peft_folder import (
    ADAPTER_SETTINGS,
    ADAPTER_WEIGHTS,
    first_adapters,
    lengths,
    magnitude_layer,
)
from mgpu_pipe.models.build import draw_adapters, materialise, run_model
from mgpu_pipe.models.fields import LABELS
from mgpu_pipe.models.init.keyed_init import CHUNK
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.models.weights.folder import whole_folder
from mgpu_pipe.models.weights.pretrained import RECORDED, buffer_entry, load_pretrained, restore_buffers
from mgpu_pipe.models.weights.slices import FolderWeights, folder_buffers
from mgpu_pipe.objectives.first_weights import MEASURED
from mgpu_pipe.parallel.rank_exchange import exchange_json, rank_and_size
from mgpu_pipe.system.local_files import exists, expand_home
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.save_and_resume import restore_optimizer, restore_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INITIALISATION = 1
"""Version of the random initialisation; raise it when a seed gives other weights."""


class MeasuredWeights:
    """The weights that an objective measures once for the run, such as those of a reference model.

    Args:
        first: the checkpoint that the run's first weights come from, where it is open already.
        resumed: the step that this attempt resumes from.
        weights: see :attr:`.WeightMeasurer.measures_weights`.
    """

    def __init__(
        self,
        config: RunConfig,
        first: CheckpointReader | None,
        resumed: CheckpointReader | None,
        weights: Literal["first", "loaded"],
    ) -> None:
        self._config, self._first, self._resumed, self._weights = config, first, resumed, weights
        recorded = None if resumed is None else resumed.state.get(MEASURED)
        self._recorded = None if recorded is None else str(recorded)

    def digest(self) -> str:
        """The digest that the run's first attempt recorded, or else this attempt's own. A collective call."""
        if self._recorded is not None:
            return self._recorded
        if self._weights == "loaded" and self._resumed is not None:
            return self._resumed.manifest.root  # the step before may have trained what is frozen now
        return self._first_weights()

    def reader(self) -> CheckpointReader | None:
        """The checkpoint of the first weights, to measure from them again; None: they come from elsewhere, or are not
        needed. A collective call.

        Raises:
            CheckpointError: the run's first weights are no longer what they were.
        """
        if self._weights == "loaded" and self._resumed is not None:
            return self._first
        digest = self._first_weights()
        if self._recorded not in (None, digest):
            config = self._config
            key = "model.path" if config.model.path else "checkpoint.init_from" if config.checkpoint.init_from else ""
            place = config.model.path or config.checkpoint.init_from
            what = f"{key}={place}: its weights are" if key else f"seed={config.seed}: the weights drawn are"
            raise CheckpointError(f"{what} not those that this run began with; restore them, or start a new run")
        return self._first

    def _first_weights(self) -> str:
        config = self._config
        if self._first is None and starts_from_run(config.checkpoint):
            self._first = weights_reader(config.checkpoint)
        root = self._first.manifest.root if self._first is not None else None
        parts = (config.seed, config.model, config.peft, config.checkpoint, config.data.cache_dir)
        digest = _digest_of_start(*parts, root) if rank_and_size(None)[0] == 0 else None
        return str(exchange_json(digest, None)[0])


def _digest_of_start(
    seed: int,
    model: ModelConfig,
    peft: PeftConfig,
    checkpoint: CheckpointConfig,
    cache_dir: str | None,
    root: str | None,
) -> str:
    """A digest of all that decides the initial weights; ``root`` identifies the checkpoint they come from."""
    cache = cache_folder(cache_dir)
    folders = [model.path, checkpoint.init_from if starts_from_folder(checkpoint) else None]
    files = []
    for folder in folders:
        if folder is not None:
            place = expand_home(whole_folder(folder))
            files += [weights_digest(place, cache), *hash_blocks(place / "config.json")]
    if peft.init_from is not None:
        place = expand_home(peft.init_from)
        files += [*hash_blocks(place / ADAPTER_WEIGHTS), *hash_blocks(place / ADAPTER_SETTINGS)]
    adapters = {key: value for key, value in asdict(peft).items() if key != "init_from"}
    random_part = (INITIALISATION, CHUNK, seed)
    return digest_of(model.type, model.config, adapters, files, root, random_part)


LONG_ROW = 512
"""Tokens of a row from which attention by documents is faster on the CPU than a mask."""


def reads_slices(peft: PeftConfig, strategy: StrategyConfig, dims: ParallelDims) -> bool:
    """Whether each rank reads its own parts of a folder's weights, or bytes of them, and none the whole."""
    if strategy.engine == "deepspeed":
        return strategy.deepspeed.stage == 3
    cuts = dims.cuts_the_model or strategy.offload == "cpu" or peft.name == "qlora"
    return strategy.engine == "mesh" and cuts


def build_model(
    config: RunConfig, device: torch.device, sharded: bool
) -> tuple[PreTrainedModel, Callable[[PreTrainedModel, torch.device], object] | None]:
    """The model without a key-value cache, and a function that fills it; ``sharded``: see :func:`reads_slices`."""
    source = config.model
    if starts_from_folder(config.checkpoint):
        classes = {name: config.model.config[name] for name in LABELS if name in config.model.config}
        source = replace(config.model, type=None, path=config.checkpoint.init_from, config=classes)
    fill: Callable[[PreTrainedModel, torch.device], object] | None = None
    if source.path is not None and not sharded:
        model_class = description(config.objective.name).model_class
        model = load_pretrained(source, device, config.model, model_class, config.seed)
        _add_first_adapters(model, config.peft, config.seed)
    else:
        model = run_model(config)
        if source.path is not None:
            fill = FolderWeights(source, config.seed, config.peft)
        else:
            fill = lambda empty, device: materialise(empty, config.seed, device)  # noqa: E731
    model.config.use_cache = False
    fix_rotary_length(model, config.data.seq_len)
    long_rows = device.type == "cuda" or config.data.seq_len >= LONG_ROW
    if long_rows and config.model.attn_implementation == "auto":
        # Of a model that sees, the part that writes has the rows.
        data = config.data
        seeing = isinstance(data, PictureChatConfig) and resolve_packing(config.model, data, config.objective) != "none"
        use_packed_attention(model.get_decoder() if seeing else model)
    return model, fill


def _add_first_adapters(model: PreTrainedModel, peft: PeftConfig, seed: int) -> None:
    """Add the adapters with their first weights: drawn, or those of ``peft.init_from``."""
    add_adapters(model, peft)
    draw_adapters(model, seed)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, value in first_adapters(peft, model):
        layer = magnitude_layer(name)
        trained[name].data.copy_(value if layer is None else value - lengths(model, layer))


def buffers_of_start(
    source: ModelConfig, checkpoint: CheckpointConfig, model: PreTrainedModel, reader: CheckpointReader | None
) -> dict[str, Any]:
    """The entry for the buffers of ``model`` in this attempt's checkpoints: its folder's, or those of its checkpoint.

    Args:
        source: ``model``'s keys.
        model: not split.
        reader: the checkpoint that its weights come from.
    """
    if reader is not None and RECORDED in reader.state:
        return {RECORDED: reader.state[RECORDED]}
    path = checkpoint.init_from if starts_from_folder(checkpoint) else source.path
    return {} if path is None else buffer_entry(folder_buffers(replace(source, path=path), model))


def left_out_weights(
    source: str | None,
    checkpoint: CheckpointConfig,
    peft: PeftConfig,
    cache_dir: str | None,
    model: PreTrainedModel,
    reader: CheckpointReader | None,
) -> LeftOut | None:
    """The frozen weights that this attempt's checkpoints leave out; None where they hold all. A collective call.

    Args:
        source: ``model.path``.
        cache_dir: ``data.cache_dir``.
        model: with the folder's weights, where the run has one.
        reader: the checkpoint that its weights come from.

    Raises:
        CheckpointError: ``reader``'s leaves out weights that the run's folder does not hold.
    """
    folder = checkpoint.init_from if starts_from_folder(checkpoint) else source
    before = reader.left_out if reader is not None else None
    cache = cache_folder(cache_dir)
    names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if reader is not None:
        # What a checkpoint holds may have been trained before it was frozen.
        names &= set(before.names) if before is not None else set()
    leaves_out = leaves_out_frozen_weights(peft, checkpoint) and folder is not None and bool(names)

    def digest() -> LeftOut | None:
        if reader is not None and before is not None:
            before.require(None if folder is None else whole_folder(folder), cache, reader.folder)
        return LeftOut.from_folder(folder, cache, sorted(names)) if leaves_out and folder is not None else None

    if before is None and not leaves_out:
        return None
    left_out = digest() if rank_and_size(None)[0] == 0 else None
    [first, *_] = exchange_json(None if left_out is None else left_out.as_state(), None)
    return None if first is None else LeftOut.from_state(first, Path(str(folder)))


def starts_from_folder(checkpoint: CheckpointConfig) -> bool:
    """Whether ``checkpoint.init_from`` names a Hugging Face folder."""
    if checkpoint.init_from is None:
        return False
    source = expand_home(checkpoint.init_from)
    return not exists(source / "manifest.json") and exists(source / "config.json")


def starts_from_run(checkpoint: CheckpointConfig) -> bool:
    """Whether ``checkpoint.init_from`` names a run, or a step of one."""
    return checkpoint.init_from is not None and not starts_from_folder(checkpoint)


def weights_reader(checkpoint: CheckpointConfig) -> CheckpointReader:
    """A reader of the step in ``checkpoint.init_from``, the same on every rank although it may be saving.
    Collective."""
    keep = checkpoint
    step = resolve_source(str(keep.init_from), keep.on_corruption, "size", key="checkpoint.init_from")
    return CheckpointReader(Path(exchange_json(str(step), None)[0]), keep.verify)


@dataclass(frozen=True)
class StartWeights:
    """The checkpoints that an attempt starts from.

    Attributes:
        first: has the run's first weights, where they are not drawn or read from a folder.
        resumed: has the weights and the optimizer state that the attempt resumes.
        measure: called on every rank, with "first" when the run's first weights are there and then with "loaded" when
            those are that the attempt trains.
    """

    first: CheckpointReader | None = None
    resumed: CheckpointReader | None = None
    measure: Callable[[str], None] = lambda weights: None

    @property
    def source(self) -> CheckpointReader | None:
        """The checkpoint whose weights the attempt trains; None where it has none."""
        return self.first if self.resumed is None else self.resumed

    def load(self, strategy: Any, model: torch.nn.Module) -> None:
        """Fill this rank's part of ``model`` and of the optimizer's state. A collective call."""
        if self.first is not None:
            _fill(self.first, strategy, model)
        self.measure("first")
        if self.resumed is not None:
            _fill(self.resumed, strategy, model)
            restore_optimizer(self.resumed, strategy)
        self.measure("loaded")


def _fill(reader: CheckpointReader, strategy: Any, model: torch.nn.Module) -> None:
    restore_weights(reader, strategy)
    restore_buffers(model, reader.state, reader.folder)
