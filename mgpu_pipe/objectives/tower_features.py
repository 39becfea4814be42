"""What a frozen tower makes of a run's pictures, computed once before the first step (``data.cache_features``).

The strategy that trains computes them, as it would in each step, and the run's folder keeps a file for each split; a
run that goes on maps it again. From then on the tower is not run: its forward pass looks its pictures up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_outputs import BaseModelOutputWithPooling

from mgpu_pipe.checkpoint.exchange import exchange_json
from mgpu_pipe.config.replace_file import flush_folder
from mgpu_pipe.data.cache import digest_of
from mgpu_pipe.data.samples import Split
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.pictures import picture_places
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.first_weights import DIGITS, SPLITS, RunStart

if TYPE_CHECKING:
    from mgpu_pipe.objectives.base import Objective


class TowerFeatures:
    """Stands before the vision tower of LLaVA; knows no features until they were loaded or measured.

    Args:
        model: whose ``vision_tower`` is frozen.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        whole = cast(Any, model)
        config, tower, bridge = whole.config, whole.model.vision_tower, whole.model.multi_modal_projector
        layers, vision = config.vision_feature_layer, config.vision_config
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        rows = picture_places(vision.model_type, picture_shape(config)[1], int(vision.patch_size), "full")
        self._shape = (len(self._layers), rows, int(vision.hidden_size))
        self._tables: dict[Split, NDArray[np.float32]] = {}
        """Of each picture, by its number."""
        self._split: Split | None = None
        self._numbers: NDArray[np.int64] | None = None
        """Of the pictures that the next forward pass shows; empty for the blank one."""
        self._writes = False
        self._tower, self._run, self._next = tower, tower.forward, next(bridge.parameters())
        tower.forward = self._forward

    @contextmanager
    def of(self, split: Split) -> Iterator[None]:
        """Inside, micro-batches are of that split."""
        self._split = split
        try:
            yield
        finally:
            self._split = self._numbers = None

    def show(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Before a forward pass over a micro-batch: these are its pictures."""
        if self._split in self._tables:
            shown = batch["shown"]
            there = torch.arange(shown.shape[1], device=shown.device) < batch["pictures"].unsqueeze(1)
            self._numbers = shown[there].cpu().numpy()

    def _forward(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> Any:
        numbers, self._numbers = self._numbers, None
        if numbers is None:
            return self._run(pixel_values, *args, **inputs)
        table = self._tables[cast(Split, self._split)]
        if self._writes:
            seen = self._run(pixel_values, *args, **inputs)
            if len(numbers):
                states = torch.stack([seen.hidden_states[layer] for layer in self._layers], 1)
                table[numbers] = states.detach().float().cpu().numpy()
            return seen
        found = torch.from_numpy(table[numbers]) if len(numbers) else torch.zeros(1, *self._shape)
        found = found.to(pixel_values.device, self._next.dtype)
        by_layer = {layer: found[:, at] for at, layer in enumerate(self._layers)}
        return BaseModelOutputWithPooling(hidden_states=cast(Any, by_layer))

    def load(self, start: RunStart) -> bool:
        """Map what the run's folder keeps, as every rank sees it alike; whether that is all that the run needs.

        Raises:
            ConfigError: the tower learns.
        """
        if any(parameter.requires_grad for parameter in self._tower.parameters()):
            raise ConfigError("data.cache_features", True, "freeze all of it, or use false", "its tower learns")
        self._tables = {split: table for split in SPLITS if (table := self._mapped(_file(start, split))) is not None}
        needed = [split for split in SPLITS if len(start.needed(split))]
        return all(exchange_json(all(split in self._tables for split in needed), None))

    def _mapped(self, path: Path) -> NDArray[np.float32] | None:
        try:
            table: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            return None
        return table if table.shape[1:] == self._shape and table.dtype == np.float32 else None

    def measure(self, start: RunStart, strategy: Any, objective: Objective) -> None:
        """Compute all that the run needs. A collective call."""
        mode = objective.training
        objective.eval()
        for split in SPLITS:
            needed = start.needed(split)
            if len(needed):
                self._measure(start, strategy, objective, split)
        objective.train(mode)

    def _measure(self, start: RunStart, strategy: Any, objective: Objective, split: Split) -> None:
        """Every rank writes the rows of its own pictures into one file, which gets its name when it is whole."""
        samples = objective.samples(start.config, start.prepared.open(start.config, split))
        path = _file(start, split)
        partial = path.with_suffix(".partial")
        pictures = int(cast(Any, start.prepared).shown_in(split).pictures.max(initial=0)) + 1
        if strategy.is_global_zero:
            np.lib.format.open_memmap(partial, "w+", np.float32, (pictures, *self._shape)).flush()
        strategy.barrier()
        table = np.lib.format.open_memmap(partial, "r+")
        self._tables[split], self._writes = table, True
        with self.of(split):
            for step_batch in start.once(samples, start.needed(split)):
                strategy.run_evaluation(strategy.batch_to_device(step_batch))
        self._writes = False
        table.flush()
        strategy.barrier()
        if strategy.is_global_zero:
            partial.replace(path)
            flush_folder(path.parent)
        strategy.barrier()
        found = self._mapped(path)
        assert found is not None
        self._tables[split] = found


def _file(start: RunStart, split: Split) -> Path:
    """Named by the samples, what is made of them, how many the run asks for, and the model."""
    config = start.config
    made = (asdict(config.model), config.checkpoint.init_from, config.seed, asdict(config.data))
    which = digest_of(start.prepared.digest, start.prepared.validation_digest, start.max_steps, *made)
    return start.folder / f"features-{split}-{which[:DIGITS]}.npy"
