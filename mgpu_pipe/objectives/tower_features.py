"""What a frozen tower makes of a run's pictures, computed once before the first step (``data.cache_features``).

The strategy that trains computes them, as it would in each step, and the run's folder keeps a file for each split; a
run that goes on maps it again. From then on the tower is not run: its forward pass looks its pictures up. What is kept
is as little as the parts that learn read: of a classifier what its last layer is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from mgpu_pipe.checkpoint.exchange import exchange_json
from mgpu_pipe.config.replace_file import flush_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.batch_spec import Field
from mgpu_pipe.data.cache import digest_of
from mgpu_pipe.data.image.keys import ImageConfig
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.step_batch import StepBatch
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.families.pictures import picture_places
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.first_weights import DIGITS, SPLITS, RunStart


class TowerFeatures(ABC):
    """Stands before a frozen vision tower; knows no features until they were loaded or measured.

    Args:
        module: whose forward pass, given ``pixel_values``, they save.
        shape: of what is kept of one picture.
        frozen: the parameters that it is made with, which may not learn.
    """

    freezes = "vision"
    """What ``model.freeze`` has to name."""

    def __init__(self, module: torch.nn.Module, shape: tuple[int, ...], frozen: Iterable[torch.nn.Parameter]) -> None:
        self._shape, self._frozen = shape, list(frozen)
        self._tables: dict[Split, NDArray[np.float32]] = {}
        """Of each picture, by its number."""
        self._split: Split | None = None
        self._numbers: NDArray[np.int64] | None = None
        """Of the pictures that the next forward pass shows, below 0 for one that counts nothing; empty for the blank
        one."""
        self.measures = False
        """Whether a forward pass is there for its features alone."""
        self._run = module.forward
        module.forward = self._forward

    @abstractmethod
    def _computed(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        """What the forward pass gives, and what is kept of it, (pictures, ...)."""

    @abstractmethod
    def _given(self, found: torch.Tensor) -> Any:
        """What the forward pass gives for features that were kept."""

    @property
    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """Of the features, for those who read them."""

    def _pictures(self, start: RunStart, split: Split, samples: SampleSet) -> int:
        """How many there are."""
        return len(samples)

    def _shown(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The numbers of a micro-batch's pictures."""
        return batch["shown"]

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
            self._numbers = self._shown(batch).cpu().numpy()

    def _forward(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> Any:
        numbers, self._numbers = self._numbers, None
        if numbers is None:
            return self._run(pixel_values, *args, **inputs)
        table = self._tables[cast(Split, self._split)]
        if self.measures:
            given, seen = self._computed(pixel_values, *args, **inputs)
            counted = numbers >= 0
            if counted.any():
                table[numbers[counted]] = seen.detach().float().cpu().numpy()[counted]
            return given
        found = torch.from_numpy(table[numbers.clip(0)]) if len(numbers) else torch.zeros(1, *self._shape)
        return self._given(found.to(pixel_values.device, self._dtype))

    def check(self) -> None:
        """Raises ConfigError if the tower learns."""
        if any(parameter.requires_grad for parameter in self._frozen):
            fix = f"use model.freeze=[{self.freezes}], or false"
            raise ConfigError("data.cache_features", True, fix, "its tower learns")

    def load(self, start: RunStart) -> bool:
        """Map what the run's folder keeps, as every rank sees it alike; whether that is all that the run needs."""
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
        pictures = self._pictures(start, split, samples)
        if strategy.is_global_zero:
            np.lib.format.open_memmap(partial, "w+", np.float32, (pictures, *self._shape)).flush()
        strategy.barrier()
        table = np.lib.format.open_memmap(partial, "r+")
        self._tables[split], self.measures = table, True
        with self.of(split):
            for step_batch in start.once(samples, start.needed(split)):
                strategy.run_evaluation(strategy.batch_to_device(step_batch))
        self.measures = False
        table.flush()
        strategy.barrier()
        if strategy.is_global_zero:
            partial.replace(path)
            flush_folder(path.parent)
        strategy.barrier()
        found = self._mapped(path)
        assert found is not None
        self._tables[split] = found


class LlavaFeatures(TowerFeatures):
    """The layers of LLaVA's tower that its projector reads, all rows of each."""

    def __init__(self, model: torch.nn.Module) -> None:
        whole = cast(Any, model)
        config, tower = whole.config, whole.model.vision_tower
        layers, vision = config.vision_feature_layer, config.vision_config
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        self._reader = whole.model.multi_modal_projector
        rows = picture_places(vision.model_type, picture_shape(config)[1], int(vision.patch_size), "full")
        super().__init__(tower, (len(self._layers), rows, int(vision.hidden_size)), tower.parameters())

    def _pictures(self, start: RunStart, split: Split, samples: SampleSet) -> int:
        return int(cast(Any, start.prepared).shown_in(split).pictures.max(initial=0)) + 1

    def _shown(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shown = batch["shown"]
        return shown[torch.arange(shown.shape[1], device=shown.device) < batch["pictures"].unsqueeze(1)]

    def _computed(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        seen = self._run(pixel_values, *args, **inputs)
        return seen, torch.stack([seen.hidden_states[layer] for layer in self._layers], 1)

    def _given(self, found: torch.Tensor) -> Any:
        by_layer = {layer: found[:, at] for at, layer in enumerate(self._layers)}
        return BaseModelOutputWithPooling(hidden_states=cast(Any, by_layer))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._reader.parameters()).dtype


class PooledFeatures(TowerFeatures):
    """Of a model of two towers one vector a picture, before its projection."""

    def __init__(self, model: torch.nn.Module) -> None:
        tower = cast(Any, model).vision_model
        self._model = cast(Any, model)
        super().__init__(tower, (int(tower.config.hidden_size),), tower.parameters())

    def _computed(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        seen = self._run(pixel_values, *args, **inputs)
        return seen, seen.pooler_output

    def _given(self, found: torch.Tensor) -> Any:
        # AltCLIP takes the second of those that are there.
        return BaseModelOutputWithPooling(last_hidden_state=found[:, None], pooler_output=found)

    @property
    def _dtype(self) -> torch.dtype:
        reader = getattr(self._model, "visual_projection", None)  # SigLIP has none
        return cast(torch.dtype, self._model.logit_scale.dtype if reader is None else next(reader.parameters()).dtype)


class ClassifierFeatures(TowerFeatures):
    """What a classifier's last layer, which alone learns, is given."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._classifier = cast(Any, model).classifier
        others = {name: one for name, one in model.named_parameters() if not name.startswith("classifier.")}
        self.freezes = ",".join(dict.fromkeys(f"{name.partition('.')[0]}.*" for name in others))
        super().__init__(model, (self._classifier.in_features,), others.values())

    def _computed(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        given: list[torch.Tensor] = []
        # Before any hook that cuts its input.
        hook = self._classifier.register_forward_pre_hook(lambda _, seen: given.append(seen[0]), prepend=True)
        output = self._run(pixel_values, *args, **inputs)
        hook.remove()
        return output, given[0]

    def _given(self, found: torch.Tensor) -> Any:
        return ImageClassifierOutput(logits=self._classifier(found))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._classifier.parameters()).dtype


class SeesPictures(Objective):
    """Base of objectives that can keep what a frozen tower makes of pictures."""

    features: TowerFeatures | None = None

    def needs_first_weights(self, start: RunStart) -> bool:
        return self.features is not None and not self.features.load(start)

    def first_weights(self, start: RunStart) -> None:
        if self.features is not None:
            self.features.measure(start, self.trainer.strategy, self)

    def training_step(self, step_batch: StepBatch, batch_idx: int) -> dict[str, Any]:
        with self.features.of("train") if self.features else nullcontext():
            return super().training_step(step_batch, batch_idx)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        with self.features.of("validation") if self.features else nullcontext():
            super().validation_step(step_batch, batch_idx)

    def shown(self) -> dict[str, Field]:
        """Of a micro-batch, where a sample has one picture: its number, int64, (rows,)."""
        return {"shown": Field(sequence_dim=None, padding=-1)} if self.features else {}


def keeps_features(config: RunConfig) -> bool:
    """Of pictures, by ``data.cache_features``."""
    return isinstance(config.data, ImageConfig) and config.data.cache_features


def _file(start: RunStart, split: Split) -> Path:
    """Named by the samples, what is made of them, how many the run asks for, and the model."""
    config = start.config
    made = (asdict(config.model), config.checkpoint.init_from, config.seed, asdict(config.data))
    which = digest_of(start.prepared.digest, start.prepared.validation_digest, start.max_steps, *made)
    return start.folder / f"features-{split}-{which[:DIGITS]}.npy"
