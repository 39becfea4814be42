"""Opens what a user names: a run's folder, one of its steps, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.hub import is_at_commit, local_folder
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import cache_folder
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find import Found, find
from mgpu_pipe.models.hub_folder import whole_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.checkpoint.load import CheckpointReader
    from mgpu_pipe.checkpoint.tensor_slices import LocalShard
    from mgpu_pipe.data.text.chat import ChatTemplate

ReadTensor = Callable[[str, "torch.dtype"], "torch.Tensor"]
"""Gives a parameter or buffer of the module, whole, on the host, in a type."""


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
    own: bool = True
    """This user's launches wrote the configuration: the files that it names are theirs."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            BadInputError: neither the run nor the model folder keeps one.
        """
        from mgpu_pipe.inference.generation import load_tokenizer

        if self.tokenizer_folder is None:
            raise BadInputError(f"{self.source}: no tokenizer beside it; give the run's folder, which keeps one")
        return load_tokenizer(self.tokenizer_folder)

    def chat(self) -> ChatTemplate | None:
        """How the model is talked to: its tokenizer's chat template, of a run only where it trained on conversations.

        Raises:
            ModelFolderError: the template cannot be used.
        """
        if self.tokenizer_folder is None or not (self.config is None or self.config.data.holds_conversations()):
            return None
        return chat_of(self.tokenizer_folder)


@dataclass
class StoredModel:
    """A model whose weights are read one at a time."""

    model: PreTrainedModel
    """Parameters on the meta device, buffers real, in evaluation mode."""
    read: ReadTensor
    source: Path
    """The step's folder, or the Hugging Face folder."""
    tokenizer_folder: Path | None
    config: RunConfig | None
    """The run's frozen configuration; None for a Hugging Face folder."""
    step: int | None
    adopts_special_tokens: bool = False
    """The model's own configuration does not say where texts end: the tokenizer does."""
    maker: Path | None = None
    """The Hugging Face folder that the model was made from; None for one that was made from its type."""
    own: bool = True
    """As of :class:`LoadedRun`."""


def load_run(
    path: Path | str | Found, device: torch.device | str = "cpu", frozen: Path | None = None, average: bool = False
) -> LoadedRun:
    """Open a run's folder (its newest whole step), a step's folder, or a Hugging Face folder.

    Args:
        frozen: the model folder of the frozen weights that a step leaves out; None: where the user's own step says.
        average: take the average of the weights (``optimizer.ema``) in their place.

    Raises:
        BadInputError: the folder is of another kind, or lacks the average asked for; of its kinds, CheckpointError
            for a damaged step and ModelFolderError for a model folder that is not whole.
    """
    found = path if isinstance(path, Found) else find(path)
    if found.config is None:
        _refuse_frozen(frozen, found.folder)
        if average:
            raise _no_average(found.folder)
        return _load_model_folder(found, device)
    return _load_checkpoint(found, found.config, device, frozen, average)


def _load_model_folder(found: Found, device: torch.device | str) -> LoadedRun:
    from mgpu_pipe.models.pretrained import load_pretrained

    model = load_pretrained(ModelConfig(name=found.folder.name, path=str(found.folder)), device).eval()
    return LoadedRun(model, found.folder, found.tokenizer, None, None)


def _load_checkpoint(
    found: Found, config: RunConfig, device: torch.device | str, frozen: Path | None, average: bool
) -> LoadedRun:
    from mgpu_pipe.models.build import materialise_empty

    stored, reader = _open_checkpoint(found, config, frozen, average)
    model = materialise_empty(stored.model, "cpu")
    parameters = dict(model.named_parameters())
    held = {n for n in reader.names("model") if n in parameters and reader.shape(n) == tuple(parameters[n].shape)}
    averages = averages_of(reader) if average else {}
    reader.read([_whole(name, parameters[name].data) for name in held - averages.keys()], "model")
    reader.read([_whole(averages[name], p.data) for name, p in parameters.items() if name in averages], "optimizer")
    for name in parameters.keys() - held:
        parameters[name].data.copy_(stored.read(name, parameters[name].dtype))
    model.to(device)  # type: ignore[arg-type]
    return LoadedRun(model.eval(), stored.source, stored.tokenizer_folder, stored.config, stored.step, stored.own)


def averages_of(reader: CheckpointReader) -> dict[str, str]:
    """The names under which a step has averages of weights, by weight; those that were never updated have none.

    Raises:
        BadInputError: the checkpoint holds no average.
    """
    from mgpu_pipe.parallel.weight_average import EMA

    found = {name.removesuffix(f"/{EMA}"): name for name in reader.names("optimizer") if name.endswith(f"/{EMA}")}
    if not found:
        raise _no_average(reader.folder)
    return found


def _no_average(folder: Path) -> BadInputError:
    return BadInputError(f"--weights=ema: {folder} holds no average of weights; train with optimizer.ema.decay=0.999")


