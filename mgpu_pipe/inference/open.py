"""Opens the model of a run's folder, a step's folder or a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.architectures.find import takes_media
from mgpu_pipe.checkpoint.tensor_slices import LocalShard, TensorSlice
from mgpu_pipe.config.hub import is_at_commit, local_folder
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.paths import cache_folder, compile_caches
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.cache import writing_to_cache
from mgpu_pipe.data.text.chat_templates import places_taken
from mgpu_pipe.data.text.tokenizer_folder import chat_of
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.find_model import ModelSource, find_model
from mgpu_pipe.models.model_settings import model_settings, require_model_settings
from mgpu_pipe.models.weights.folder import whole_folder
from mgpu_pipe.system.local_files import is_folder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.checkpoint.load import CheckpointReader
    from mgpu_pipe.checkpoint.tensor_slices import LocalShard
    from mgpu_pipe.data.text.render_chat import ChatTemplate

ReadTensor = Callable[[str, "torch.dtype"], "torch.Tensor"]
"""Returns a whole parameter or buffer by its name in the module, on the host and in the given type."""


@dataclass
class LoadedRun:
    """A model ready for inference, in evaluation mode, with its tokenizer and configuration."""

    model: PreTrainedModel
    source: Path
    """The step's folder, or the Hugging Face folder."""
    tokenizer_folder: Path | None
    config: RunConfig | None
    """The run's frozen configuration; None for a Hugging Face folder."""
    step: int | None
    """Optimizer steps that made the weights; None for a Hugging Face folder."""
    is_trusted: bool = True
    """Whether this user's launches wrote the configuration, so that its file names may be opened."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer; BadInputError if the folder has none."""
        from mgpu_pipe.inference.generation import load_tokenizer

        if self.tokenizer_folder is None:
            raise BadInputError(f"{self.source}: no tokenizer next to it; give the run's folder, which keeps one")
        return load_tokenizer(self.tokenizer_folder)

    def chat(self) -> ChatTemplate | None:
        """:meth:`template`, but None for a run without conversations."""
        return self.template() if self.config is None or self.config.data.holds_conversations() else None

    def template(self) -> ChatTemplate | None:
        """The tokenizer's chat template, None without one; ModelFolderError if it cannot be used."""
        if self.tokenizer_folder is None:
            return None
        config: Any = self.model.config
        taken = places_taken(config.model_type, getattr(config, "audio_config", None)) if takes_media(config) else ()
        return chat_of(self.tokenizer_folder, taken)


@dataclass
class StoredModel:
    """A model whose weights are read on demand, one at a time."""

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
    """Whether the end of a text comes from the tokenizer and not from the model's configuration."""
    maker: Path | None = None
    """The Hugging Face folder that the model was built from; None for a model built from its type."""
    is_trusted: bool = True
    """Whether this user's launches wrote the configuration, so that its file names may be opened."""


def _compile_privately() -> None:
    """Set this process's compile caches to folders that only this user can write."""
    with writing_to_cache(cache_folder(None)):
        os.environ.update(compile_caches(None, os.environ))


def load_run(
    path: Path | str | ModelSource,
    device: torch.device | str = "cpu",
    frozen: Path | None = None,
    average: bool = False,
) -> LoadedRun:
    """Open a run's folder (its latest complete step), a step's folder, or a Hugging Face folder.

    Args:
        frozen: the model folder with the frozen weights that a step leaves out; None uses the folder that a trusted
            step names.
        average: load the average of the weights (``optimizer.ema``) instead of the weights.

    Raises:
        BadInputError: the folder is of another kind, or has no average although ``average`` is set.
        CheckpointError: the step is damaged.
        ModelFolderError: the model folder is incomplete.
    """
    _compile_privately()
    source = path if isinstance(path, ModelSource) else find_model(path)
    if source.config is None:
        _refuse_frozen(frozen, source.folder)
        if average:
            raise no_average(source.folder)
        return _load_model_folder(source, device)
    return _load_checkpoint(source, device, frozen, average)


def _load_model_folder(source: ModelSource, device: torch.device | str) -> LoadedRun:
    from mgpu_pipe.models.weights.pretrained import load_pretrained

    model = load_pretrained(ModelConfig(name=source.folder.name, path=str(source.folder)), device).eval()
    return LoadedRun(model, source.folder, source.tokenizer, None, None)


