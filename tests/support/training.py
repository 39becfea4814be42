"""Runs of a strategy on tiny models, in a process of a group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from mgpu_pipe.architectures.formulas.pipeline_schedules import layer_costs
from mgpu_pipe.checkpoint.tensor_slices import LocalShard
from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.schema import ModelConfig, OptimizerConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX, ListedStepBatches, StepBatch
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import resolved_fields
from mgpu_pipe.models.model_parts import freeze_parameters
from mgpu_pipe.models.shard_units import decoder_blocks
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.optim.optimizers import optimizer_factory
from mgpu_pipe.parallel.fsdp import ShardingOptions
from mgpu_pipe.parallel.parallelize import ParallelOptions
from mgpu_pipe.parallel.pipeline.run_pipeline import PipelinePlan
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.training.deepspeed.deepspeed_config import generate
from mgpu_pipe.training.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from mgpu_pipe.training.mesh import MeshStrategy
from mgpu_pipe.training.strategy import EngineStrategy
from tests.support.encoders import ENCODER_MODELS, ENCODERS, SEEING
from tests.support.learned import LEARNED as OF_TEXT
from tests.support.tiny import MODELS, SEQ_LEN, VOCABULARY
from tests.support.trainer import quiet_trainer

Batch = dict[str, torch.Tensor]
LEARNED = {**OF_TEXT, **ENCODERS}
SEED, LR = 5, 3e-4
MUON = "mgpu_pipe.optim.muon.Muon"
LAYERS = {"gpt2": "n_layer", "pairs": "num_layers"}
"""What a family calls the number of its layers, where it has a name of its own for it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One cell of a matrix: what is trained, on which data, with which options."""

    model: str = "llama"
    samples: int = 8
    micro_batches: int = 1
    data: str = "packed"
    precision: str = "fp32"
    max_norm: float | None = None
    checkpointing: str = "none"
    freeze: tuple[str, ...] = ()
    peft: PeftConfig = field(default_factory=PeftConfig)
    branches: bool = False
    objective: Callable[..., Any] | None = None
    """In the place of causal language modelling."""
    together: bool = False
    """Every sample takes the branch that otherwise some take."""
    steps: int = 5
    layers: int = 0
    """Of the model, where not its own."""
    seed: int = SEED
    """Of the initial weights."""
    dropout: float = 0.0
    """Of GPT-2, in what is listed."""
    drops: tuple[str, ...] = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    schedule: str = "1f1b"
    """Of the pipeline, where there is one."""
    stages_per_rank: int | Literal["auto"] = "auto"
    zero_stage: Literal[1, 2, 3] | None = None
    """DeepSpeed's engine instead of the mesh's."""
    offload: str = "none"
    """Of that engine."""
    offload_path: str | None = None
    optimizer: str = "torch.optim.AdamW"
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"weight_decay": 0.1})
    treated: dict[str, Any] = field(default_factory=dict)
    """Further keys of ``optimizer``: parameter groups, layer-wise decay."""
    by_hand: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None
    """The plain loop's optimizer, where it is not the class itself."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of how the model is split."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """What gradients are sent in."""
    uncounted: tuple[int, ...] = ()
    """Steps that have no label."""


@dataclass
class Outcome:
    """What one rank saw and holds."""

    losses: list[float]
    norms: list[float]
    weights: list[LocalShard]
    gradients: list[LocalShard]
    optimizer: list[LocalShard]


