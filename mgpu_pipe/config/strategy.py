"""The keys of the strategy: sizes of the axes, and each engine's options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Auto = Literal["auto"]


@dataclass
class FullyShardConfig:
    reshard_after_forward: bool | Auto = "auto"
    """Free a unit's gathered weights after its forward pass; auto does as the model's own plan says."""
    prefetch: int = field(default=1, metadata={"at_least": 0})
    """Units whose weights are gathered ahead in the forward pass on CUDA; the backward pass prefetches one."""


@dataclass
class PipelineOptions:
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] = "1f1b"
    """Order of forward and backward passes; those after 1f1b put two stages on a rank."""
    stages_per_rank: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Stages of each rank under interleaved_1f1b and interleaved_zero_bubble; auto is two."""
    layers: list[int] = field(default_factory=list)
    """Layers of every stage, the first stage's first; empty balances them by cost, embedding and head counted."""


@dataclass
class ContextOptions:
    method: Literal["ring", "ulysses"] = "ring"
    """ring sends keys and values round; ulysses exchanges sequence for heads, which cp has to divide."""


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
    """Raw DeepSpeed settings, for what this project has no key for; merged into the generated ones."""
