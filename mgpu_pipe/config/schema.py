"""``RunConfig``: every user key with its type, its default and one line of documentation.

The composed Hydra configuration is converted into this tree by :mod:`mgpu_pipe.config.convert`, which refuses
unknown keys and wrong types. The documentation of a key is the string literal below its field; ``mgpu-pipe
schema`` reads it from there. Sizes that may be ``auto`` are typed ``int | Literal["auto"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from mgpu_pipe.config.data_sources import find_source
from mgpu_pipe.config.group_keys import (
    Auto,
    EvalConfig,
    OptimizerConfig,
    PeftConfig,
    PlanConfig,
    PrecisionConfig,
    SchedulerConfig,
    StrategyConfig,
    SweepConfig,
)
from mgpu_pipe.config.identity import CONTENT, FIXED, FREE, NOTICE, RECORDED
from mgpu_pipe.config.objective import description
from mgpu_pipe.errors import ConfigError


@dataclass
class RunOptions:
    name: str = "run"
    """Name of the run; its folders are outputs/<name>/<date>_<time>-<hash8>."""
    dir: str | None = None
    """Folder of this run; null generates it from name, time and hash. Not allowed with -m."""
    root: str = "outputs"
    """The folder that holds all runs."""
    starts_from: str | None = None
    """Experiment whose weights and tokenizer the run starts from: its latest finished run below run.root, or one that
    runs first."""
    tags: list[str] = field(default_factory=list)
    """Labels that mgpu-pipe runs filters by."""


@dataclass
class ModelConfig:
    name: str = field(default="custom", metadata=FREE)
    """Display name in tables and reports."""
    type: str | None = field(default=None, metadata=FIXED)
    """Hugging Face model_type (llama, gpt2, qwen3, mixtral, ...) of a model that starts from random weights."""
    path: str | None = field(default=None, metadata=CONTENT)
    """Hugging Face model to fine-tune (config.json, safetensors weights, tokenizer): a local folder, or its name on the
    Hub, <org>/<name>[@revision]; a run keeps the commit."""
    config: dict[str, Any] = field(default_factory=dict, metadata=FIXED)
    """Fields of the model's configuration class, checked against it; they override a folder's config.json."""
    bidirectional: bool = field(default=False, metadata=FIXED)
    """Each token of a decoder also sees the tokens after it, for vectors of texts; exports say is_causal=false."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = field(
        default="auto", metadata=RECORDED
    )
    """Attention kernel; auto is sdpa, and on GPUs torch's flash attention of packed documents."""
    flash_attention: Literal["fa2", "fa3"] = field(default="fa2", metadata=RECORDED)
    """Kernels of torch's flash attention on GPUs: its own, or FlashAttention 3 of the package flash-attn-3, on GPUs of
    compute capability 9.0."""
    freeze: list[str] = field(default_factory=list, metadata=NOTICE)
    """Patterns of parameter names (*, ?, [...]), or parts of the model (vision, audio, projector, language), that are
    not trained. Each must match a parameter."""
    compile: bool | Auto = field(default="auto", metadata=FREE)
    """Compile each block of the model with torch.compile, which needs a C++ compiler on CPU; auto compiles on GPUs,
    from 100M parameters on."""
    kernels: Literal["auto", "torch", "liger"] = field(default="auto", metadata=RECORDED)
    """Norms, rotary embeddings and gated feed-forward layers: torch's, or the Triton kernels of the package
    liger-kernel on GPUs; auto takes the latter where it is installed, knows the model and blocks are not compiled."""


@dataclass
class SyntheticConfig:
    num_documents: int = field(default=2000, metadata={"at_least": 1})
    """Documents that data=synthetic draws."""
    mean_length: int = field(default=200, metadata={"at_least": 1})
    """Mean document length in tokens; lengths are log-normal."""
    sigma: float = field(default=0.6, metadata={"at_least": 0})
    """Standard deviation of the logarithm of the length; 0 makes all documents equally long."""