def batch_of(case: Case, step: int) -> Batch:
    """The step's samples: ``packed`` documents; ``uneven`` numbers of valid labels, none in the last quarter;
    ``padded`` single documents."""
    if case.model in LEARNED:
        return LEARNED[case.model].batch(step, case.samples)
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (case.samples, SEQ_LEN + 1), generator=generator)
    labels = ids[:, 1:].clone()
    positions = torch.arange(SEQ_LEN).expand(case.samples, -1).clone()
    for row in range(case.samples):
        cut = int(torch.randint(3, SEQ_LEN - 3, (1,), generator=generator))
        if case.data == "uneven":
            labels[row, : row * SEQ_LEN // case.samples] = IGNORE_INDEX
            if row >= case.samples - case.samples // 4:
                labels[row] = IGNORE_INDEX
            continue
        positions[row, cut:] = torch.arange(SEQ_LEN - cut)
        labels[row, cut - 1] = IGNORE_INDEX
        if case.data == "padded" or row % 3 == 1:
            labels[row, cut:] = IGNORE_INDEX
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "position_ids": positions}


def step_batch_of(case: Case, step: int, rank: int, world: int) -> StepBatch:
    batch = batch_of(case, step)
    if step in case.uncounted:
        batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    share = case.samples // world
    size = share // case.micro_batches
    mine = {name: value[rank * share : (rank + 1) * share] for name, value in batch.items()}
    parts = [{name: value[at : at + size] for name, value in mine.items()} for at in range(0, share, size)]
    return StepBatch(step, step * case.samples, case.samples, parts, int((batch["labels"] != IGNORE_INDEX).sum()))


@functools.lru_cache(maxsize=None)
def branched(cls: Any) -> Any:
    """A subclass of a model whose first block has a branch that some samples take, and one that none takes."""

    class Branched(cls):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            block: Any = decoder_blocks(self)[0]
            width = config.hidden_size
            block.never = torch.nn.Linear(width, width)
            block.sometimes = torch.nn.Linear(width, width)
            plain = block.forward

            def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                out = plain(hidden, *args, **kwargs)
                # One sample a forward pass; of the global batch every third takes the branch.
                if int(block.sample) % 3 == 0:
                    first = out[0] if isinstance(out, tuple) else out
                    first = first + block.sometimes(first)
                    return (first, *out[1:]) if isinstance(out, tuple) else first
                return out

            block.forward = forward
            block.sample = 0

    Branched.__name__ = cls.__name__
    return Branched


def model_config(case: Case) -> ModelConfig:
    source = replace({**MODELS, **ENCODER_MODELS}[case.model], freeze=[])
    if case.dropout:
        rates = dict.fromkeys(case.drops, case.dropout)
        source = replace(source, config={**source.config, **rates}, attn_implementation="eager")
    if case.layers and case.model in SEEING:
        text = {**source.config["text_config"], "num_hidden_layers": case.layers}
        return replace(source, config={**source.config, "text_config": text})
    if not case.layers or case.model in ENCODERS:
        return source
    return replace(source, config={**source.config, LAYERS.get(case.model, "num_hidden_layers"): case.layers})


def built(case: Case) -> Any:
    """The case's model on the meta device."""
    learned = LEARNED.get(case.model)
    model: Any = build_meta(model_config(case), learned.model_class if learned else None)
    if case.branches:
        with torch.device("meta"):
            model = branched(type(model))(model.config).train()  # type: ignore[arg-type]
    freeze_parameters(model, case.freeze)
    add_adapters(model, case.peft)
    return model


def filled(model: Any, device: torch.device = CPU, seed: int = SEED) -> Any:
    return materialise(model, seed, device)


def optimizer_of(case: Case, model: torch.nn.Module) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    """The program's, of the same options."""
    options = dict(case.optimizer_options)
    return optimizer_factory(
        OptimizerConfig(
            _target_=case.optimizer,
            lr=options.pop("lr", LR),
            decay_norms_and_biases=case.optimizer != MUON,
            **case.treated,
            weight_decay=options.pop("weight_decay", 0.0),
            options=options,
        ),
        model,
        case.precision,
    )


class BranchObjective(CausalLMObjective):
    """Tells the branched block which sample is at hand."""

    def micro_batch_loss(self, batch: Any) -> torch.Tensor:
        decoder_blocks(self.model)[0].sample = int(batch["input_ids"].sum())  # type: ignore[assignment]
        return super().micro_batch_loss(batch)