def _load_checkpoint(source: ModelSource, device: torch.device | str, frozen: Path | None, average: bool) -> LoadedRun:
    from mgpu_pipe.models.build import materialise_empty

    stored, reader = _open_checkpoint(source, frozen, average)
    model = materialise_empty(stored.model, "cpu")
    parameters = dict(model.named_parameters())
    stored_names = {
        n for n in reader.names("model") if n in parameters and reader.shape(n) == tuple(parameters[n].shape)
    }
    averages = average_names(reader) if average else {}
    reader.read([_whole_shard(name, parameters[name].data) for name in stored_names - averages.keys()], "model")
    reader.read(
        [_whole_shard(averages[name], p.data) for name, p in parameters.items() if name in averages], "optimizer"
    )
    for name in parameters.keys() - stored_names:
        parameters[name].data.copy_(stored.read(name, parameters[name].dtype))
    model.to(device)  # type: ignore[arg-type]
    return LoadedRun(
        model.eval(), stored.source, stored.tokenizer_folder, stored.config, stored.step, stored.is_trusted
    )


def average_names(reader: CheckpointReader) -> dict[str, str]:
    """Stored names of the averages by weight, but those never updated; BadInputError without an average."""
    from mgpu_pipe.optim.moving_average import EMA

    names = {name.removesuffix(f"/{EMA}"): name for name in reader.names("optimizer") if name.endswith(f"/{EMA}")}
    if not names:
        raise no_average(reader.folder)
    return names


def no_average(folder: Path) -> BadInputError:
    """The refusal of ``--weights ema`` for weights without an average."""
    return BadInputError(f"--weights=ema: {folder} holds no average of weights; train with optimizer.ema.decay=0.999")


def open_model(path: Path | str | ModelSource, frozen: Path | None = None, average: bool = False) -> StoredModel:
    """Open a folder like :func:`load_run`, with weights on demand; those of a Hugging Face folder stay in memory.

    Raises:
        BadInputError: the folder is of another kind, or has no average although ``average`` is set.
        CheckpointError: the step is damaged.
        ModelFolderError: the model folder is incomplete.
    """
    source = path if isinstance(path, ModelSource) else find_model(path)
    folder = source.folder
    if source.config is not None:
        return _open_checkpoint(source, frozen, average)[0]
    _refuse_frozen(frozen, folder)
    if average:
        raise no_average(folder)
    from mgpu_pipe.models.build import build_meta

    loaded = _load_model_folder(source, "cpu")
    twin = with_buffers(build_meta(ModelConfig(name=folder.name, path=str(folder))))
    return StoredModel(twin, read_from(loaded.model), folder, loaded.tokenizer_folder, None, None, maker=folder)


def read_from(model: PreTrainedModel) -> ReadTensor:
    """A reader of a model that is whole in memory."""
    state = model.state_dict()

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        return state[name].to(dtype)

    return read