def open_model(path: Path | str | Found, frozen: Path | None = None, average: bool = False) -> StoredModel:
    """Open what :func:`load_run` opens, without holding its weights; those of a Hugging Face folder are held.

    Raises:
        BadInputError: as :func:`load_run`.
    """
    found = path if isinstance(path, Found) else find(path)
    folder = found.folder
    if found.config is not None:
        return _open_checkpoint(found, found.config, frozen, average)[0]
    _refuse_frozen(frozen, folder)
    if average:
        raise _no_average(folder)
    from mgpu_pipe.models.build import build_meta

    loaded = _load_model_folder(found, "cpu")
    twin = _with_buffers(build_meta(ModelConfig(name=folder.name, path=str(folder))))
    return StoredModel(twin, read_from(loaded.model), folder, loaded.tokenizer_folder, None, None, maker=folder)


def read_from(model: PreTrainedModel) -> ReadTensor:
    """Reads from a model that is whole in memory."""
    state = model.state_dict()

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        return state[name].to(dtype)

    return read


def _open_checkpoint(
    found: Found, config: RunConfig, frozen: Path | None, average: bool
) -> tuple[StoredModel, CheckpointReader]:
    """A step's weights, read on demand: every chunk is checked when it is read."""
    import torch

    from mgpu_pipe.checkpoint.load import CheckpointReader
    from mgpu_pipe.models.adapters.qlora import pack, packed_weight, parameters_of, unpack
    from mgpu_pipe.models.build import run_model
    from mgpu_pipe.models.pretrained import at_most
    from mgpu_pipe.models.settings import model_settings, require_model_settings

    step_folder, own = found.folder, found.own
    reader = CheckpointReader(step_folder)
    with at_most(len(reader.names("model"))):
        model = run_model(config)
    base = _frozen_weights(reader, config, own, frozen)
    averages = averages_of(reader) if average else {}
    reader.require({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, "model")
    require_model_settings(reader.state.get("model_config"), model_settings(model.config), step_folder)
    trained = model
    if config.peft.name == "qlora":  # computed with here in fp32, with the values of the bytes
        model = run_model(replace(config, peft=config.peft.unquantised()))
    model = _with_buffers(model)
    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    stored_as = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in buffers:  # not stored, for they follow from the configuration
            return buffers[name].to(dtype)
        quantised = packed_weight(trained, stored_as[name])
        left_out = reader.left_out is not None and stored_as[name] in reader.left_out.names
        if left_out and quantised is None:
            return base[stored_as[name]].to(dtype)
        if quantised is not None:
            names = parameters_of(quantised)
            if left_out:
                parts = [pack(trained, one, base[quantised]) for one in names]
            else:
                parts = [torch.empty(reader.shape(one), dtype=torch.uint8) for one in names]
                reader.read([_whole(*both) for both in zip(names, parts, strict=True)], "model")
            return unpack(trained, quantised, *parts).to(dtype)
        tensor = torch.empty(reader.shape(stored_as[name]), dtype=dtype)
        if stored_as[name] in averages:
            reader.read([_whole(averages[stored_as[name]], tensor)], "optimizer")
        else:
            reader.read([_whole(stored_as[name], tensor)], "model")
        return tensor

    maker = None if config.model.path is None else local_folder(config.model.path)
    return StoredModel(
        model, read, step_folder, found.tokenizer, config, reader.manifest.step, not found.names_a_model, maker, own
    ), reader


def _frozen_weights(
    reader: CheckpointReader, config: RunConfig, own: bool, folder: Path | None
) -> dict[str, torch.Tensor]:
    """The weights of the folder that a step leaves out; empty where it holds all.

    Raises:
        BadInputError: the folder has other weights, or only somebody else's step names it.
    """
    from mgpu_pipe.models.adapters.qlora import is_scales
    from mgpu_pipe.models.pretrained import load_pretrained

    left_out = reader.left_out
    if left_out is None:
        _refuse_frozen(folder, reader.folder)
        return {}
    if folder is None and not own:
        raise BadInputError(
            f"{reader.folder}: leaves out its frozen weights, and this run of somebody else's may name no folder; "
            f"give the one that it means by --frozen-weights ({left_out.folder})"
        )
    if folder is None and is_at_commit(left_out.folder) and left_out.folder == config.model.path:
        folder = whole_folder(left_out.folder)
    folder = Path(left_out.folder) if folder is None else folder
    if not folder.is_dir():
        raise BadInputError(
            f"{reader.folder}: leaves out its frozen weights, and {folder} is gone; give a copy by --frozen-weights"
        )
    left_out.require(folder, cache_folder(config.data.cache_dir), reader.folder)
    source = replace(config.model, type=None, path=str(folder), config={}, freeze=[])
    model = load_pretrained(source, "cpu", config.model, description(config.objective.name).model_class, config.seed)
    state = model.state_dict()
    return {name: state[name] for name in left_out.names if not is_scales(name)}


def _refuse_frozen(given: Path | None, source: Path) -> None:
    if given is not None:
        raise BadInputError(f"--frozen-weights={given}: {source} leaves no weights out; leave the option out")


def _whole(name: str, tensor: torch.Tensor) -> LocalShard:
    from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice

    shape = tuple(tensor.shape)
    return LocalShard(TensorSlice.whole(name, shape), shape, tensor)


def _with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """A meta model with real buffers, in evaluation mode."""
    from mgpu_pipe.models.build import materialise_buffers, recipe_of

    materialise_buffers(model, recipe_of(model), "cpu")
    return model.eval()
