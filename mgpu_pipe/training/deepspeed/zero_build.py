"""Building for ZeRO: the model, whole or one partitioned parameter after another (stage 3), and DeepSpeed's engine.

This is the only module that imports DeepSpeed's engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.checkpoint.live_tensors import tensor_shards
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import draw_parameter, materialise_buffers, recipe_of
from mgpu_pipe.models.weights.pretrained import stored_buffers
from mgpu_pipe.models.weights.slices import FolderWeights, read_folder
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.system.compat.deepspeed_private import make_partitioned
from mgpu_pipe.training.deepspeed.zero_state import fragment_shards

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel


class FrozenWeights:
    """The frozen parameters of a model whose engine is started, whole (ZeRO-1, 2) or partitioned (ZeRO-3)."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        self._masters: Shards = {}
        """This rank's parts of the fp32 values of rounded weights."""

    def keep(self, initial: Shards) -> None:
        """Keep the fp32 values of this rank's parts, of weights that were rounded."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for name, parameter in self._parameters:
            if name not in initial:
                continue  # bytes, which nothing rounds
            start, stop = equal_part(getattr(parameter, "ds_numel", parameter.numel()), rank, ranks)
            self._masters[name] = (start, values_of(initial, name, start, stop - start).clone())

    def resident_tensors(self) -> list[torch.Tensor]:
        """All tensors of frozen weights on this rank, those of compute and the masters."""
        weights = [getattr(parameter, "ds_tensor", parameter) for _, parameter in self._parameters]
        return [*weights, *(values for _, values in self._masters.values())]

    def shards(self) -> list[LocalShard]:
        """This rank's parts, fp32 where there are such values, as live tensors."""
        shards: list[LocalShard] = []
        for name, parameter in self._parameters:
            part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if name in self._masters:
                start, values = self._masters[name]
                shards += fragment_shards(name, shape, start, values)
            elif part is not None:
                start, stop = equal_part(prod(shape), dist.get_rank(), dist.get_world_size())
                shards += fragment_shards(name, shape, start, part.narrow(0, 0, stop - start))
            else:
                shards += tensor_shards(name, parameter)
        return shards

    @torch.no_grad()
    def update_weights(self) -> None:
        """Update the weights from fp32 values that were written into. A collective call."""
        for name, parameter in self._parameters:
            if name not in self._masters:
                continue  # the weights themselves are the masters
            values = self._masters[name][1]
            part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
            if part is not None:
                part.narrow(0, 0, values.numel()).copy_(values)
            else:
                _gather_parts(parameter, values)