@dataclass
class NumbersConfig:
    count: int = field(default=20000, metadata={"at_least": 1})
    """Numbers that data=number_words draws; each gives two pairs, digits to words and back."""
    digits: int = field(default=6, metadata={"at_least": 1, "at_most": 9})
    """Digits of the longest number."""


@dataclass
class DataConfig:
    source: str = field(default="stdlib_text", metadata=FIXED)
    """An option of conf/data (mgpu-pipe ls data), or a name that a plug-in registers."""
    paths: list[str] = field(default_factory=list, metadata=CONTENT)
    """Files or globs (text_files, parquet, and all sources named jsonl); also of a data set on the Hub,
    hf://datasets/<org>/<name>[@revision]/<file or glob>."""
    text_column: str = field(default="text", metadata=CONTENT)
    """Name of the text field (jsonl, parquet, labelled_jsonl); meta.text is the field text of the object meta too."""
    second_text_column: str | None = field(default=None, metadata=CONTENT)
    """Name of the second text's field, where a sample is a pair (labelled_jsonl)."""
    label_column: str = field(default="label", metadata=CONTENT)
    """Name of the field with the class, a text or a whole number (labelled_jsonl)."""
    classes: list[str] = field(default_factory=list, metadata=CONTENT)
    """Names of the classes by their numbers (labelled_jsonl); empty: the model folder's, else all in the data."""
    messages_column: str = field(default="messages", metadata=CONTENT)
    """Name of the list of {role, content} messages (chat_jsonl; of the prompt: preferences_jsonl, unpaired_jsonl)."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion"] = field(
        default="auto", metadata=CONTENT
    )
    """Form of a line's conversation (chat_jsonl); auto finds it by the columns."""
    source_column: str = field(default="source", metadata=CONTENT)
    """Name of the field with the text that the model reads (pairs_jsonl)."""
    target_column: str = field(default="target", metadata=CONTENT)
    """Name of the field with the answer that the model learns (pairs_jsonl)."""
    chat_template: str | None = field(default=None, metadata=CONTENT)
    """A Jinja file, or a name: chatml, llama3, qwen3, gemma3, mistral, paligemma, phi4, deepseek, plain; null is the
    tokenizer's own (chat_jsonl, preferences_jsonl, unpaired_jsonl)."""
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig, metadata=CONTENT)
    """Shape of the random documents of data=synthetic."""
    numbers: NumbersConfig = field(default_factory=NumbersConfig, metadata=CONTENT)
    """Numbers of data=number_words, spoken_chat, spoken_preferences and spoken_unpaired."""
    tokenizer: str = field(default="auto", metadata=CONTENT)
    """Tokenizer folder, tokenizer.json or name on the Hub; auto: the model's, else a BPE trained once on this data."""
    seq_len: int = field(default=256, metadata={**FIXED, "at_least": 1})
    """Tokens a sample; of pairs, tokens a source; of preferences, tokens of both conversations."""
    target_len: int | Auto = field(default="auto", metadata={**FIXED, "at_least": 1})
    """Tokens a target, of pairs; auto is data.seq_len."""
    on_too_long: Literal["auto", "refuse", "drop", "truncate", "split"] = field(default="auto", metadata=CONTENT)
    """Treatment of a text, conversation or caption longer than data.seq_len (target: data.target_len; recording:
    data.max_seconds): refuse the data, drop and count it, truncate its end, or split it into several samples. auto
    splits text without roles, truncates captions and drops samples that have an answer."""
    on_bad_sample: Literal["stop", "skip"] = field(default="stop", metadata=CONTENT)
    """A file, document, picture or recording that cannot be read: stop before training, or log, count and skip it."""
    packing: Literal["auto", "best_fit", "none"] = field(default="auto", metadata=FIXED)
    """best_fit packs whole documents into samples; none pads each document to a sample; auto is best_fit where the
    model's family keeps documents apart, else none."""
    global_batch_size: int = field(default=32, metadata={**FIXED, "at_least": 1})
    """Samples an optimizer step, over all processes; fixes the mathematics."""
    micro_batch_size: int | Literal["auto", "max"] = field(default="auto", metadata={**FREE, "at_least": 1})
    """Samples a process and forward pass; auto: the largest divisor of the process's share that is at most 8, and, with
    pp, leaves each stage two micro-batches; max: the largest that fits in memory, measured as the run starts."""
    balance: Literal["none", "cost"] = field(default="none", metadata=FREE)
    """How the samples of a step are dealt to processes and micro-batches: none, in their order; cost, so that each has
    as much attention to compute (packed text)."""
    validation_fraction: float = field(default=0.05, metadata={**CONTENT, "at_least": 0, "below": 1})
    """Share of the documents to hold out; 0 holds out none."""
    validation_paths: list[str] = field(default_factory=list, metadata=CONTENT)
    """Files or globs to evaluate on, instead of a share of the documents."""
    validation_max_samples: int | None = field(default=256, metadata={**RECORDED, "at_least": 1})
    """Most held-out samples of an evaluation; null takes all."""
    num_workers: int = field(default=0, metadata={**FREE, "at_least": 0})
    """Loader processes a rank; 0 loads in the training process, which is fastest for text."""
    tokenize_workers: int | Auto = field(default="auto", metadata={**FREE, "at_least": 1})
    """Processes that tokenise; auto uses one a core."""
    cache_dir: str | None = field(default=None, metadata=FREE)
    """Where tokenised data is kept; null: $MGPU_PIPE_CACHE, else mgpu_pipe in the user's cache folder."""

    def holds_conversations(self) -> bool:
        """Whether a chat template renders the samples."""
        source = find_source(self.source)
        return source is not None and source.holds_conversations

    def parts(self) -> Mapping[str, Any]:
        """Sources that this one mixes, by name; each has ``source``, ``paths`` and ``validation_paths``."""
        return {}

    def sample_text(self) -> str:
        """Description of a sample, for people."""
        packing = "one document a sample, padded" if self.packing == "none" else "packed by best fit"
        if self.target_tokens():
            return f"{self.seq_len} tokens a source, {self.target_tokens()} a target, padded"
        return f"{self.seq_len} tokens a sample, {packing}"

    def tokens(self) -> int:
        """Tokens of a sample with padding; 0 if samples have no tokens."""
        return self.seq_len + self.target_tokens()

    def target_tokens(self) -> int:
        """Tokens of a padded target; 0 unless samples are pairs."""
        source = find_source(self.source)
        if source is None or source.documents != "pairs":
            return 0
        return self.seq_len if self.target_len == "auto" else self.target_len


