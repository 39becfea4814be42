"""Keys of the optimizer, scheduler, adapters, strategy, evaluation tasks and sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mgpu_pipe.config.identity import CONTENT, FIXED


@dataclass
class ParameterGroup:
    """Parameters that are trained otherwise than the rest."""

    parameters: list[str] = field(default_factory=list)
    """Patterns of parameter names (*, ?, [...]), such as model.embed_tokens.*, or parts of the model (vision, audio,
    projector, language); a parameter belongs to the first group that names it."""
    lr: float | None = field(default=None, metadata={"above": 0})
    """Peak learning rate of the group; null uses optimizer.lr."""
    weight_decay: float | None = field(default=None, metadata={"at_least": 0})
    """Weight decay of the group; null uses optimizer.weight_decay."""
    frozen_until: int = field(default=0, metadata={"at_least": 0})
    """Steps with learning rate 0 at the start; gradients are computed all the same."""


@dataclass
class WeightAverageConfig:
    decay: float | None = field(default=None, metadata={"above": 0, "below": 1, "or": ", or null to keep none"})
    """Decay of the average: average = decay * average + (1 - decay) * weights after each step; null keeps none."""
    evaluate: bool = False
    """Evaluate the average during training, also for tasks and keep_best; this keeps a second copy of the weights
    meanwhile."""


@dataclass
class SpikeGuardConfig:
    factor: float | None = field(default=None, metadata={"at_least": 1, "or": ", or null to take every step"})
    """A spike is a gradient norm above this times the median of the previous steps; null takes every step."""
    window: int = field(default=100, metadata={"at_least": 2, "at_most": 10000})
    """Previous steps in the median; as many first steps of a run are never spikes."""
    action: Literal["skip", "stop"] = "skip"
    """At a spike: skip the update, or save and end the run as failed."""


@dataclass
class OptimizerConfig:
    _target_: str = field(default="torch.optim.AdamW", metadata=FIXED)
    """Any subclass of torch.optim.Optimizer."""
    lr: float = field(default=3e-4, metadata={"above": 0})
    """Peak learning rate."""
    weight_decay: float = field(default=0.1, metadata={"at_least": 0})
    """Weight decay of matrices and embeddings."""
    decay_norms_and_biases: bool = False
    """Apply the weight decay to norms and biases too."""
    layer_decay: float = field(default=1.0, metadata={"above": 0, "at_most": 1})
    """Factor between the learning rates of a block and the block above it; embeddings are below the first block, the
    rest is at the top (arXiv:2003.10555). Groups with their own rate ignore it."""
    groups: dict[str, ParameterGroup] = field(default_factory=dict)
    """Parameter groups with their own learning rate, weight decay or start, by a name of your choice."""
    ema: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    """Moving average of the weights, saved with them; eval, export, generate and chat use it with --weights ema."""
    spike_guard: SpikeGuardConfig = field(default_factory=SpikeGuardConfig)
    """Guard against steps whose gradient norm stands out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer (betas, eps, momentum, ...)."""


@dataclass
class SchedulerConfig:
    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """constant, linear, cosine, or wsd (warm-up, stable, decay); each after the warm-up."""
    warmup_steps: int = field(default=0, metadata={"at_least": 0})
    """Optimizer steps of linear warm-up from 0; at most those of the horizon."""
    warmup_ratio: float | None = field(default=None, metadata={"at_least": 0, "at_most": 1.0})
    """The same as a share of total_steps, rounded up; instead of warmup_steps."""
    decay_steps: int | None = field(default=None, metadata={"at_least": 1})
    """wsd: optimizer steps of the final linear decay; null is a tenth of total_steps."""
    min_lr_ratio: float = field(default=0.1, metadata={"at_least": 0, "at_most": 1.0})
    """Final learning rate as a share of the peak."""
    total_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Horizon in optimizer steps; null is the first launch's trainer.max_steps, which a resume keeps."""

    def warmup(self, total_steps: int) -> int:
        """Warm-up steps for a horizon of ``total_steps``, at most ``total_steps``."""
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * total_steps)
        return min(self.warmup_steps, total_steps)


