"""The teacher of a distillation: a frozen model on the processes that compute a loss, whole on each or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import PreTrainedModel

from mgpu_pipe.checkpoint.adapters import model_shards
from mgpu_pipe.checkpoint.exchange import exchange_json
from mgpu_pipe.checkpoint.load import CheckpointReader
from mgpu_pipe.checkpoint.select import resolve_source
from mgpu_pipe.config.resolve import device_type, resolve_precision
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.kernels.packed_attention import use_packed_attention
from mgpu_pipe.models.adapters.lora import is_adapter
from mgpu_pipe.models.build import build_meta, materialise, materialise_empty, run_model
from mgpu_pipe.models.parts import cast_parameters
from mgpu_pipe.models.rotary import fix_rotary_length
from mgpu_pipe.models.settings import recorded_model
from mgpu_pipe.models.slices import FolderWeights
from mgpu_pipe.objectives.distill_keys import DESCRIPTION, DRAWN, KEY, DistillConfig, is_run
from mgpu_pipe.objectives.divergence import Teaching
from mgpu_pipe.objectives.packed_text import forward_kwargs
from mgpu_pipe.parallel.fsdp import apply_fully_shard, reshard_all
from mgpu_pipe.parallel.pipeline_streams import stages_by_rank
from mgpu_pipe.topology import Meshes, ParallelDims

TYPES = {"bf16": torch.bfloat16, "bf16_true": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
"""Of its weights, by the student's precision; else fp32."""

Fill = Callable[[PreTrainedModel, torch.device], object]


class Teacher:
    """The model of ``objective.teacher``. Making it is a collective call of all processes, where there are several.

    Attributes:
        gathers: its forward pass gathers weights from the processes that share it.
    """

    def __init__(self, config: RunConfig, keys: DistillConfig) -> None:
        """Raises:
        ConfigError: the model changes its logits after its head, or its weights are not all in one place.
        """
        self._config, self._keys = config, keys
        self._source = _source(keys)
        self._hidden: _Hidden | None = None
        device, mesh, computes = torch.device("cpu"), None, True
        if dist.is_initialized():
            dims = ParallelDims.resolve(config.strategy, dist.get_world_size())
            if device_type(config) == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            mesh = Meshes(dims, device.type).mesh("stage") if keys.teacher_strategy == "fsdp" else None
            computes = dims.pp == 1 or _has_last_stage(config, dims)
        self.gathers = mesh is not None and mesh.size() > 1
        if not computes:
            return
        model, fill = self._described()
        if self.gathers:
            assert mesh is not None
            apply_fully_shard(model, mesh, "fp32")  # it computes in the type of its weights
        fill(model, device)
        if device.type == "cuda" and config.model.attn_implementation == "auto":
            use_packed_attention(model)
        self._hidden = _Hidden(model.eval())
        self._require_plain_logits(device)

    @contextmanager
    def taught(self, batch: Mapping[str, torch.Tensor]) -> Iterator[Teaching]:
        """What it says of a micro-batch. Collective where it gathers; what it gathered is given back at the end."""
        hidden = self._hidden
        assert hidden is not None, "this process computes no loss"
        model = hidden.model
        if not self.gathers:
            cast(torch.nn.Module, model).to(batch["labels"].device)
        states = hidden.of(forward_kwargs(model, batch))
        try:
            yield Teaching(self._keys, states, hidden.head.weight, hidden.head.bias)
        finally:
            self._give_back()

    @cached_property
    def whole(self) -> PreTrainedModel:
        """A copy of it that is whole on this process."""
        model, fill = self._described()
        fill(model, torch.device("cpu"))
        return model.eval()

    def _give_back(self) -> None:
        if self.gathers and self._hidden is not None:
            reshard_all(self._hidden.model)

    def _described(self) -> tuple[PreTrainedModel, Fill]:
        """The frozen model on the meta device, and what fills it, sharded or not."""
        config, source = self._config, self._source
        fill: Fill
        if source is None:
            model = run_model(replace(config, peft=type(config.peft)()))
            fill = partial(_draw, seed=config.seed + 1)
        elif (source / "config.json").is_file():
            folder = ModelConfig(path=str(source), attn_implementation=config.model.attn_implementation)
            model = build_meta(folder, DESCRIPTION.model_class)
            fill = FolderWeights(folder)
        else:
            model, fill = _of_run(source, config)
        model.config.use_cache = False
        fix_rotary_length(model, config.data.seq_len)
        cast_parameters(model, TYPES.get(resolve_precision(config), torch.float32))
        model.requires_grad_(False)
        return model, fill

    def _require_plain_logits(self, device: torch.device) -> None:
        assert self._hidden is not None
        model, head = self._hidden.model, self._hidden.head
        ids = torch.arange(2, device=device).unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=ids).logits
            expected = F.linear(self._hidden.of({"input_ids": ids}), head.weight, head.bias)
        self._give_back()
        if not torch.allclose(logits.float(), expected.float(), rtol=1e-4, atol=1e-5):
            name = type(model).__name__.removeprefix("FSDP")
            reason = f"{name} changes its logits after the head"
            raise ConfigError(KEY, self._keys.teacher, "use a teacher of another family", reason)


class _Hidden:
    """A model that gives the hidden states before its head."""

    def __init__(self, model: Any) -> None:
        self.model, self.head = model, model.get_output_embeddings()
        self._kept: torch.Tensor | None = None
        plain_forward = self.head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self._kept is None:
                return cast(torch.Tensor, plain_forward(hidden))
            self._kept = hidden
            return cast(torch.Tensor, plain_forward(hidden[:, -1:]))

        self.head.forward = forward

    @torch.no_grad()
    def of(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """(rows, seq_len, width), or under flash attention all rows laid end to end."""
        self._kept = torch.empty(0)
        try:
            self.model(**inputs)
            return self._kept
        finally:
            self._kept = None


def _source(keys: DistillConfig) -> Path | None:
    """The model's folder, or a run's step, the same on all processes; None for weights that are drawn. Collective."""
    if keys.teacher == DRAWN:
        return None
    folder = Path(keys.teacher).expanduser()
    if not is_run(folder):
        return folder
    step = resolve_source(folder, verify="size", key=KEY)
    return Path(exchange_json(str(step), None)[0]) if dist.is_initialized() else step


def _has_last_stage(config: RunConfig, dims: ParallelDims) -> bool:
    chosen = config.strategy.pipeline
    stages = stages_by_rank(chosen.schedule, dims.pp, chosen.stages_per_rank)
    return max(map(max, stages)) in stages[dims.coordinates(dist.get_rank())["pp"]]


def _draw(model: PreTrainedModel, device: torch.device, seed: int) -> None:
    materialise(model, seed, device)


def _of_run(step: Path, config: RunConfig) -> tuple[PreTrainedModel, Fill]:
    reader = CheckpointReader(step)
    if reader.left_out is not None or any(is_adapter(name) for name in reader.names("model")):
        fix = f"give what mgpu-pipe export {step} --merge writes"
        raise ConfigError(KEY, step, fix, "the run trained adapters")
    recorded = recorded_model(reader.state.get("model_config"), step)
    recorded = replace(recorded, attn_implementation=config.model.attn_implementation)
    model = build_meta(recorded, DESCRIPTION.model_class)
    reader.require({name: tuple(weights.shape) for name, weights in model.named_parameters()}, "model")

    def fill(model: PreTrainedModel, device: torch.device) -> None:
        materialise_empty(model, device)
        reader.read(model_shards(model), "model")

    return model, fill