@dataclass
class ObjectiveConfig:
    """Keys of every objective; each objective has a subclass (:mod:`mgpu_pipe.config.objective`)."""

    name: str = field(default="causal_lm", metadata=FIXED)
    """An objective of mgpu-pipe ls objective, or a name that a plug-in registers."""

    def shrunk(self, tokens: int) -> Self:
        """These keys for a small run of ``verify`` with ``tokens`` tokens per micro-batch."""
        return self

    def model_errors(self, fields: Mapping[str, Any]) -> list[ConfigError]:
        """Errors of the objective with a model of these configuration fields."""
        return []

    def model_fields(self) -> Mapping[str, Any]:
        """Model configuration fields that the objective decides."""
        return {}

    def data_errors(self, data: DataConfig, model: ModelConfig) -> list[ConfigError]:
        """Errors of the objective with the run's data, which may depend on the model."""
        if getattr(data, "cache_features", False):
            return [ConfigError("data.cache_features", True, "use false", f"{self.name} computes them in every step")]
        return []

    def run_errors(self, config: RunConfig) -> list[ConfigError]:
        """Errors of the objective with the other keys of the run."""
        return []

    def adapter_errors(self, model: ModelConfig, peft: PeftConfig) -> list[ConfigError]:
        """Errors of the objective with the run's adapters."""
        return []

    def started_from(self, run: Path) -> Self | None:
        """These keys with the run of ``run.starts_from``; None if that run supplies the first weights instead."""
        return None

    def tokenizer_errors(self, folder: Path) -> list[ConfigError]:
        """Errors of the objective with the run's tokenizer in ``folder``."""
        return []

    def with_tokenizer(self, folder: Path) -> Self:
        """These keys with ``auto`` resolved by the run's tokenizer in ``folder``."""
        return self

    def untrained(self, sizes: Mapping[str, int]) -> list[str]:
        """Parameters (of ``sizes`` by name) on which the loss does not depend; Adam would make rounding a large
        gradient."""
        return []

    def reserved_ids(self) -> int:
        """Number of last ids of the vocabulary that no tokenizer may use."""
        return 0

    def folder_files(self, data: DataConfig, width: int) -> Mapping[str, Any]:
        """JSON files that other programs read in an exported folder, by path; hidden states are ``width`` wide."""
        return {}

    def prompts(self) -> tuple[list[str], int]:
        """Texts to continue after training, and the tokens of each continuation."""
        return [], 0