ADAMW_BF16 = "mgpu_pipe.optim.adamw_bf16.AdamWBf16"
ALL_LINEAR = "all-linear"


@dataclass
class PeftConfig:
    name: Literal["none", "lora", "dora", "qlora"] = "none"
    """none trains the model's weights; lora adds a low-rank product to each targeted linear layer; dora also trains the
    length of each weight row; qlora is lora with frozen four-bit matrices."""
    r: int = field(default=16, metadata={"at_least": 1})
    """Rank of the product."""
    alpha: float = field(default=32.0, metadata={"above": 0.0})
    """The product is scaled by alpha / r, or by alpha / sqrt(r) with rslora."""
    rslora: bool = False
    """Scale by alpha / sqrt(r), which keeps the size of updates equal over ranks (arXiv:2312.03732)."""
    dropout: float = field(default=0.0, metadata={"at_least": 0.0, "below": 1.0})
    """Dropout of the product's inputs in training."""
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """Names or patterns of linear layers, such as q_proj or model.layers.0.*; all-linear: all in the blocks, routers
    left out; experts: the weights of a mixture's experts; vision, audio, language, projector: all-linear in that part
    of the model."""
    train_also: list[str] = field(default_factory=list)
    """Patterns of parameter names (*, ?, [...]), or parts of the model, that are trained as they are, such as
    *norm.weight or projector."""

    init_from: str | None = field(default=None, metadata=CONTENT)
    """A folder of the peft package, or of export --adapter, whose adapters the run starts from."""

    @property
    def scale(self) -> float:
        """Factor of the low-rank product."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)

    def without_quantisation(self) -> PeftConfig:
        """These adapters with unquantised weights: qlora becomes lora."""
        return replace(self, name="lora") if self.name == "qlora" else self


Auto = Literal["auto"]


@dataclass
class FullyShardConfig:
    reshard_after_forward: bool | Auto = "auto"
    """Free a unit's gathered weights after its forward pass; auto does as the model's own plan says."""
    prefetch: int = field(default=1, metadata={"at_least": 0})
    """Units whose weights are gathered ahead in the forward pass on CUDA; the backward pass prefetches one."""


Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


@dataclass
class PipelineOptions:
    schedule: Schedule = "1f1b"
    """Order of forward and backward passes; those after 1f1b put two stages on a rank."""
    stages_per_rank: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Stages of each rank under interleaved_1f1b and interleaved_zero_bubble; auto is two."""
    layers: list[int] = field(default_factory=list)
    """Layers of every stage, the first stage's first; empty balances them by cost, embedding and head counted."""


@dataclass
class ContextOptions:
    method: Literal["ring", "ulysses"] = "ring"
    """ring sends keys and values round; ulysses exchanges sequence for heads, a number that cp must divide."""


@dataclass
class PartOptions:
    vision: Literal["cut", "whole"] = "cut"
    """cut cuts the vision tower by strategy.tp like the rest of the model; whole keeps it on every rank, deals the
    pictures of a micro-batch over the ranks of strategy.tp by cost and exchanges their features."""
    audio: Literal["cut", "whole"] = "cut"
    """The same for the audio tower and recordings."""
    activation_checkpointing: Literal["same", "none", "full"] = "same"
    """Recomputation of the blocks of vision and audio towers; same is that of strategy.activation_checkpointing."""

    @property
    def whole(self) -> tuple[str, ...]:
        """Parts that every tensor-parallel rank keeps whole."""
        return tuple(part for part, choice in vars(self).items() if choice == "whole")


@dataclass
class DeepSpeedOptions:
    stage: Literal[1, 2, 3] = 3
    """ZeRO stage: 1 shards the optimizer state, 2 gradients too, 3 weights too."""


