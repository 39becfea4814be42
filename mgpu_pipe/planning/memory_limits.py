"""Checks that a run's worst rank fits into its GPU or host memory, and the changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mgpu_pipe.config.group_keys import ADAMW_BF16, PlanConfig, StrategyConfig
from mgpu_pipe.config.resolve import device_type, devices_per_node
from mgpu_pipe.config.schema import DataConfig, LaunchConfig, RunConfig, TrainerConfig
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.models.fields import check_model_config
from mgpu_pipe.planning.hardware_profile import load_profile
from mgpu_pipe.planning.memory import MemoryPlan, memory_by_rank
from mgpu_pipe.planning.memory_terms import GIB
from mgpu_pipe.system.hardware import host_memory, used_memory
from mgpu_pipe.topology import BatchPlan, ParallelDims

NAMED = 3
"""Most changes in a fix."""
MORE_NODES = (2, 4, 8, 16, 32, 64, 128)
KEY = "trainer.memory_check"


@dataclass(frozen=True)
class Machine:
    """The memory that a run finds.

    Attributes:
        sizes: bytes of each GPU of a node, the largest first, or of all CPU processes of a node together.
        host: bytes of a node's main memory.
        text: the machine, in words.
        gpus: GPUs of a node; None where more processes have no more memory.
    """

    sizes: tuple[int, ...]
    host: int
    text: str
    gpus: int | None


def machine_of(trainer: TrainerConfig, launch: LaunchConfig, plan: PlanConfig, elsewhere: bool) -> Machine | None:
    """The machine that a run starts on; None if its memory is not known.

    Args:
        elsewhere: nothing is started here; ``plan.hardware`` names the GPUs.

    Raises:
        ConfigError: no such hardware.
    """
    here = launch.type == "local" and not (elsewhere and plan.hardware)
    if device_type(trainer) == "cpu":
        checked = here or trainer.accelerator == "cpu"
        local = launch.type == "local" and checked
        return Machine((host_memory(),), host_memory(), "this machine", None) if local else None
    gpus = sorted((total for _, total in used_memory().values()) if here else (), reverse=True)
    if gpus:
        return Machine(tuple(gpus), host_memory(), "its GPU", len(gpus))
    if not plan.hardware:
        return None
    profile = load_profile(plan.hardware[0])
    host = int(profile.host_memory_gib * GIB)
    return Machine((profile.memory_bytes,), host, f"a GPU of plan.hardware={profile.name}", int(profile.gpus_per_node))


def memory_errors(config: RunConfig, elsewhere: bool) -> list[ConfigError]:
    """An error if the worst rank needs more than its device has, even by the low figure; it names changes that fit.

    Args:
        elsewhere: nothing is started here; the run may be for another machine with GPUs. Where it leaves the device
            open, a machine without GPUs refuses nothing: :func:`memory_notice` says what is missing here.
    """
    fit = predict_fit(config, elsewhere)
    if fit is None or config.trainer.memory_check != "refuse":
        return []
    plan, share, machine = fit.plan, fit.share, fit.machine
    if elsewhere and machine.gpus is None and config.trainer.accelerator != "cpu":
        return []
    processes = devices_per_node(config.trainer, config.strategy)
    if machine.gpus is not None and plan.host * processes > machine.host:
        reason = f"{processes} ranks of a node keep {gib(plan.host * processes)} in its memory of {gib(machine.host)}"
        fix = "use more nodes (trainer.num_nodes), optimizer=adamw_bf16 or peft=lora"
        return [ConfigError("strategy.offload", config.strategy.offload, fix, reason)]
    # Processes of the CPU share one memory: what one rank has too much, another may have too little.
    if (plan.low if machine.gpus is not None else plan.mean_low) <= share:
        return []
    changes = list(fitting_changes(config, machine))[:NAMED]
    settings = [f"{overrides} (about {gib(likely)})" for overrides, likely in changes]
    fix = f"try {', '.join(settings)}" if settings else f"use a smaller model, or more memory; or {KEY}=warn"
    reason = f"{_needs(plan)}, and {machine.text} has {gib(share)} for it"
    return [ConfigError("strategy.name", config.strategy.name, fix, reason)]


def memory_notice(fit: Fit | None, trainer: TrainerConfig) -> str:
    """A warning if a run may not fit; empty if it does, or if nothing is known."""
    if fit is None or trainer.memory_check == "off" or fit.plan.high <= fit.share:
        return ""
    space = f"{fit.machine.text} has {gib(fit.share)} for it"
    return f"{_needs(fit.plan)}, up to {gib(fit.plan.high)}; {space}: it may not fit"


def _needs(plan: MemoryPlan) -> str:
    largest = sorted(plan.terms.items(), key=lambda term: -term[1])[:4]
    assumed = f", if it is as assumed ({plan.assumes})" if plan.assumes else ""
    parts = ", ".join(f"{name} {gib(size)}" for name, size in largest)
    return f"a rank needs at least {gib(plan.low)}, likely {gib(plan.likely)} ({parts}){assumed}"


@dataclass(frozen=True)
class Fit:
    """The predicted memory of the worst rank next to its machine's.

    Attributes:
        share: bytes of the machine for one rank.
    """

    plan: MemoryPlan
    share: int
    machine: Machine

    @property
    def is_likely(self) -> bool:
        """Whether the worst rank fits by the likely figure."""
        return self.plan.likely <= self.share


def predict_fit(config: RunConfig, elsewhere: bool) -> Fit | None:
    """The prediction for a run; None if its memory or its machine is not known. See :func:`memory_errors`."""
    machine = machine_of(config.trainer, config.launch, config.plan, elsewhere)
    plan = predict_memory(config) if machine is not None else None
    if machine is None or plan is None:
        return None
    return Fit(plan, _share(config.trainer, config.strategy, machine), machine)


def predict_memory(config: RunConfig) -> MemoryPlan | None:
    """Memory of the worst rank; None if it is not known, or another check refuses the model."""
    if (config.model.type is None) == (config.model.path is None):
        return None
    try:
        check_model_config(config.model)
        return memory_by_rank(config)
    except BadInputError:
        return None


def _share(trainer: TrainerConfig, strategy: StrategyConfig, machine: Machine) -> int:
    processes = devices_per_node(trainer, strategy)
    if machine.gpus is None:
        return machine.sizes[0] // processes
    return machine.sizes[min(processes, len(machine.sizes)) - 1]  # CUDA counts the fastest GPUs first


def fitting_changes(config: RunConfig, machine: Machine) -> Iterator[tuple[str, int]]:
    """Overrides with which a run fits by the high figure, and its likely bytes: the cheapest change of each kind.

    Kinds that keep the result come first: recomputation, smaller micro-batches, sharding, offload, more nodes; then a
    shorter optimizer state and adapters.
    """
    for changes in _changes_by_kind(config, machine):
        for words in changes:
            try:
                changed = with_overrides(config, words)
                plan = memory_by_rank(changed)
            except BadInputError:  # no run that can start
                continue
            if plan is not None and _fits(plan, changed.trainer, changed.strategy, machine):
                yield " ".join(words), plan.likely
                break


def _fits(plan: MemoryPlan, trainer: TrainerConfig, strategy: StrategyConfig, machine: Machine) -> bool:
    """Whether the worst rank fits by the high figure, and a node's offloaded state into its host."""
    fits_host = plan.host * devices_per_node(trainer, strategy) <= machine.host
    return fits_host and plan.high <= _share(trainer, strategy, machine)