class TogetherObjective(CausalLMObjective):
    """Has every sample take the branch."""

    def micro_batch_loss(self, batch: Any) -> torch.Tensor:
        decoder_blocks(self.model)[0].sample = 0  # type: ignore[assignment]
        return super().micro_batch_loss(batch)


class Watch(pl.Callback):
    def __init__(self, on_start: Callable[[Any], None] | None = None) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[LocalShard] = []
        self.on_start = on_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.on_start is not None:
            self.on_start(trainer.strategy)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["result"].loss)
        self.norms.append(outputs["result"].gradient_norm)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = copied(trainer.strategy.gradient_shards())


def strategy_of(case: Case, dims: ParallelDims) -> EngineStrategy:
    """The mesh engine, or DeepSpeed's where the case names a ZeRO stage."""
    common: dict[str, Any] = {
        "max_norm": case.max_norm,
        "materialise": functools.partial(filled, seed=case.seed),
        "dropout_seed": SEED if case.dropout else None,
    }
    how: dict[str, Any] = {"precision": case.precision, "activation_checkpointing": case.checkpointing, **case.options}
    if dims.pp > 1:
        costs = layer_costs(resolved_fields(model_config(case)), SEQ_LEN)
        how["pipeline"] = PipelinePlan.make(case.schedule, dims.pp, costs, stages_per_rank=case.stages_per_rank)
    if case.zero_stage is None:
        return MeshStrategy(
            dims, CPU, ParallelOptions(bucket_mib=0.01, sharding=ShardingOptions(reduce=case.reduce), **how), **common
        )
    plan = BatchPlan(case.samples, dims.dp_shard, case.samples // dims.dp_shard // case.micro_batches)
    # A branch that some ranks take: ZeRO-3 has to gather the whole block on all of them.
    block = "h.0" if case.model == "gpt2" else "layers.0"
    raw = {"zero_optimization": {"leaf_module": {"name_suffixes": [block]}}} if case.branches else None
    settings = generate(
        plan,
        stage=case.zero_stage,
        precision=case.precision,
        reduce=case.reduce,
        bucket_mib=0.01,
        offload=case.offload,
        offload_path=case.offload_path,
        raw=raw,
    )
    return DeepSpeedStrategy(dims, CPU, settings, seed=case.seed, **common, **how)


def copied(shards: list[LocalShard]) -> list[LocalShard]:
    return [LocalShard(shard.tensor_slice, shard.global_shape, shard.tensor.clone()) for shard in shards]


def trained(
    case: Case,
    dims: ParallelDims,
    first_step: int = 0,
    on_start: Callable[[Any], None] | None = None,
    on_end: Callable[[Any], None] | None = None,
) -> Outcome:
    """Train ``case`` on this process of the group; a collective call."""
    strategy = strategy_of(case, dims)
    model = built(case)
    branching = TogetherObjective if case.together else BranchObjective
    cls = branching if case.branches else CausalLMObjective
    learning_rate: Callable[[int], float] = lambda step: 1.0  # noqa: E731
    learns = case.objective or (LEARNED[case.model].objective if case.model in LEARNED else None)
    objective: Objective
    if learns is None:
        objective = cls(model, optimizer_of(case, model), learning_rate, 7)
    else:
        objective = learns(model, optimizer_of(case, model), learning_rate)
    watch = Watch(on_start)
    trainer = quiet_trainer(strategy, case.steps, watch)
    at, size = dims.data_parallel_rank(dist.get_rank()), dims.data_parallel_size
    steps = range(first_step, first_step + case.steps)
    trainer.fit(objective, ListedStepBatches([step_batch_of(case, step, at, size) for step in steps]))
    if on_end is not None:
        on_end(strategy)
    return Outcome(
        watch.losses, watch.norms, copied(strategy.model_shards()), watch.gradients, copied(strategy.optimizer_shards())
    )
