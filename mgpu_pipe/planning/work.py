"""Work of a step: shapes of the model, the layout, the batch; and the hardware's figures and constants.

Every field of :class:`Work` and :class:`Hardware` is a number or an array; arrays broadcast, so that one call predicts
all layouts of a search, or all rows of a table of measured runs. The functions at the end import NumPy only for arrays,
since ``check`` has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = float | NDArray[np.float64]
else:  # check imports no NumPy
    Numbers = float


@dataclass(frozen=True)
class Work:
    """One optimizer step of a decoder; sizes of axes as in :class:`mgpu_pipe.topology.ParallelDims`."""

    layers: Numbers
    width: Numbers
    inner: Numbers
    """Width of the feed-forward layer, of one expert with experts."""
    heads: Numbers
    key_value_heads: Numbers
    head_dim: Numbers
    vocabulary: Numbers
    sequence: Numbers
    """Tokens of a row."""
    context: Numbers
    """Tokens that a token's attention could see: the mean length of a document."""
    gated: Numbers = 0.0
    """1 if the feed-forward layer has three matrices."""
    experts: Numbers = 0.0
    chosen: Numbers = 1.0
    """Experts of a token; 1 without experts."""
    shared: Numbers = 0.0
    """Experts that compute every token, in routed experts of the same parameters."""
    attention_weights: Numbers = 0.0
    """Parameters of a layer's attention; 0 for the four matrices of grouped-query attention."""
    tied: Numbers = 0.0
    tp: Numbers = 1.0
    pp: Numbers = 1.0
    cp: Numbers = 1.0
    ep: Numbers = 1.0
    dp_shard: Numbers = 1.0
    dp_replicate: Numbers = 1.0
    stages_per_rank: Numbers = 1.0
    schedule: Numbers = 1.0
    """Index of the pipeline schedule in :data:`mgpu_pipe.architectures.formulas.pipeline_schedules.SCHEDULES`; several
    stages of a rank make 1F1B, the default, its interleaved form."""
    rows: Numbers = 1.0
    """Rows of a micro-batch."""
    micro_batches: Numbers = 1.0
    zero: Numbers = 3.0
    """ZeRO stage of ``dp_shard``; 3 is FSDP too."""
    sequence_parallel: Numbers = 0.0
    ulysses: Numbers = 0.0
    """1 if context parallelism exchanges heads for tokens (arXiv:2309.14509); 0 if keys and values go round a ring."""
    recompute_products: Numbers = 0.0
    """1 if the backward pass computes the layers' matrix products again, and their collectives."""
    recompute_attention: Numbers = 0.0
    recompute_elementwise: Numbers = 0.0
    flash: Numbers = 1.0
    """1 if attention is fused and skips what is masked."""
    is_balanced: Numbers = 1.0
    """1 if the last pipeline stage has fewer layers, because it has the head."""
    weight_bytes: Numbers = 2.0
    """Bytes of a gathered weight."""
    gradient_bytes: Numbers = 4.0
    """Bytes of a reduced gradient."""
    activation_bytes: Numbers = 2.0
    """Bytes of an activation that is sent."""
    float8: Numbers = 0.0
    """1 if the layers' matrix products are in float8."""
    eager: Numbers = 0.0
    """1 if a GPU runs the blocks without compiling or fusing their elementwise kernels."""
    other_passes: Numbers = 0.0
    """Forward passes of a reference or a teacher for each micro-batch, in those of the model."""
    trained: Numbers = 1.0
    """Share of the parameters that have a gradient."""
    adapter_rank: Numbers = 0.0
    """Rank of adapters next to linear layers of the blocks, whose weights have no gradient then; 0 for none."""
    adapted: Numbers = 1.0
    """Share of the inputs and outputs of the blocks' linear layers that belong to layers with adapters."""
    dequantised_bytes: Numbers = 0.0
    """Bytes read and written per weight of a block where a pass multiplies by four-bit weights."""
    cast_bytes: Numbers = 0.0
    """Bytes read and written per parameter where a rank that has whole weights makes their compute copy, which it does
    for each micro-batch."""
    overlaps: Numbers = 1.0
    """1 if collectives of weights and gradients run during computation; DeepSpeed's here do not."""
    offloads: Numbers = 0.0
    """1 if gradients and optimizer state are in host memory, with ZeRO-3 and FSDP the weights too."""
    on_disk: Numbers = 0.0
    """1 if the optimizer state is on an NVMe disk."""
    host_weight_bytes: Numbers = 4.0
    """Bytes of a weight in host memory, which are copied to the GPU."""
    tower_layers: Numbers = 0.0
    """Layers of a vision tower before the decoder, on the first pipeline stage; 0 without pictures."""
    tower_width: Numbers = 0.0
    tower_inner: Numbers = 0.0
    tower_heads: Numbers = 1.0
    tower_gated: Numbers = 0.0
    patches: Numbers = 0.0
    """Patches of the pictures in a row of tokens."""
    patches_in_view: Numbers = 0.0
    """Patches that a patch attends to."""
    tower_trains: Numbers = 1.0
    """1 if the tower has gradients."""

    @property
    def world(self) -> Numbers:
        return self.tp * self.pp * self.cp * self.dp_shard * self.dp_replicate

    @property
    def tokens(self) -> Numbers:
        """Tokens of a micro-batch on a rank."""
        return self.rows * self.sequence / self.cp

    @property
    def tokens_per_step(self) -> Numbers:
        """Tokens of the global batch."""
        return self.rows * self.sequence * self.micro_batches * self.dp_shard * self.dp_replicate

    @property
    def attention_parameters(self) -> Numbers:
        usual = 2 * self.width * self.head_dim * (self.heads + self.key_value_heads)
        return choose(self.attention_weights, self.attention_weights, usual)

    @property
    def dense_parameters(self) -> Numbers:
        """Parameters of a layer outside of routed experts."""
        return self.attention_parameters + choose(self.experts, self.shared, 1.0) * self.expert_parameters

    @property
    def expert_parameters(self) -> Numbers:
        """Matrices of one feed-forward layer, or of one expert."""
        return (2 + self.gated) * self.width * self.inner

    @property
    def layer_parameters(self) -> Numbers:
        return self.dense_parameters + self.experts * self.expert_parameters

    def tower_work(self) -> Work:
        """Work of the tower alone: patches for tokens, which see both ways."""
        return replace(
            self,
            layers=self.tower_layers,
            width=self.tower_width,
            inner=self.tower_inner,
            heads=self.tower_heads,
            key_value_heads=self.tower_heads,
            head_dim=self.tower_width / self.tower_heads,
            vocabulary=0.0,
            sequence=self.patches,
            context=2 * self.patches_in_view,  # twice what a causal model sees
            gated=self.tower_gated,
            experts=0.0,
            chosen=1.0,
            shared=0.0,
            attention_weights=0.0,
            adapter_rank=0.0,
            trained=self.tower_trains,
            tower_layers=0.0,
        )

    @property
    def model_flops(self) -> Numbers:
        """FLOPs of a step by the convention of :mod:`mgpu_pipe.architectures.formulas.flops`, causal."""
        active = self.layers * (self.attention_parameters + (self.chosen + self.shared) * self.expert_parameters)
        active = active + self.width * self.vocabulary
        attention = self.layers * 2 * self.context * self.heads * self.head_dim
        decoder = self.tokens_per_step * ((4 + 2 * self.trained) * active + 3 * attention)
        tower = self.tower_work()
        patches = self.tokens_per_step / self.sequence * self.patches
        a_patch = tower.layers * (tower.attention_parameters + tower.expert_parameters + tower.context * tower.width)
        return decoder + patches * 2 * (1 + 2 * self.tower_trains) * a_patch  # frozen: no backward pass


