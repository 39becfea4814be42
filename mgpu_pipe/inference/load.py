"""Opens what a user names: a run's folder, one of its steps, or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.freeze import load as load_frozen
from mgpu_pipe.config.paths import RunPaths
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import BadInputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class LoadedRun:
    """A model ready for inference, in evaluation mode, with what belongs to it."""

    model: PreTrainedModel
    source: Path
    """The step's folder, or the Hugging Face folder."""
    tokenizer_folder: Path | None
    config: RunConfig | None
    """The run's frozen configuration; None for a Hugging Face folder."""
    step: int | None
    """Optimizer steps behind the weights; None for a Hugging Face folder."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            BadInputError: neither the run nor the model folder keeps one.
        """
        from mgpu_pipe.inference.generation import load_tokenizer

        if self.tokenizer_folder is None:
            raise BadInputError(f"{self.source}: no tokenizer beside it; give the run's folder, which keeps one")
        return load_tokenizer(self.tokenizer_folder)


def newest_run(root: Path = Path("outputs")) -> Path:
    """The run under ``root`` whose newest checkpoint is the latest.

    Raises:
        BadInputError: there is no run with a checkpoint.
    """
    steps = [step for step in root.glob("*/*/checkpoints/step-*/manifest.json") if step.is_file()]
    if not steps:
        raise BadInputError(f"{root}: no run with a checkpoint; train one, or give a run's, step's or model's folder")
    return max(steps, key=lambda manifest: manifest.stat().st_mtime).parents[2]


def load_run(path: Path | str, device: torch.device | str = "cpu") -> LoadedRun:
    """Open a run's folder (its newest whole step), a step's folder, or a Hugging Face folder.

    Raises:
        BadInputError: the folder is none of these; of its kinds, CheckpointError for a damaged step and
            ModelFolderError for a model folder that is not whole.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise BadInputError(f"{path}: no such folder; give a run's, step's or Hugging Face model's folder")
    if (folder / "config.json").is_file():
        return _load_model_folder(folder, device)
    is_run = RunPaths(folder).config.is_file() or RunPaths(folder).checkpoints.is_dir()
    if not is_run and not (folder / "manifest.json").exists():
        raise BadInputError(
            f"{path}: neither a run's folder (checkpoints/), a step's (manifest.json) nor a model's (config.json)"
        )
    return _load_checkpoint(folder, device)


def _load_model_folder(folder: Path, device: torch.device | str) -> LoadedRun:
    from mgpu_pipe.models.build import load_pretrained

    model = load_pretrained(ModelConfig(name=folder.name, path=str(folder)), device).eval()
    return LoadedRun(model, folder, _tokenizer_folder(folder), None, None)


def _load_checkpoint(folder: Path, device: torch.device | str) -> LoadedRun:
    from mgpu_pipe.checkpoint.boxes import Box, Piece
    from mgpu_pipe.checkpoint.load import CheckpointReader
    from mgpu_pipe.checkpoint.select import resolve_source
    from mgpu_pipe.models.build import build_meta, materialise_empty

    step_folder = resolve_source(folder, key="folder")
    config = load_frozen(step_folder / "config.yaml")
    model = materialise_empty(build_meta(config.model), "cpu")
    reader = CheckpointReader(step_folder)
    pieces = [
        Piece(Box.whole(name, tuple(parameter.shape)), tuple(parameter.shape), parameter.data)
        for name, parameter in model.named_parameters()
    ]
    reader.require({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, "model")
    reader.read(pieces, "model")
    run = step_folder.parents[1]
    model.to(device)  # type: ignore[arg-type]
    return LoadedRun(
        model.eval(), step_folder, _tokenizer_folder(RunPaths(run).tokenizer), config, reader.manifest.step
    )


def _tokenizer_folder(folder: Path) -> Path | None:
    has_one = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))
    return folder if has_one else None