def causal_lm() -> ObjectiveConfig:
    keys: ObjectiveConfig = description("causal_lm").keys()
    return keys


@dataclass
class CheckpointConfig:
    every_n_steps: int | Auto | None = field(default=None, metadata={"at_least": 1})
    """Save every so many optimizer steps; null saves at the end (and on a signal) only. auto takes the number that
    plan.failure_hours makes best for the predicted step time."""
    every_n_minutes: float | None = field(default=None, metadata={"above": 0})
    """Save after the first step that ends so many minutes after the last save."""
    save_last: bool = True
    """Save after the last step."""
    keep_last: int = field(default=2, metadata={"at_least": 0})
    """Latest checkpoints to keep; the latest that a finite step followed always stays. 0 keeps all."""
    keep_every: int | None = field(default=None, metadata={"at_least": 1})
    """Keep each checkpoint whose step number is a multiple of this."""
    keep_best: int = field(default=0, metadata={"at_least": 0})
    """Also keep this many checkpoints with the best best_metric (the lowest, unless higher is better)."""
    best_metric: str = "val/loss"
    """Metric that keep_best ranks by."""
    frozen_weights: Literal["auto", "save", "leave_out"] = "auto"
    """Weights that model.freeze or adapters leave unchanged: save them, or leave them out and record their folder and
    the digest of its weights. auto leaves them out with adapters."""
    async_save: bool = True
    """Write in the background; training waits only for the copy to host memory. false waits for the write."""
    when_busy: Literal["wait", "skip"] = "wait"
    """If a save is due while the previous one is still being written: wait for it, or skip the new save."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """If a save fails (a full disk): stop the run, or warn and continue; a failed last save always stops it."""
    resume: str = "none"
    """none, auto (resume run.dir, else the latest run of run.name with the same model, data, objective, optimizer,
    scheduler and seed), or a run or step folder."""
    init_from: str | None = field(default=None, metadata=CONTENT)
    """Run, step or Hugging Face folder to load the weights from, without optimizer state."""
    verify: Literal["full", "size", "off"] = "full"
    """Check on loading: chunk hashes, file sizes, or nothing."""
    on_corruption: Literal["fallback", "stop"] = "fallback"
    """If a checkpoint is damaged: use the previous one, or stop."""

    def saves_on_the_way(self) -> bool:
        """Whether the run saves before its end."""
        return self.every_n_steps is not None or self.every_n_minutes is not None


def seconds_of(text: str) -> float | None:
    """Seconds of a DD:HH:MM:SS text; None for any other text."""
    parts = text.split(":")
    if len(parts) != 4 or not all(part.isdecimal() and len(part) < 6 for part in parts):
        return None
    days, hours, minutes, seconds = map(int, parts)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass
class TrainerConfig:
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    """auto is cuda where there is a GPU; gpu means cuda."""
    devices: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Processes a node; auto: 1 on CPU, all GPUs on CUDA."""
    num_nodes: int = field(default=1, metadata={"at_least": 1})
    """Nodes of the job."""
    max_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Optimizer steps to train for, counted from the start of the run."""
    max_epochs: int | None = field(default=None, metadata={"at_least": 1})
    """Passes over the data to train for, where max_steps is not given."""
    max_time: str | None = None
    """Longest time to train, DD:HH:MM:SS, over all attempts with a limit; then the run saves and counts as finished."""
    val_every_n_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Evaluate the held-out set every so many steps; null evaluates at the end only."""
    sample_every_n_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Continue the objective's prompts every so many steps, for samples.jsonl and the report; null: at the end only."""
    log_every_n_steps: int = field(default=1, metadata={"at_least": 1})
    """Write a row of metrics every so many steps."""
    gradient_clip_val: float | None = field(default=1.0, metadata={**NOTICE, "above": 0, "or": ", or null not to clip"})
    """Largest global gradient norm; null does not clip."""
    memory_check: Literal["refuse", "warn", "off"] = "refuse"
    """A run whose predicted memory exceeds that of its GPU, or of the host of CPU processes, by more than the
    uncertainty: refuse or warn; within the uncertainty both warn."""
    deterministic: bool = field(default=False, metadata=RECORDED)
    """Use deterministic algorithms only; slower on CUDA, makes runs bit-equal there."""
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """Progress on stderr; auto: a bar on a terminal, plain lines elsewhere."""
    profile: Literal["none", "times", "steps"] = "none"
    """times measures where the time of trainer.profile_steps goes; steps also writes a trace of them for each rank."""
    profile_steps: list[int] = field(default_factory=lambda: [3, 5])
    """First and last step that trainer.profile measures."""

    def max_seconds(self) -> float | None:
        """Seconds of max_time; None without a limit, or if it cannot be read."""
        return None if self.max_time is None else seconds_of(self.max_time)