def _gather_parts(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Fill a whole parameter from every rank's part. A collective call."""
    ranks = dist.get_world_size()
    size = -(-parameter.numel() // ranks)
    mine = torch.zeros(size, dtype=values.dtype, device=values.device)
    mine[: values.numel()] = values
    gathered = torch.empty(size * ranks, dtype=values.dtype, device=values.device)
    dist.all_gather_into_tensor(gathered, mine)
    parameter.data.view(-1).copy_(gathered[: parameter.numel()])


Shards = dict[str, tuple[int, torch.Tensor]]
"""By parameter: the first element of this rank's part of the flattened tensor, and the part in fp32."""


def equal_part(numel: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and last (exclusive) element of a rank's part of ``numel`` elements; the last parts may be empty."""
    size = -(-numel // ranks)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def partition_model(
    model: nn.Module,
    settings: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int | None = None,
    folder: FolderWeights | None = None,
) -> Shards:
    """Give every rank its part of every parameter, as DeepSpeed's ``zero.Init`` does, and fill the buffers.

    Nothing is sent: a rank draws or reads the rows that hold its part, so the whole model is nowhere, and at most one
    whole parameter's memory is (briefly) reserved.

    Args:
        model: on the meta device; or, with neither ``seed`` nor ``folder``, whole and filled.
        settings: the DeepSpeed configuration.
        dtype: of the partitioned weights.
        seed: keys the initial values that are drawn.
        folder: where the weights are read instead.

    Returns:
        The fp32 values of this rank's parts, where ``dtype`` cannot hold them.
    """
    import deepspeed

    rank, ranks = dist.get_rank(), dist.get_world_size()
    context = deepspeed.zero.Init(config_dict_or_path=dict(settings), dtype=dtype)
    typed = cast("PreTrainedModel", model)
    recipe = recipe_of(typed) if seed is not None or folder is not None else None
    shards: Shards = {}
    for name, old in list(model.named_parameters()):
        new = _partition(context, model, old, dtype, device)
        if folder is not None:
            continue
        start, stop = equal_part(old.numel(), rank, ranks)
        place = new.ds_tensor.device  # type: ignore[attr-defined]  # the host's, where weights are offloaded
        if seed is None:
            kept_as = torch.float32 if old.is_floating_point() else old.dtype
            values = old.detach().reshape(-1)[start:stop].to(place, kept_as, copy=True)
        else:
            values = _draw_elements(typed, recipe, name, seed, tuple(old.shape), start, stop).to(place)
        _set_part(new, values)
        if new.is_floating_point() and dtype != torch.float32:
            shards[name] = (start, values)
    _give_shapes(model)
    _name_weights_of_parts(model)
    _fill_buffers(typed, recipe, device)
    return shards if folder is None else _read_parts(model, folder, dtype, rank, ranks)


def _partition(
    context: Any, model: nn.Module, old: nn.Parameter, dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """Put a partitioned parameter without values into the place of ``old``."""
    kept_as = dtype if old.is_floating_point() else old.dtype
    new = nn.Parameter(torch.empty(old.shape, dtype=kept_as, device=device), requires_grad=old.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
    make_partitioned(context, new)
    new.partition()  # type: ignore[attr-defined]
    return new


def _give_shapes(model: nn.Module) -> None:
    """Give weights their shapes for a module that reads them before it calls the parts that hold them.

    The values come with the call of the part. DeepSpeed may already fetch them, into memory that becomes the weight's
    at once or at the end. So this gathers nothing, and changes no weight that has its shape.
    """
    names = family_of(str(cast("PreTrainedModel", model).config.model_type)).reads_inside

    def give(module: nn.Module, _: object) -> None:
        for parameter in cast("Iterable[Any]", module.parameters()):
            if parameter.shape != parameter.ds_shape:
                parameter.data = parameter.data.new_empty(()).expand(parameter.ds_shape)

    for module in model.modules():
        if type(module).__name__ in names:
            module.register_forward_pre_hook(give)


def _name_weights_of_parts(model: nn.Module) -> None:
    """Tell DeepSpeed which modules use weights of parts that they do not call, as torch's attention does (SigLIP)."""
    from deepspeed.runtime.zero import register_external_parameter

    readers = family_of(str(cast("PreTrainedModel", model).config.model_type)).reads_weights
    for module in model.modules():
        part = getattr(module, readers.get(type(module).__name__, ""), None)
        if isinstance(part, nn.Module):
            register_external_parameter(module, part.weight)
        if isinstance(module, nn.MultiheadAttention):
            for parameter in module.out_proj.parameters():
                register_external_parameter(module, parameter)


@torch.no_grad()
def _set_part(parameter: nn.Parameter, values: torch.Tensor) -> None:
    part: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    part.zero_()
    part.narrow(0, 0, values.numel()).copy_(values)


def _read_parts(model: nn.Module, folder: FolderWeights, dtype: torch.dtype, rank: int, ranks: int) -> Shards:
    """Fill the partitioned parameters from a folder; the fp32 values, where ``dtype`` cannot hold them."""
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.ds_shape) for name, parameter in parameters.items()}
    shards: Shards = {}

    def take(name: str, stored: Any) -> None:
        parameter = parameters[name]
        start, stop = equal_part(parameter.ds_numel, rank, ranks)
        values = elements_of(stored, shapes[name], start, stop)
        _set_part(parameter, values)
        if parameter.is_floating_point() and dtype != torch.float32:
            copied = values.to(parameter.ds_tensor.device, torch.float32, copy=True)
            shards[first_names[id(parameter)]] = (start, copied)

    kind, buffers = type(model).__name__, stored_buffers(model)
    read_folder(folder.source, parameters, shapes, take, kind, folder.seed, folder.peft, buffers)
    return shards


def elements_of(stored: Any, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of a flattened tensor or slice of a file, of which the rows there are read."""
    if not shape:
        tensor: torch.Tensor = stored[...]
        return tensor.reshape(1)[start:stop]
    row = max(1, prod(shape[1:]))
    first = start // row
    rows: torch.Tensor = stored[first : max(first, -(-stop // row))]
    return rows.reshape(-1)[start - first * row : stop - first * row]


def _draw_elements(
    model: PreTrainedModel, recipe: Any, name: str, seed: int, shape: tuple[int, ...], start: int, stop: int
) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of the flattened initial parameter."""
    if not shape:
        return draw_parameter(model, recipe, name, seed).reshape(1)[start:stop].clone()
    row = max(1, prod(shape[1:]))
    first = start // row
    rows = draw_parameter(model, recipe, name, seed, rows=(first, max(first, -(-stop // row)))).reshape(-1)
    return rows[start - first * row : stop - first * row].clone()


def _fill_buffers(model: PreTrainedModel, recipe: Any, device: torch.device) -> None:
    """Compute the buffers on ``device``, or move them there where there is no recipe."""
    if recipe is not None:
        materialise_buffers(model, recipe, device)
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def whole_values(model: nn.Module) -> Shards:
    """Copies of all fp32 parameters of a whole model, before an engine casts them."""
    floating = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    return {name: (0, p.detach().reshape(-1).clone()) for name, p in floating}


def values_of(shards: Shards, name: str, start: int, numel: int) -> torch.Tensor:
    """Elements of a flattened parameter from the part on this rank."""
    first, values = shards[name]
    return values.narrow(0, start - first, numel)


class LossModule(nn.Module):
    """The module that DeepSpeed's engine runs: maps a micro-batch to its loss sum, or to its evaluation sums."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model = objective.model
        self._loss, self._evaluation = objective.micro_batch_loss, lambda batch: objective.evaluation_sums(batch)

    def forward(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._loss(micro_batch) if torch.is_grad_enabled() else self._evaluation(micro_batch)


def prepare_deepspeed(device: torch.device) -> None:
    """Import DeepSpeed for this device, keep its log to warnings, and let it use the process group there is."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        # As DeepSpeed's launcher does. Without it ZeRO-3 starts a program for every bucket that it reduces, to count
        # the processor's memory nodes.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE") or str(dist.get_world_size()))
    else:  # DeepSpeed takes its device from there, and srun may show this process one GPU alone
        os.environ["LOCAL_RANK"] = str(device.index)
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # DeepSpeed compiles an all-reduce for inference on the CPU when it meets a process group; training never calls it.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_init_required=False)


def check_settings(settings: dict[str, Any]) -> None:
    """Let DeepSpeed judge the values of raw settings, whose names are checked; ConfigError if it refuses one."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        key = f"strategy.deepspeed_config.zero_optimization.{name}"
        raise ConfigError(key, first["input"], "correct it", f"DeepSpeed reports: {first['msg']}") from None


def zero_engine(module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> DeepSpeedEngine:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

    class ZeroEngine(DeepSpeedEngine):
        """ZeRO under every precision: DeepSpeed has another optimizer for bf16 at stage 1."""

        def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
            return str(ZERO_OPTIMIZATION)

    config = DeepSpeedConfig(settings)
    return ZeroEngine(args=None, model=module, optimizer=optimizer, config=settings, config_class=config)