def _changes_by_kind(config: RunConfig, machine: Machine) -> Iterator[list[list[str]]]:
    """For each kind of change the lists of overrides to try, cheapest first.

    Sharding and all later kinds are tried alone, then with recomputation, with the smallest micro-batch, with both.
    """
    strategy, on_gpus = config.strategy, machine.gpus is not None
    recompute = [f"strategy.activation_checkpointing={mode}" for mode in ("selective", "full")]
    recompute = recompute[("none", "selective", "full").index(strategy.activation_checkpointing) :]
    smaller_batches = [
        [f"data.micro_batch_size={size}"]
        for size in _smaller_micro_batches(config.data, config.trainer, config.strategy)
    ]
    lighter: list[list[str]] = [[], *([word] for word in recompute), *smaller_batches[-1:]]
    lighter += [[recompute[-1], *smaller_batches[-1]]] if recompute and smaller_batches else []
    shards = _sharding(config.trainer, config.strategy)
    yield [[word] for word in recompute]
    yield smaller_batches
    yield lighter[-1:] if len(lighter) > 3 else []
    if shards is not None:
        yield [[*shards, *light] for light in lighter]
    dims = ParallelDims.from_config(config.trainer, strategy)
    only_data_parallel = dims.world_size > 1 and not dims.uses_model_axes
    is_adam = config.optimizer._target_.rpartition(".")[2] in ("Adam", "AdamW")
    if on_gpus and only_data_parallel and strategy.offload == "none" and strategy.engine == "mesh":
        yield [[*(shards or []), "strategy.offload=cpu", *light] for light in lighter]
    takes_zero = is_adam and config.model.compile is not True and config.precision.name in ("auto", "fp32", "bf16")
    # FSDP of one process gathers all weights at once, offloaded ones too.
    if on_gpus and dims.world_size == 1 and takes_zero and (strategy.offload == "none" or strategy.engine == "mesh"):
        yield [["strategy=zero3", "strategy.offload=cpu", *light] for light in lighter]
    if on_gpus:
        yield [
            [*(shards or []), f"trainer.num_nodes={config.trainer.num_nodes * factor}", *light]
            for factor in MORE_NODES
            for light in lighter
        ]
        devices = dims.world_size // config.trainer.num_nodes
        more = [number for number in (2, 4, 8) if devices < number <= (machine.gpus or 0)]
        yield [["strategy=fsdp", f"trainer.devices={number}", *light] for number in more for light in lighter]
    if is_adam and strategy.engine == "mesh":
        yield [[*chosen, "optimizer=adamw_bf16", *light] for chosen in ([], shards or []) for light in lighter]
    if config.peft.name in ("none", "lora"):
        names = ["lora", "qlora"] if config.peft.name == "none" else ["qlora"]
        chosen_shards: list[list[str]] = [[], shards or []]
        yield [[*chosen, f"peft={name}", *light] for name in names for chosen in chosen_shards for light in lighter]


