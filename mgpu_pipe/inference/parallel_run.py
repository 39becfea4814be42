"""Opens a run's model under a strategy, split over the processes of an initialised process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.inference.find_model import ModelSource, model_of_folder
from mgpu_pipe.models.build import materialise, run_model
from mgpu_pipe.models.model_settings import model_settings, require_model_settings
from mgpu_pipe.models.weights.pretrained import restore_buffers
from mgpu_pipe.models.weights.slices import fill_from_folder
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.save_and_resume import restore_weights
from mgpu_pipe.training.strategy import EngineStrategy
from mgpu_pipe.training.trainer import strategy_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput


@dataclass(frozen=True)
class ParallelRun:
    """A run's model on this rank's part of the mesh, in evaluation mode.

    Attributes:
        forward: replaces the model's forward pass on whole texts; None for the model's own.
        share, shares: the inputs at ``share``, ``share + shares``, ... are this rank's; ranks of one share compute
            the same inputs together.
        is_share_first: whether this is the first of the ranks of its share.
    """

    model: PreTrainedModel
    strategy: EngineStrategy
    forward: Callable[..., Any] | None
    share: int
    shares: int
    is_share_first: bool


class EncoderDecoderForward:
    """The forward pass of a sharded encoder-decoder model, whose encoder ``generate()`` cannot call alone.

    The first pass of a batch runs encoder and decoder; the next ones run the decoder on the encoder's result, with a
    key-value cache.
    """

    takes_cache = True

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._encoded = model, None

    def __call__(self, encoder_outputs: BaseModelOutput, past_key_values: Any = None, **inputs: Any) -> Any:
        """The model's output; ``encoder_outputs`` holds the source's ids, see :func:`.generation.source_ids`."""
        if past_key_values is None or not past_key_values.get_seq_length():
            assert encoder_outputs.last_hidden_state is not None
            inputs["input_ids"] = encoder_outputs.last_hidden_state[..., 0].long()
            output = self._model(**inputs, past_key_values=past_key_values)
            self._encoded = output.encoder_last_hidden_state
            return output
        encoded = (self._encoded,)
        return self._model(**inputs, encoder_outputs=encoded, past_key_values=past_key_values)


def open_parallel(source: ModelSource, config: RunConfig, device: torch.device) -> ParallelRun:
    """Split the model of a run's step over the processes, each of which reads its own parts. A collective call.

    Args:
        config: of :func:`evaluation_config`.

    Raises:
        BadInputError: a strategy, or a step, that this cannot open.
    """
    if config.strategy.engine != "mesh":
        raise ConfigError("strategy", config.strategy.name, "use fsdp, tp or pp", "it trains only")
    dims = ParallelDims.resolve(config.strategy, dist.get_world_size())
    if dims.cp > 1:
        raise ConfigError("strategy.cp", dims.cp, "use tp, fsdp or pp", "context parallelism cuts texts of training")
    reader = None if source.config is None else CheckpointReader(source.folder)
    if reader is not None and reader.left_out is not None:
        raise BadInputError(f"{source.folder}: leaves out its frozen weights; use strategy=ddp")

    def fill(model: Any, place: torch.device) -> None:
        if reader is None:
            fill_from_folder(model, config.model, place)
        else:
            materialise(model, config.seed, place)

    strategy = strategy_class(config.strategy.engine).from_config(
        config, dims, device, materialise=fill, dropout_seed=None, stop_requested=lambda: False
    )
    model = run_model(config).requires_grad_(False)
    if reader is not None:
        require_model_settings(reader.state.get("model_config"), model_settings(model.config), source.folder)
        reader.require({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, "model")
    objective = objective_class(config.objective.name).from_config(config, model, None, lambda step: 1.0)
    strategy.connect(objective)
    strategy.parallelise(model)
    if reader is not None:
        restore_weights(reader, strategy)
        restore_buffers(model, reader.state, source.folder)
    is_together = dims.dp_shard > 1 or dims.ep > 1
    share_of = [0 if is_together else dims.data_parallel_rank(rank) for rank in range(dist.get_world_size())]
    share = share_of[dist.get_rank()]
    return ParallelRun(
        cast("PreTrainedModel", objective.model).eval(),
        strategy,
        strategy.sampling_forward(),
        share,
        len(set(share_of)),
        share_of.index(share) == dist.get_rank(),
    )


def evaluation_config(source: ModelSource, chosen: RunConfig) -> RunConfig:
    """The source's configuration with strategy, processes and launch of ``chosen``, in fp32 and without compiling."""
    config = source.config or replace(chosen, model=model_of_folder(source.folder, chosen.strategy.name))
    return replace(
        config,
        strategy=chosen.strategy,
        launch=chosen.launch,
        precision=chosen.precision,
        model=replace(config.model, compile=False, kernels="torch"),
        trainer=replace(
            config.trainer,
            accelerator=chosen.trainer.accelerator,
            devices=chosen.trainer.devices,
            num_nodes=chosen.trainer.num_nodes,
        ),
    )