@dataclass
class StrategyConfig:
    name: str = "custom"
    """Name of the preset."""
    engine: str = "mesh"
    """mesh (this project's torch engine), deepspeed (ZeRO), or a name that a plug-in registers."""
    dp_replicate: int | Auto = 1
    """Data-parallel replicas with whole weights (DDP)."""
    dp_shard: int | Auto = 1
    """Data-parallel ranks that shard weights, gradients and optimizer state."""
    tp: int | Auto = 1
    """Tensor-parallel size."""
    pp: int | Auto = 1
    """Pipeline stages (ranks)."""
    cp: int | Auto = 1
    """Context-parallel size."""
    ep: int | Auto = 1
    """Expert-parallel size; re-cuts dp_shard * tp."""
    sequence_parallel: bool = False
    """Split activations along the sequence between the tensor-parallel regions (needs tp)."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """Options of pp."""
    context: ContextOptions = field(default_factory=ContextOptions)
    """Options of cp."""
    parts: PartOptions = field(default_factory=PartOptions)
    """Strategies of parts of the model."""
    bucket_mib: float = field(default=25.0, metadata={"above": 0})
    """Size of a gradient bucket of the all-reduce, in MiB."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full recomputes each block in the backward pass; selective keeps matrix products and attention."""
    offload: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters and optimizer state lie while they are not used; nvme is ZeRO-3's."""
    offload_path: str | None = None
    """Folder on the NVMe disk that strategy.offload=nvme writes to."""
    fsdp: FullyShardConfig = field(default_factory=FullyShardConfig)
    """Options of dp_shard (FSDP2)."""
    deepspeed: DeepSpeedOptions = field(default_factory=DeepSpeedOptions)
    """Options of the deepspeed engine."""
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    """Raw DeepSpeed settings without a key here; merged into the generated ones."""


@dataclass
class SweepConfig:
    name: str | None = None
    """Name of a sweep (-m), whose folder is <run.root>/sweeps/<name>; null names it after date and time."""
    metric: str | list[str] = "auto"
    """Metric that ranks the points; auto is the objective's main metric on held-out data, else train/loss. With two
    metrics, [a,b], the sweep shows the Pareto front."""
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    """Better end of sweep.metric; auto distinguishes an accuracy from a loss."""
    points: str | None = None
    """A csv file whose header names keys and whose rows are the points; with values in the command line, each row for
    each combination of them."""
    seeds: int = 1
    """Runs of every point, with seed, seed + 1, ...; the best point is chosen by their mean, with its noise."""
    diverged_above: float | None = None
    """A training loss above this at a run's end counts as diverged."""
    search: Literal["grid", "random", "tpe", "gp", "nsga2"] = "grid"
    """grid takes every combination of values; the others draw sweep.trials points from ranges and lists: at random, or
    by Optuna's samplers (mgpu_pipe[sweeps]): TPE, Gaussian process, or NSGA-II for two metrics."""
    trials: int = 20
    """Points that a search draws."""
    space: dict[str, Any] = field(default_factory=dict)
    """Search space by key: interval(1e-5,1e-3), tag(log,interval(1e-5,1e-3)), a list of values, or {low, high, log,
    values, when: {key: value}}; values and ranges in the command line extend it."""
    pruner: Literal["none", "asha", "median"] = "none"
    """Stop trials early at sweep.rungs: asha continues the best third at a rung, median the better half."""
    rungs: list[int] = field(default_factory=list)
    """Steps at which sweep.pruner decides; empty: a ninth and a third of trainer.max_steps."""
    parallel: int = 1
    """Points that run at once on this machine; they share its cores and GPUs evenly."""