@dataclass(frozen=True)
class Hardware:
    """Figures of data sheets of a GPU and its network; bytes and FLOPs a second, decimal."""

    peak: Numbers
    """Dense FLOP/s in bf16 or fp16."""
    float8_peak: Numbers
    bandwidth: Numbers
    """Memory bandwidth."""
    multiprocessors: Numbers
    link: Numbers
    """Bytes a second that a GPU sends to others of its node, in one direction."""
    network: Numbers
    """Bytes a second that a node sends, by all its ports, in one direction."""
    gpus_per_node: Numbers = 8.0
    pcie: Numbers = 32e9
    """Bytes a second between a GPU and its host, in one direction."""
    host_bandwidth: Numbers = 200e9
    """Memory bandwidth of a node's host."""
    disk: Numbers = 6e9
    """Bytes a second of a node's NVMe disk."""


@dataclass(frozen=True)
class Constants:
    """Constants of a software stack on a kind of hardware: positive numbers, fitted in logarithms around these priors.

    The priors are round figures of a transformer in bf16 on data centre GPUs.
    """

    gemm: float = field(default=0.75, metadata={"spread": 0.3})
    """Share of the peak that large matrix products reach."""
    wave: float = field(default=0.5, metadata={"spread": 0.5})
    """Weight of a last wave of tiles that does not fill the GPU."""
    short: float = field(default=100.0, metadata={"spread": 0.3})
    """Length of a product's inner dimension at which it takes twice the time."""
    attention: float = 0.45
    """Share of the peak that attention's products reach."""
    attention_backward: float = field(default=2.5, metadata={"spread": 0.3})
    """Time of attention's backward pass in that of its forward pass."""
    short_attention: float = 300.0
    """Context at which fused attention takes twice the time of its products."""
    misaligned: float = field(default=3.0, metadata={"spread": 0.5})
    """Factor of attention's time if the head dimension is no multiple of 8."""
    memory: float = field(default=0.8, metadata={"spread": 0.3})
    """Share of the memory bandwidth that elementwise kernels reach."""
    split_bytes: float = field(default=24.0, metadata={"spread": 0.15})
    """Bytes read and written in a forward pass, per token, width and layer, that tensor parallelism splits; twice in
    fp32."""
    shared_bytes: float = field(default=20.0, metadata={"spread": 0.15})
    """Those that only sequence parallelism splits."""
    score_bytes: float = field(default=14.0, metadata={"spread": 0.1})
    """Bytes read and written per attention score that is not fused, in a forward pass; twice in fp32."""
    logit_bytes: float = field(default=20.0, metadata={"spread": 0.3})
    """Bytes read and written per logit, in both passes."""
    launch: float = 1.5e-4
    """Seconds in which a layer's kernels of one pass are launched."""
    link: float = field(default=0.7, metadata={"spread": 0.5})
    """Share of the node's links that collectives reach."""
    link_latency: float = 1.2e-5
    """Seconds of a collective in a node, per doubling of its ranks."""
    network: float = field(default=0.6, metadata={"spread": 0.5})
    """Share of the network that collectives reach."""
    network_latency: float = 3e-5
    """Seconds of a collective over nodes, per doubling of its ranks."""
    overlap_loss: float = 0.25
    """Share of the shorter one of computation and gathers that is not hidden."""
    reduction: float = 0.7
    """Share of the data-parallel reduction at the step's end that no backward pass hides."""
    optimizer_bytes: float = field(default=30.0, metadata={"spread": 0.2})
    """Bytes read and written per parameter in an update."""
    micro_batch: float = 1e-3
    """Seconds of a micro-batch besides its layers."""
    step: float = 1e-2
    """Seconds of a step besides its micro-batches."""
    stragglers: float = 0.008
    """Share by which a step is longer per doubling of nodes."""
    bubble: float = field(default=1.0, metadata={"spread": 0.1})
    """Weight of pipeline fill and drain."""
    float8: float = field(default=0.6, metadata={"spread": 0.3})
    """Share of the float8 peak, of the share that bf16 reaches."""


def constant_names() -> list[str]:
    """Names of the constants, in order."""
    return [constant.name for constant in fields(Constants)]


def spread(name: str) -> float:
    """Standard deviation of the prior of a constant's logarithm; small for bytes that can be counted."""
    return float(next(constant for constant in fields(Constants) if constant.name == name).metadata.get("spread", 0.5))


def choose(condition: Any, then: Any, otherwise: Any) -> Numbers:
    """``then`` where a number or an array is true, else ``otherwise``."""
    if isinstance(condition, bool | int | float):
        return then if condition else otherwise
    import numpy as np

    chosen: NDArray[np.float64] = np.where(condition, then, otherwise)
    return chosen


def maximum(first: Any, second: Any) -> Numbers:
    """The larger of two numbers, element by element."""
    if isinstance(first, int | float) and isinstance(second, int | float):
        return max(first, second)
    import numpy as np

    largest: NDArray[np.float64] = np.maximum(first, second)
    return largest


def minimum(first: Any, second: Any) -> Numbers:
    """The smaller of two numbers, element by element."""
    return -maximum(-first, -second)
