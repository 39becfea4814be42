"""Cached features of a frozen vision tower, computed once before the first step (``data.cache_features``).

The training strategy computes them as in a step. The run's folder has a file of features with hashes for each split; a
resume maps it again. From then on the tower does not run: its forward pass looks features up. Only the inputs of the
learning parts are stored, e.g. those of a classifier's last layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from typing_extensions import Self

from mgpu_pipe.architectures.pictures import picture_places
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.step_batch import Field, StepBatch
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.fields import picture_shape
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.first_weights import SPLITS, RunStart, is_whole, write_hashes
from mgpu_pipe.parallel.rank_exchange import exchange_json
from mgpu_pipe.system.local_files import flush_folder

MATHEMATICS = 1
"""Version of the features. Raise it when the numbers change."""
MERGE_BYTES = 16 << 20
"""Bytes that are read at once from the rows that a rank measured."""


class TowerFeatures(ABC):
    """Cache in front of a frozen vision tower; empty until features are loaded or measured.

    Args:
        module: the module whose forward pass on ``pixel_values`` the cache replaces.
        shape: shape of one picture's features.
        frozen: parameters that decide the features, which must not learn.
    """

    freezes = "vision"
    """Value that ``model.freeze`` must contain."""

    def __init__(self, module: torch.nn.Module, shape: tuple[int, ...], frozen: Iterable[torch.nn.Parameter]) -> None:
        self._shape, self._frozen = shape, list(frozen)
        self._tables: dict[Split, NDArray[np.float32]] = {}
        """Features by picture number."""
        self._record = np.dtype([("number", np.int64), ("features", np.float32, shape)])
        self._measured: BinaryIO | None = None
        """File of the features that this rank measures; None where another rank counts the same pictures."""
        self._split: Split | None = None
        self._numbers: NDArray[np.int64] | None = None
        """Numbers of the pictures in the next forward pass; below 0 if one counts nothing, empty for the blank one."""
        self.is_measuring = False
        """Whether forward passes run only for their features."""
        self._run = module.forward
        module.forward = self._forward

    @abstractmethod
    def _compute(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        """Output of the forward pass, and the features to cache, (pictures, ...)."""

    @abstractmethod
    def _output_of(self, features: torch.Tensor) -> Any:
        """Output of the forward pass from cached features."""

    @property
    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """Data type of the features for the parts that read them."""

    def _num_pictures(self, start: RunStart, split: Split, samples: SampleSet) -> int:
        """Number of pictures of a split."""
        return len(samples)

    def _picture_numbers(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Numbers of a micro-batch's pictures."""
        return batch["shown"]

    @contextmanager
    def on_split(self, split: Split) -> Iterator[None]:
        """Context in which micro-batches belong to ``split``."""
        self._split = split
        try:
            yield
        finally:
            self._split = self._numbers = None

    def set_pictures(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Announces the pictures of the micro-batch before its forward pass."""
        if self.is_measuring or self._split in self._tables:
            self._numbers = self._picture_numbers(batch).cpu().numpy()

    def _forward(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> Any:
        numbers, self._numbers = self._numbers, None
        if numbers is None:
            return self._run(pixel_values, *args, **inputs)
        if self.is_measuring:
            output, seen = self._compute(pixel_values, *args, **inputs)
            valid = numbers >= 0
            if valid.any() and self._measured is not None:
                records = np.empty(valid.sum(), self._record)
                records["number"] = numbers[valid]
                records["features"] = seen.detach().float().cpu().numpy()[valid]
                self._measured.write(records.tobytes())
            return output
        table = self._tables[cast(Split, self._split)]
        features = torch.from_numpy(table[numbers.clip(0)]) if len(numbers) else torch.zeros(1, *self._shape)
        return self._output_of(features.to(pixel_values.device, self._dtype))

    def check(self) -> None:
        """Raises ConfigError if the tower learns."""
        if any(parameter.requires_grad for parameter in self._frozen):
            fix = f"use model.freeze=[{self.freezes}], or false"
            raise ConfigError("data.cache_features", True, fix, "its tower learns")

    def load(self, start: RunStart) -> bool:
        """Maps the files in the run's folder. Returns whether all ranks have all features of the run."""
        splits = [split for split in SPLITS if len(start.samples_needed(split))]
        files = {split: self.file(start, split) for split in splits}
        if not all(is_whole(path) for path in files.values()):
            return False
        self._tables = {split: table for split, path in files.items() if (table := self._map(path)) is not None}
        return all(exchange_json(all(split in self._tables for split in splits), None))

    def file(self, start: RunStart, split: Split) -> Path:
        """Path of the features of a split. A collective call."""
        decided = (type(self).__name__, self._shape, start.max_steps, start.config.seed, asdict(start.config.data))
        return start.file(f"features-{split}", MATHEMATICS, *decided)

    def _map(self, path: Path) -> NDArray[np.float32] | None:
        try:
            table: NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            return None
        return table if table.shape[1:] == self._shape and table.dtype == np.float32 else None

    def measure(self, start: RunStart, strategy: Any, objective: Objective) -> None:
        """Computes all features of the run. A collective call."""
        mode = objective.training
        objective.eval()
        for split in SPLITS:
            needed = start.samples_needed(split)
            if len(needed):
                self._measure(start, strategy, objective, split)
        objective.train(mode)

    def _measure(self, start: RunStart, strategy: Any, objective: Objective, split: Split) -> None:
        """Each rank writes the rows that it measures; rank 0 merges them into the file of the split.

        Ranks on several nodes cannot map one file for writing: NFS writes whole pages, also another node's rows.
        """
        samples = objective.samples(start.config, start.prepared.open(start.config, split))
        path = self.file(start, split)
        partial = path.with_suffix(".partial")
        pictures = self._num_pictures(start, split, samples)
        parts = [path.with_suffix(f".partial-{rank}") for rank in range(strategy.world_size)]
        with parts[strategy.global_rank].open("wb") as file, self.on_split(split):
            self.is_measuring, self._measured = True, file if strategy.counts_its_samples else None
            for step_batch in start.step_batches(samples, start.samples_needed(split)):
                strategy.run_evaluation(strategy.batch_to_device(step_batch))
            self.is_measuring, self._measured = False, None
        strategy.barrier()
        if strategy.is_global_zero:
            table = np.lib.format.open_memmap(partial, "w+", np.float32, (pictures, *self._shape))
            for part in parts:
                self._merge(part, table)
            table.flush()
            partial.replace(path)
            flush_folder(path.parent)
        strategy.barrier()
        write_hashes(path)
        mapped = self._map(path)
        assert mapped is not None
        self._tables[split] = mapped

    def _merge(self, part: Path, table: NDArray[np.float32]) -> None:
        """Copies the rows that a rank measured into the table, and removes the rank's file."""
        with part.open("rb") as file:
            while block := file.read(self._record.itemsize * max(1, MERGE_BYTES // self._record.itemsize)):
                records = np.frombuffer(block, self._record)
                table[records["number"]] = records["features"]
        part.unlink()


class LlavaFeatures(TowerFeatures):
    """Layers of LLaVA's tower that its projector reads, all rows of each."""

    def __init__(self, model: torch.nn.Module) -> None:
        whole = cast(Any, model)
        config, tower = whole.config, whole.model.vision_tower
        layers, vision = config.vision_feature_layer, config.vision_config
        self._layers = [layers] if isinstance(layers, int) else list(layers)
        self._reader = whole.model.multi_modal_projector
        rows = picture_places(vision.model_type, picture_shape(config)[1] // int(vision.patch_size), lambda _: None)
        super().__init__(tower, (len(self._layers), rows, int(vision.hidden_size)), tower.parameters())

    def _num_pictures(self, start: RunStart, split: Split, samples: SampleSet) -> int:
        return int(cast(Any, start.prepared).visual_index(split).pictures.max(initial=0)) + 1

    def _picture_numbers(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        numbers = batch["shown"]
        return numbers[torch.arange(numbers.shape[1], device=numbers.device) < batch["pictures"].unsqueeze(1)]

    def _compute(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        seen = self._run(pixel_values, *args, **inputs)
        return seen, torch.stack([seen.hidden_states[layer] for layer in self._layers], 1)

    def _output_of(self, features: torch.Tensor) -> Any:
        by_layer = {layer: features[:, index] for index, layer in enumerate(self._layers)}
        return BaseModelOutputWithPooling(hidden_states=cast(Any, by_layer))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._reader.parameters()).dtype


class PooledFeatures(TowerFeatures):
    """One vector per picture of a two-tower model, before its projection."""

    def __init__(self, model: torch.nn.Module) -> None:
        tower = cast(Any, model).vision_model
        self._model = cast(Any, model)
        super().__init__(tower, (int(tower.config.hidden_size),), tower.parameters())

    def _compute(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        seen = self._run(pixel_values, *args, **inputs)
        return seen, seen.pooler_output

    def _output_of(self, features: torch.Tensor) -> Any:
        # AltCLIP reads the second output.
        return BaseModelOutputWithPooling(last_hidden_state=features[:, None], pooler_output=features)

    @property
    def _dtype(self) -> torch.dtype:
        reader = getattr(self._model, "visual_projection", None)  # SigLIP has none
        return cast(torch.dtype, self._model.logit_scale.dtype if reader is None else next(reader.parameters()).dtype)


class ClassifierFeatures(TowerFeatures):
    """Inputs of a classifier's last layer, the only layer that learns."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._classifier = cast(Any, model).classifier
        others = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("classifier.")}
        self.freezes = ",".join(dict.fromkeys(f"{name.partition('.')[0]}.*" for name in others))
        super().__init__(model, (self._classifier.in_features,), others.values())

    def _compute(self, pixel_values: torch.Tensor, *args: Any, **inputs: Any) -> tuple[Any, torch.Tensor]:
        inputs_of_head: list[torch.Tensor] = []
        # It runs before any hook that cuts the input.
        hook = self._classifier.register_forward_pre_hook(lambda _, seen: inputs_of_head.append(seen[0]), prepend=True)
        output = self._run(pixel_values, *args, **inputs)
        hook.remove()
        return output, inputs_of_head[0]

    def _output_of(self, features: torch.Tensor) -> Any:
        return ImageClassifierOutput(logits=self._classifier(features))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._classifier.parameters()).dtype


class PictureObjective(Objective):
    """Base of objectives that can cache the features of a frozen vision tower."""

    features: TowerFeatures | None = None
    measures_weights: Literal["first", "loaded"] = "loaded"  # the tower may have learned before it was frozen

    @classmethod
    def from_config(cls, config: RunConfig, *built: Any, **options: Any) -> Self:
        options["cache_features"] = isinstance(config.data, ImageConfig) and config.data.cache_features
        return cls(*built, *cls.arguments(config.objective), **options)

    def needs_first_weights(self, start: RunStart) -> bool:
        return self.features is not None and not self.features.load(start)

    def first_weights(self, start: RunStart) -> None:
        if self.features is not None:
            self.features.measure(start, self.trainer.strategy, self)

    def of_run(self, start: RunStart) -> None:
        """An evaluation computes its features again."""

    def training_step(self, step_batch: StepBatch, batch_idx: int) -> dict[str, Any]:
        with self.features.on_split("train") if self.features else nullcontext():
            return super().training_step(step_batch, batch_idx)

    def validation_step(self, step_batch: StepBatch, batch_idx: int) -> None:
        with self.features.on_split("validation") if self.features else nullcontext():
            super().validation_step(step_batch, batch_idx)

    def picture_number_field(self) -> dict[str, Field]:
        """Field ``shown``, the number of each sample's only picture, int64, (rows,); none without a cache."""
        return {"shown": Field(sequence_dim=None, padding=-1)} if self.features else {}