def _sharding(trainer: TrainerConfig, strategy: StrategyConfig) -> list[str] | None:
    """Overrides that shard over all processes; None if that is not possible, or so already."""
    dims = ParallelDims.from_config(trainer, strategy)
    if dims.world_size == 1:
        return None
    if strategy.engine == "deepspeed":
        return ["strategy=zero3"] if strategy.deepspeed.stage < 3 else None
    if dims.dp_replicate == 1:
        return None
    if dims.uses_model_axes:
        return ["strategy.dp_replicate=1", f"strategy.dp_shard={dims.dp_replicate * dims.dp_shard}"]
    # A typed size overrides a preset.
    return ["strategy=fsdp", *(["strategy.dp_replicate=1"] if strategy.dp_replicate != "auto" else [])]


def _smaller_micro_batches(data: DataConfig, trainer: TrainerConfig, strategy: StrategyConfig) -> list[int]:
    dims = ParallelDims.from_config(trainer, strategy)
    plan = BatchPlan.resolve(data, dims.data_parallel_size, dims.pp)
    return [size for size in range(plan.micro_batch_size - 1, 0, -1) if plan.samples_per_process % size == 0]


def with_overrides(config: RunConfig, words: list[str]) -> RunConfig:
    """``config`` with overrides of :func:`fitting_changes`."""
    for word in words:
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        strategy = config.strategy
        if key == "strategy" and value == "fsdp":
            config = replace(
                config, strategy=replace(strategy, name="fsdp", engine="mesh", dp_replicate=1, dp_shard="auto")
            )
        elif key == "strategy":
            config = replace(
                config,
                strategy=replace(
                    strategy,
                    name=value,
                    engine="deepspeed",
                    dp_shard="auto",
                    deepspeed=replace(strategy.deepspeed, stage=3),
                ),
            )
        elif key == "optimizer":
            config = replace(config, optimizer=replace(config.optimizer, _target_=ADAMW_BF16))
        elif key == "peft":
            config = replace(config, peft=replace(config.peft, name=value))  # type: ignore[arg-type]
        else:
            typed: Mapping[str, int | str] = {name: int(value) if value.isdigit() else value}
            config = replace(config, **{section: replace(getattr(config, section), **typed)})
    return config


def gib(size: float) -> str:
    """Bytes in GiB, or below a tenth of one in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"