@dataclass
class PrecisionConfig:
    name: Literal["auto", "fp32", "bf16", "bf16_true", "fp16", "fp8"] = "auto"
    """fp32; bf16, fp16, fp8: compute alone, weights, gradient reduction and optimizer in fp32; bf16_true: everything
    in bf16; auto: bf16 on GPUs that have it, else fp32."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Type of the gradients in the data-parallel reduction; bf16 sends half the bytes, for runs that compute in bf16 or
    fp8."""
    fp8_recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scaling of precision=fp8, by torchao's names: one factor a tensor is fastest, one a row keeps outliers better."""
    tf32: bool = False
    """Let fp32 matrix products and convolutions on CUDA round their inputs to TF32 (10 bits): faster, and results
    agree to about 1e-3 instead of 1e-6; for precision=fp32."""


@dataclass
class PlanConfig:
    hardware: list[str] = field(default_factory=list)
    """Hardware to plan for: names of profiles (a100_40, a100_80, b200, cpu, h100, h200, rtx4090, rtx5090), or paths of
    profiles of yours; empty: this machine's."""
    network: str | None = None
    """Network between nodes, a name of planning/profiles/networks.yaml; null is the profile's."""
    gpus: list[int] = field(default_factory=list)
    """Numbers of GPUs, or CPU processes, to plan for; empty: trainer.num_nodes times trainer.devices."""
    price: float | None = field(default=None, metadata={"above": 0, "or": ", or null"})
    """Dollars a GPU and hour; null is the profile's dollars_per_hour, or unknown."""
    tokens: float | None = field(default=None, metadata={"above": 0, "or": ", or null"})
    """Tokens of the whole training, for its time and cost; null is trainer.max_steps steps."""
    schedules: list[Schedule] = field(default_factory=list)
    """Pipeline schedules to try; empty: strategy.pipeline.schedule where it is typed or is not 1f1b, else all."""
    rank_by: Literal["speed", "cost", "memory"] = "speed"
    """Order of the plans: tokens a second, dollars a token, or least memory."""
    predicted_seconds: float | None = None
    """Seconds a step that strategy=auto predicted; it sets this, and the report compares."""
    predicted_gib: float | None = None
    """GiB of a process, on GPUs of its tensors, that strategy=auto predicted."""
    rows: int = field(default=8, metadata={"at_least": 1, "at_most": 100})
    """Plans that are shown, shared evenly by all hardware and numbers of GPUs, at least one of each."""
    failure_hours: float | None = field(default=None, metadata={"above": 0, "or": ", or null"})
    """Mean hours between failures of a GPU, for the share of useful time that check prints and for
    checkpoint.every_n_steps=auto; null is unknown."""
    save_stall_s: float = field(default=10.0, metadata={"at_least": 0})
    """Seconds that a save stops training for, with plan.failure_hours."""
    restart_s: float = field(default=600.0, metadata={"at_least": 0})
    """Seconds from a failure until training resumes, with plan.failure_hours."""


@dataclass
class EvalTask:
    """A task of questions or texts from local files; its figure is the metric val/<name of the task>."""

    kind: Literal["answers", "choice", "perplexity"] = "answers"
    """answers: the share of generated answers that are right, word for word; choice: of questions whose right choice
    is the likeliest; perplexity: of texts, a token."""
    paths: list[str] = field(default_factory=list)
    """Files or globs: rows as in data=chat_jsonl (answers), of {prompt, choices, answer} (choice), text files or rows
    with a text (perplexity)."""
    source: Literal["rule_chat"] | None = None
    """Instead of paths: the held-out conversations of data=rule_chat (answers)."""
    pattern: str | None = None
    """Regular expression; its match in an answer (the first group, if any) is compared (answers)."""
    max_samples: int | None = field(default=256, metadata={"at_least": 1})
    """At most this many rows, evenly taken; null takes all."""
    batch_size: int = field(default=32, metadata={"at_least": 1})
    """Rows that go through the model together."""
    max_new_tokens: int = field(default=64, metadata={"at_least": 1})
    """Most tokens of an answer."""

    @property
    def higher_is_better(self) -> bool:
        return self.kind != "perplexity"


@dataclass
class EvalConfig:
    tasks: dict[str, EvalTask] = field(default_factory=dict)
    """Tasks by a name of your choice, measured at every evaluation, and by mgpu-pipe eval."""