def _open_checkpoint(source: ModelSource, frozen: Path | None, average: bool) -> tuple[StoredModel, CheckpointReader]:
    """A step's weights on demand; reading a chunk checks it."""
    from mgpu_pipe.checkpoint.load import CheckpointReader
    from mgpu_pipe.models.build import run_model
    from mgpu_pipe.models.weights.pretrained import limit_modules, restore_buffers

    step_folder, config = source.folder, source.config
    assert config is not None
    reader = CheckpointReader(step_folder)
    with limit_modules(len(reader.names("model"))):
        model = run_model(config)
    base = _frozen_weights(reader, config, source.is_trusted, frozen)
    averages = average_names(reader) if average else {}
    reader.require({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, "model")
    require_model_settings(reader.state.get("model_config"), model_settings(model.config), step_folder)
    trained = model
    if config.peft.name == "qlora":  # compute in fp32 with the dequantised values
        model = run_model(replace(config, peft=config.peft.without_quantisation()))
    model = with_buffers(model)
    restore_buffers(model, reader.state, step_folder)
    maker = None if config.model.path is None else local_folder(config.model.path)
    return StoredModel(
        model,
        _read_from_checkpoint(reader, trained, model, base, averages),
        step_folder,
        source.tokenizer,
        config,
        reader.manifest.step,
        adopts_special_tokens=not source.names_a_model,
        maker=maker,
        is_trusted=source.is_trusted,
    ), reader


def _read_from_checkpoint(
    reader: CheckpointReader,
    trained: PreTrainedModel,
    model: PreTrainedModel,
    base: Mapping[str, torch.Tensor],
    averages: Mapping[str, str],
) -> ReadTensor:
    """The function that reads a weight of ``model`` by its name, in the type it is asked for.

    Args:
        trained: the model as it was trained, with quantised weights.
        base: frozen weights that the checkpoint leaves out.
        averages: names of the weights' averages, which replace them.
    """
    import torch

    from mgpu_pipe.models.adapters.qlora import pack, packed_parameters, packed_weight, unpack

    first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    stored_as = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())

    def read(name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in buffers:  # the configuration or the step's state sets them
            return buffers[name].to(dtype)
        quantised = packed_weight(trained, stored_as[name])
        left_out = reader.left_out is not None and stored_as[name] in reader.left_out.names
        if left_out and quantised is None:
            return base[stored_as[name]].to(dtype)
        if quantised is not None:
            names = packed_parameters(quantised)
            if left_out:
                parts = [pack(trained, part_name, base[quantised]) for part_name in names]
            else:
                parts = [torch.empty(reader.shape(part_name), dtype=torch.uint8) for part_name in names]
                reader.read([_whole_shard(*named_part) for named_part in zip(names, parts, strict=True)], "model")
            return unpack(trained, quantised, *parts).to(dtype)
        tensor = torch.empty(reader.shape(stored_as[name]), dtype=dtype)
        if stored_as[name] in averages:
            reader.read([_whole_shard(averages[stored_as[name]], tensor)], "optimizer")
        else:
            reader.read([_whole_shard(stored_as[name], tensor)], "model")
        return tensor

    return read


def _frozen_weights(
    reader: CheckpointReader, config: RunConfig, is_trusted: bool, folder: Path | None
) -> dict[str, torch.Tensor]:
    """Weights of the model folder that the step leaves out; BadInputError for other or untrusted ones."""
    from mgpu_pipe.models.adapters.qlora import is_scales
    from mgpu_pipe.models.weights.pretrained import load_pretrained

    left_out = reader.left_out
    if left_out is None:
        _refuse_frozen(folder, reader.folder)
        return {}
    if folder is None and not is_trusted:
        raise BadInputError(
            f"{reader.folder}: leaves out its frozen weights, and this run of somebody else's may name no folder; "
            f"give the one that it means by --frozen-weights ({left_out.folder})"
        )
    if folder is None and is_at_commit(left_out.folder) and left_out.folder == config.model.path:
        folder = whole_folder(left_out.folder)
    folder = Path(left_out.folder) if folder is None else folder
    if not is_folder(folder):
        raise BadInputError(
            f"{reader.folder}: leaves out its frozen weights, and {folder} is gone; give a copy by --frozen-weights"
        )
    left_out.require(folder, cache_folder(config.data.cache_dir), reader.folder)
    source = replace(config.model, type=None, path=str(folder), config={}, freeze=[])
    model = load_pretrained(source, "cpu", config.model, description(config.objective.name).model_class, config.seed)
    state = model.state_dict()
    return {name: state[name] for name in left_out.names if not is_scales(name)}


def _refuse_frozen(frozen: Path | None, source: Path) -> None:
    if frozen is not None:
        raise BadInputError(f"--frozen-weights={frozen}: {source} leaves no weights out; leave the option out")


def _whole_shard(name: str, tensor: torch.Tensor) -> LocalShard:
    shape = tuple(tensor.shape)
    return LocalShard(TensorSlice.whole(name, shape), shape, tensor)


def with_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """The meta model with real buffers, in evaluation mode."""
    from mgpu_pipe.models.build import materialise_buffers, recipe_of

    materialise_buffers(model, recipe_of(model), "cpu")
    return model.eval()


def open_draft(folder: Path, run: LoadedRun) -> PreTrainedModel:
    """The draft model of a run's, step's or model's folder, on the device that takes the model's inputs.

    It is smaller and proposes tokens, several of which the model checks in one forward pass: Leviathan et al. 2023,
    https://arxiv.org/abs/2211.17192. Tokens are the model's own greedy choices.

    Raises:
        BadInputError: one of the two models does not continue texts or cannot take tokens back, or they have different
            tokens.
    """
    from mgpu_pipe.inference.generation import input_device
    from mgpu_pipe.system.compat.transformers_private import is_stateful

    if next(run.model.parameters()).is_meta:  # transformers sends the proposed tokens there
        raise BadInputError(
            f"--draft={folder}: the first weights of {run.source} are on the disk; place them elsewhere"
        )
    draft = load_run(find_model(folder), input_device(run.model))
    for model, place in ((run.model, run.source), (draft.model, draft.source)):
        name = type(model).__name__
        is_text = model.can_generate() and not model.config.is_encoder_decoder and model.main_input_name == "input_ids"
        if not is_text or takes_media(model.config):
            raise BadInputError(f"--draft={folder}: {place} is a {name}; drafts are for causal language models alone")
        if is_stateful(model):
            raise BadInputError(f"--draft={folder}: the state of a {name} takes no token back; leave --draft out")
    sizes = [int(model.config.get_text_config().vocab_size) for model in (draft.model, run.model)]
    if sizes[0] != sizes[1] or draft.tokenizer().get_vocab() != run.tokenizer().get_vocab():
        raise BadInputError(
            f"--draft={folder}: has other tokens ({sizes[0]}) than {run.source} ({sizes[1]}); give a model with the "
            "same tokenizer"
        )
    return draft.model