@dataclass
class LaunchConfig:
    type: str = "local"
    """local (workers on this machine), slurm or torchrun (mgpu-pipe submit), or a name that a plug-in registers."""
    max_restarts: int = field(default=0, metadata={"at_least": 0})
    """Times a crashed group of workers is started again (never after a configuration error or a NaN)."""
    stop_timeout: float = field(default=60.0, metadata={"above": 0})
    """Seconds that workers get to save and leave after a stop signal."""
    collective_timeout: float = field(default=600.0, metadata={"above": 0})
    """Seconds after which a collective that not all ranks joined fails."""
    threads_per_worker: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Compute threads a worker; auto: usable cores (affinity, CPU quota) / workers on this machine, at least 1."""


@dataclass
class RunConfig:
    """A whole run: composed once, validated, frozen to <run>/config.yaml, read by every worker."""

    seed: int = field(default=1234, metadata={**FIXED, "at_least": 0, "at_most": 2**63 - 1})
    """Seeds weights, data order and sampling."""
    run: RunOptions = field(default_factory=RunOptions, metadata=FREE)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig, metadata=CONTENT)
    objective: ObjectiveConfig = field(default_factory=causal_lm, metadata=FIXED)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata=NOTICE)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig, metadata=NOTICE)
    peft: PeftConfig = field(default_factory=PeftConfig, metadata=FIXED)
    strategy: StrategyConfig = field(default_factory=StrategyConfig, metadata=FREE)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig, metadata=RECORDED)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=FREE)
    trainer: TrainerConfig = field(default_factory=TrainerConfig, metadata=FREE)
    eval: EvalConfig = field(default_factory=EvalConfig, metadata=FREE)
    logger: dict[str, Any] = field(default_factory=dict, metadata=FREE)
    """Lightning loggers by name, each a leaf with a _target_."""
    callbacks: dict[str, Any] = field(default_factory=dict, metadata=FREE)
    """Lightning callbacks by name, each a leaf with a _target_."""
    launch: LaunchConfig = field(default_factory=LaunchConfig, metadata=FREE)
    sweep: SweepConfig = field(default_factory=SweepConfig, metadata=FREE)
    plan: PlanConfig = field(default_factory=PlanConfig, metadata=FREE)
